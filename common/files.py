"""Files and folders that are written whole or not at all, hashes, and the lock on a run folder."""

from __future__ import annotations

import csv
import ctypes
import fcntl
import glob
import hashlib
import io
import json
import os
import platform
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from common.errors import UserError

# From linux/fcntl.h and linux/fs.h; Python has no function for it.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"


def nearest_folder(path: Path) -> Path:
    return next(parent for parent in [path, *path.absolute().parents] if parent.exists())


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk, so that a rename survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file so that readers see the old one or the new one, never a part of it.

    Without ``sync``, no time is spent on waiting for the disk, and a power failure may leave the
    old file or an empty one.
    """
    with writing_whole(path, sync=sync) as file:
        file.write(data)


@contextmanager
def writing_whole(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Like :func:`write_whole`, for files too large to be built in memory first."""
    # The pid alone does not identify a writer on a shared folder: every container counts its
    # processes from 1.
    aside = path.with_name(
        f".{path.name}.{platform.node()}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    )
    try:
        with aside.open("wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    if sync:
        sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with writing_whole(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(lines)
        writer.writerow(header)
        writer.writerows(rows)
        lines.detach()  # flushed, and left open for the one who made the file


def replace_folder(aside: Path, target: Path) -> None:
    """Put a finished folder in place of ``target``; an older one is removed after that.

    If ``target`` is a symbolic link, the link is replaced, and the folder that it leads to stays as
    it is.
    """
    # Before the rename: otherwise a power failure could leave the new name with empty files.
    for path in aside.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(aside)
    old = target.with_name(f".{target.name}.old")
    # Swapping the two folders in one step means that a reader finds one or the other. If the file
    # system cannot do that, there is no target for the moment between two renames.
    if target.exists() and swap(aside, target):
        _remove(aside)  # the older folder has this name now
    else:
        if target.exists():
            _remove(old)
            target.rename(old)
        try:
            aside.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    # Unless the two were swapped, the older folder is still there until the rename is on disk.
    sync_folder(target.parent)
    _remove(old)


def swap(one: Path, other: Path) -> bool:
    """Exchange what two names mean, in one step; False if this file system cannot do that."""
    libc = ctypes.CDLL(None, use_errno=True)
    both = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other)
    return hasattr(libc, "renameat2") and libc.renameat2(*both, _RENAME_EXCHANGE) == 0


@contextmanager
def writing_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder, which replaces ``target`` if the block succeeds.

    Its name cannot be guessed, so in a folder that others can write to, nobody can put a link in
    its place.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        yield aside
        aside.chmod(0o755)  # a temporary folder is private, but servers often run as another user
        replace_folder(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(target: Path) -> None:
    """Remove what killed processes left of :func:`writing_folder`.

    Call it only while no other process can be writing.
    """
    for left in target.parent.glob(f".{glob.escape(target.name)}.{'?' * 8}.tmp"):
        # Another user's may hold anything.
        if left.is_dir() and left.lstat().st_uid == os.geteuid():
            _remove(left)


def open_lock(path: Path) -> IO[bytes]:
    """Open a file to be locked, and make it if necessary; a symbolic link is not followed."""
    # In a folder that others can write to, a link might lead to a file of this user.
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")


def _remove(folder: Path) -> None:
    """Remove a folder if it is there."""
    # Of a link only the link, so that nobody writes through it later.
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def move_aside(folder: Path) -> Path:
    """Rename a folder to the first free name of ``folder.1``, ``folder.2``, ...; return that."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
    return target


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git has left a few lines of text in place of a large file."""
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        # Large pieces, for which other threads are not asked to make way all the time: each piece
        # may wait for the interpreter's lock twice, 5 ms each while another thread imports.
        piece = memoryview(bytearray(min(max(os.fstat(file.fileno()).st_size, 1), 16 * 2**20)))
        while length := file.readinto(piece):
            digest.update(piece[:length])
    return digest.hexdigest()


@contextmanager
def lock_run_folder(folder: Path, flag: str = "--output_dir") -> Iterator[None]:
    """Lock the folder that ``flag`` names; the lock ends with the process, even if that is killed.

    Raises:
        UserError: another process has locked it, it cannot be written, or its file system has no
            locks.
    """
    try:
        file = open_lock(folder / ".lock")
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); use another {flag}",
            code="not-writable",
        ) from error
    with file:
        try:
            # Not lockf: that lock ends as soon as this process closes any descriptor of the file.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder}: another run is training into this folder; use another {flag}",
                code="folder-in-use",
            ) from error
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be locked ({error.strerror}); mount it with locks (flock)",
                code="lock-unsupported",
            ) from error
        yield
