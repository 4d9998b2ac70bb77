"""Where rows are read from and written to: folders, also shared by machines, or addresses."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from common.errors import UserError, first_line
from common.files import sha256_of, sync_folder, write_whole, writing_whole
from common.places import open_remote_files

_WILD = set("*?[")


def is_remote(address: str) -> bool:
    return "://" in address


def storage_of(address: str) -> Storage:
    """What reads and writes this address.

    Raises:
        UserError: it is an address of a kind whose driver is not installed.
    """
    return RemoteStorage(address) if is_remote(address) else LocalStorage()


@contextmanager
def _in_one_line(path: str) -> Iterator[None]:
    """Turn what the disk or the network answers into a line that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(
                f"{path}: {error.strerror}; free some space and run the same command again, "
                "finished parts are kept",
                code="score-disk-full",
            ) from error
        why = error.strerror or first_line(error)
        what = f"cannot be written ({why}); name another OUT"
        raise UserError(f"{path}: {what}", code="not-writable") from error


class Storage(Protocol):
    """A place for files. Their addresses are strings: paths, or what fsspec opens."""

    def is_folder(self, path: str) -> bool: ...
    def exists(self, path: str) -> bool: ...
    def open(self, path: str) -> BinaryIO: ...
    def names(self, folder: str) -> set[str]: ...
    def make_folder(self, folder: str) -> None: ...
    def write(self, path: str, data: bytes) -> None: ...
    def remove(self, path: str) -> None: ...
    def remove_folder(self, folder: str) -> None: ...

    def find(self, pattern: str) -> list[str]:
        """The files of a pattern, or all files below a folder, sorted; of a file, itself."""

    def absolute(self, path: str) -> str:
        """The one name of a file that may be written in several ways."""

    def plain(self, path: str) -> str:
        """The whole path, in which links keep their names."""

    def version(self, path: str) -> dict[str, Any]:
        """What changes when a file changes, cheap to ask for."""

    def checksum(self, path: str) -> str | None:
        """The SHA-256 of a file; None if it would have to be fetched for that."""

    def read(self, path: str) -> bytes | None:
        """A small file's contents; None if there is none."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a file unless it exists; of several processes that try, one gets True."""

    def writing(self, path: str, aside: str) -> AbstractContextManager[BinaryIO]:
        """Write a large file whole; until then it may lie at ``aside``, on the same file system."""


class LocalStorage:
    """Files of this machine, or of a folder that several machines mount."""

    def find(self, pattern: str) -> list[str]:
        path = Path(pattern)
        if path.is_dir():
            below = (file for file in path.rglob("*") if file.is_file())
            return sorted(str(file) for file in below if not file.name.startswith("."))
        if path.exists():  # a file may be named like a pattern
            return [pattern]
        # pathlib has no pattern that begins anywhere
        found = glob.glob(pattern, recursive=True)  # noqa: PTH207
        return sorted(file for file in found if Path(file).is_file())

    def is_folder(self, path: str) -> bool:
        return Path(path).is_dir()

    def absolute(self, path: str) -> str:
        return str(Path(path).resolve())

    def plain(self, path: str) -> str:
        return os.path.abspath(path)  # noqa: PTH100 - pathlib keeps ".."

    def open(self, path: str) -> BinaryIO:
        return Path(path).open("rb")

    def version(self, path: str) -> dict[str, Any]:
        # The time alone would miss a file that is replaced by one of the same age, such as a copy.
        status = Path(path).stat()
        return {"bytes": status.st_size, "modified": status.st_mtime_ns}

    def checksum(self, path: str) -> str | None:
        return sha256_of(Path(path))

    def exists(self, path: str) -> bool:
        return Path(path).exists()

    def read(self, path: str) -> bytes | None:
        try:
            return Path(path).read_bytes()
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> set[str]:
        try:
            return {path.name for path in Path(folder).iterdir()}
        except FileNotFoundError:
            return set()

    def make_folder(self, folder: str) -> None:
        with _in_one_line(folder):
            Path(folder).mkdir(parents=True, exist_ok=True)

    def write(self, path: str, data: bytes) -> None:
        with _in_one_line(path):
            write_whole(Path(path), data)

    def create(self, path: str, data: bytes) -> bool:
        aside = f"{path}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        with _in_one_line(path):
            try:
                Path(aside).write_bytes(data)
                try:
                    # A link of a whole file is there at once and with its contents, also on NFS.
                    os.link(aside, path)
                except OSError as error:
                    if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                        raise
                    # Some file systems, such as FAT, have no links. There the file is empty for a
                    # moment, in which a reader cannot tell whose claim it is.
                    with Path(path).open("xb") as file:
                        file.write(data)
            except FileExistsError:
                return False
            finally:
                Path(aside).unlink(missing_ok=True)
        return True

    @contextmanager
    def writing(self, path: str, aside: str) -> Iterator[BinaryIO]:
        with _in_one_line(path):
            with writing_whole(Path(aside)) as file:
                yield file
            # Only now: a job that is stopped before leaves no empty folder for its output.
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(aside).replace(path)
            sync_folder(Path(path).parent)

    def remove(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        # Another process of the same job may be removing it, too.
        shutil.rmtree(folder, ignore_errors=True)


class RemoteStorage:
    """Files at an fsspec address; an object is there whole or not at all."""

    def __init__(self, address: str) -> None:
        self._files = open_remote_files(address)

    def find(self, pattern: str) -> list[str]:
        try:
            found = self._files.glob(pattern) if set(pattern) & _WILD else self._files.find(pattern)
        except FileNotFoundError:
            return []
        except Exception as error:  # every driver has its own errors
            raise UserError(f"{pattern}: {first_line(error)}", code="score-address") from error
        return sorted(self._files.unstrip_protocol(path) for path in found)

    def is_folder(self, path: str) -> bool:
        return self._files.isdir(path)

    def absolute(self, path: str) -> str:
        return self._files.unstrip_protocol(self._files._strip_protocol(path))

    plain = absolute

    def open(self, path: str) -> BinaryIO:
        return self._files.open(path, "rb")

    def version(self, path: str) -> dict[str, Any]:
        info = self._files.info(path)
        # What a store offers differs. An ETag depends on the contents alone; the times change with
        # every copy, so they count only without one. As text, because some are no JSON.
        known = {
            name: str(info[name])
            for name in ("ETag", "etag", "LastModified", "mtime", "created")
            if name in info
        }
        tags = {name: value for name, value in known.items() if name.lower() == "etag"}
        return {"bytes": info["size"], **(tags or known)}

    def checksum(self, path: str) -> str | None:
        return None

    def exists(self, path: str) -> bool:
        return self._files.exists(path)

    def read(self, path: str) -> bytes | None:
        try:
            return self._files.cat_file(path)
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> set[str]:
        try:
            return {path.rsplit("/", 1)[-1] for path in self._files.ls(folder, detail=False)}
        except FileNotFoundError:
            return set()

    def make_folder(self, folder: str) -> None:
        with contextlib.suppress(FileExistsError):
            self._files.makedirs(folder, exist_ok=True)

    def write(self, path: str, data: bytes) -> None:
        with _in_one_line(path):
            self._files.pipe_file(path, data)

    def create(self, path: str, data: bytes) -> bool:
        with _in_one_line(path):
            try:
                self._files.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except OSError:
                # Some stores have an answer of their own for "it is there already".
                if self._files.exists(path):
                    return False
                raise
        return True

    @contextmanager
    def writing(self, path: str, aside: str) -> Iterator[BinaryIO]:
        # An object appears when it is closed, as a whole, so nothing has to lie aside.
        file = self._files.open(path, "wb")
        try:
            yield file
        except BaseException:
            # Closing would make an object of what was written so far.
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
            raise
        file.close()

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(path)

    def remove_folder(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(folder, recursive=True)
