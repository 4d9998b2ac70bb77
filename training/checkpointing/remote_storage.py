"""Checkpoints at an address, such as a bucket's. The manifest, uploaded last, commits one."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, StorageReader, StorageWriter

from common.escaping import without_user
from common.places import open_remote_files
from training.checkpointing.remote_files import BLOCK_BYTES, HashedFiles, RemoteReader
from training.checkpointing.storage import (
    LATEST,
    MANIFEST,
    Storage,
    Unreachable,
    free_name,
    is_of_step,
    manifest_of,
)

# Marks a folder that is being written, or whose writer died. It is not a checkpoint, not even a
# damaged one.
UNFINISHED = "unfinished"


class RemoteStorage(Storage):
    """The checkpoints of one run at an address.

    The driver finds credentials and endpoint in its usual environment variables.
    """

    def __init__(self, address: str) -> None:
        self.files = open_remote_files(address, "--checkpoint_dir")
        # It is shown and recorded, so without a password: the driver has that.
        self.location = without_user(address.rstrip("/"))
        self.place = ""
        self.written: dict[str, dict[str, Any]] = {}

    def begin(self, step: int) -> None:
        self.discard(step)
        self._put(f"{self.location}/{free_name(step, self._folders())}/{UNFINISHED}", b"")

    def writer(self, step: int) -> StorageWriter:
        # Rank 0 has chosen the name. The mark that it put there shows the others which one it is.
        (name,) = (name for name in self._unfinished() if is_of_step(name, step))
        self.place = f"{self.location}/{name}"
        self.written = {}
        # There is nothing to sync, and without a file descriptor DCP would sync the whole machine.
        writer = FileSystemWriter(self.place, single_file_per_rank=True, sync_files=False)
        writer.fs, writer.path = HashedFiles(self.files, self.written), self.place
        return writer

    def reader(self, path: str) -> StorageReader:
        return RemoteReader(path, self.files)

    def write_json(self, step: int, name: str, value: Any) -> None:
        data = json.dumps(value, indent=2, ensure_ascii=False).encode()
        self._put(f"{self.place}/{name}", data)
        self.written[f"{self.place}/{name}"] = {
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }

    def hashes(self, step: int, prefix: str) -> dict[str, dict[str, Any]]:
        start = len(self.place) + 1
        names = [path[start:] for path in self.written if path.startswith(f"{self.place}/{prefix}")]
        return {name: self.written[f"{self.place}/{name}"] for name in names}

    def commit(self, step: int, files: dict[str, dict[str, Any]]) -> str:
        manifest = manifest_of(step, files, self._sizes(self.place))
        self._put_whole(f"{self.place}/{MANIFEST}", json.dumps(manifest, indent=2).encode())
        # The manifest counts, so a crash between these two lines leaves a complete checkpoint whose
        # mark nobody heeds.
        self._delete(f"{self.place}/{UNFINISHED}")
        self._put_whole(f"{self.location}/{LATEST}", f"{self.place.rsplit('/', 1)[-1]}\n".encode())
        return self.place

    def discard(self, step: int) -> None:
        for name in self._unfinished():
            if is_of_step(name, step):
                self._remove(name)

    def prune(self, keep_last: int, keep_every: int, best_step: int | None) -> None:
        super().prune(keep_last, keep_every, best_step)
        with contextlib.suppress(OSError):
            for name in self._unfinished():
                self._remove(name)

    def move_aside(self, path: str) -> str:
        """An object store cannot rename, so the checkpoint is copied and then removed."""
        number, sizes = 1, self._sizes(path)
        with self._drivers_raise_os_errors():
            while self.files.exists(target := f"{path}.{number}"):
                number += 1
            # The manifest last: until then the copy is no checkpoint.
            for name in sorted(sizes, key=lambda name: name == MANIFEST):
                self.files.cp_file(f"{path}/{name}", f"{target}/{name}")
        self._remove(path.rsplit("/", 1)[-1])
        return target

    def put_probe(self, name: str) -> None:
        self._put(f"{self.location}/{name}", b"\n")

    def sees_probe(self, name: str) -> bool:
        with self._drivers_raise_os_errors():
            return self.files.exists(f"{self.location}/{name}")

    def remove_probe(self, name: str) -> None:
        self._delete(f"{self.location}/{name}")

    def _folders(self) -> dict[str, bool]:
        contents = self._contents().items()
        # Those without a manifest and without a mark count as damaged checkpoints: somebody removed
        # their manifest. Those with a mark never were one.
        return {
            name: MANIFEST in held
            for name, held in contents
            if MANIFEST in held or UNFINISHED not in held
        }

    def _unfinished(self) -> list[str]:
        return [
            name
            for name, held in self._contents().items()
            if UNFINISHED in held and MANIFEST not in held
        ]

    def _contents(self) -> dict[str, set[str]]:
        folders: dict[str, set[str]] = {}
        for file in self._sizes(self.location):
            folder, slash, name = file.partition("/")
            if slash:
                folders.setdefault(folder, set()).add(name)
        return folders

    def _sizes(self, path: str) -> dict[str, int]:
        with self._drivers_raise_os_errors():
            start = len(self.files._strip_protocol(path)) + 1
            return {
                name[start:]: file["size"]
                for name, file in self.files.find(path, detail=True).items()
            }

    def _sha256(self, path: str, name: str) -> str:
        with (
            self._drivers_raise_os_errors(),
            self.files.open(f"{path}/{name}", "rb", block_size=BLOCK_BYTES) as file,
        ):
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _read(self, path: str, name: str) -> bytes:
        with self._drivers_raise_os_errors():
            return self.files.cat_file(f"{path}/{name}")

    def _put(self, path: str, data: bytes) -> None:
        with self._drivers_raise_os_errors():
            self.files.pipe_file(path, data)

    def _put_whole(self, path: str, data: bytes) -> None:
        """Upload so that readers see all of a file or nothing."""
        # Some drivers send a file in several pieces. The store then copies all of it or nothing.
        aside = f"{path}.tmp"
        self._put(aside, data)
        with self._drivers_raise_os_errors():
            self.files.mv(aside, path)

    def _remove(self, name: str) -> None:
        path = f"{self.location}/{name}"
        # If this is interrupted, a folder without a manifest keeps its mark.
        for file in sorted(
            self._sizes(path), key=lambda file: (file != MANIFEST, file == UNFINISHED)
        ):
            self._delete(f"{path}/{file}")

    def _delete(self, path: str) -> None:
        with self._drivers_raise_os_errors():
            self.files.rm_file(path)

    @contextlib.contextmanager
    def _drivers_raise_os_errors(self) -> Iterator[None]:
        """Turn the exceptions of drivers, which all have their own, into OSError."""
        try:
            yield
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:
            raise Unreachable(" ".join(f"{type(error).__name__}: {error}".split())) from error
