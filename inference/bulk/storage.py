"""Where rows are read from and written to: folders of this machine or shared by machines, or an fsspec address."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, Protocol, TypeVar

from common.errors import UserError, first_line
from common.files import sha256_of, sync_folder, write_whole, writing_whole
from common.places import open_remote_files

_WILD = set("*?[")
P = ParamSpec("P")
R = TypeVar("R")


def is_remote(address: str) -> bool:
    return "://" in address


def storage_of(address: str) -> Storage:
    """What reads and writes this address.

    Raises:
        UserError: it is an address of a kind whose driver is not installed.
    """
    return RemoteStorage(address) if is_remote(address) else LocalStorage()


def _in_one_line(method: Callable[P, R]) -> Callable[P, R]:
    """Turn what the disk or the network answers into a line that names the file."""

    @wraps(method)
    def called(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return method(*arguments, **named)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _unwritable(str(arguments[1]), error) from error

    return called


def _unwritable(path: str, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(
            f"{path}: {error.strerror}; free some space and run the same command again, finished parts are kept",
            code="score-disk-full",
        )
    why = error.strerror or first_line(error)
    return UserError(f"{path}: cannot be written ({why}); name another OUT", code="not-writable")


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
        """Write a large file whole; until it is complete it may lie at ``aside``, on the same file system."""


class LocalStorage:
    """Files of this machine, or of a folder that several machines mount."""

    def find(self, pattern: str) -> list[str]:
        if set(pattern) & _WILD and not Path(pattern).exists():
            # pathlib has no pattern that begins anywhere
            found = glob.glob(pattern, recursive=True)  # noqa: PTH207
            return sorted(path for path in found if Path(path).is_file())
        if not Path(pattern).is_dir():
            return [pattern] if Path(pattern).exists() else []
        below = (path for path in Path(pattern).rglob("*") if path.is_file())
        return sorted(str(path) for path in below if not path.name.startswith("."))

    def is_folder(self, path: str) -> bool:
        return Path(path).is_dir()

    def absolute(self, path: str) -> str:
        return str(Path(path).resolve())

    def plain(self, path: str) -> str:
        return os.path.abspath(path)  # noqa: PTH100 - pathlib keeps ".."

    def open(self, path: str) -> BinaryIO:
        return Path(path).open("rb")

    def version(self, path: str) -> dict[str, Any]:
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

    @_in_one_line
    def make_folder(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)

    @_in_one_line
    def write(self, path: str, data: bytes) -> None:
        write_whole(Path(path), data)

    @_in_one_line
    def create(self, path: str, data: bytes) -> bool:
        # A link of a whole file is there at once and with its contents, also on NFS.
        aside = f"{path}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        try:
            Path(aside).write_bytes(data)
            os.link(aside, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            try:  # a file system without links
                with Path(path).open("xb") as file:
                    file.write(data)
            except FileExistsError:
                return False
        finally:
            Path(aside).unlink(missing_ok=True)
        return True

    @contextmanager
    def writing(self, path: str, aside: str) -> Iterator[BinaryIO]:
        try:
            with writing_whole(Path(aside)) as file:
                yield file
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(aside).replace(path)
            sync_folder(Path(path).parent)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _unwritable(path, error) from error

    def remove(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)


class RemoteStorage:
    """Files at an fsspec address; an object is there whole or not at all."""

    def __init__(self, address: str) -> None:
        self._files = open_remote_files(address, code="score-address")

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

    @_in_one_line
    def write(self, path: str, data: bytes) -> None:
        self._files.pipe_file(path, data)

    @_in_one_line
    def create(self, path: str, data: bytes) -> bool:
        try:
            self._files.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except OSError:
            if self._files.exists(path):  # each store has its own answer for "it is there already"
                return False
            raise
        return True

    @contextmanager
    def writing(self, path: str, aside: str) -> Iterator[BinaryIO]:
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
