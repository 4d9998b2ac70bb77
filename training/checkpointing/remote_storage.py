"""Checkpoints at an fsspec address, such as an S3 bucket: nothing is renamed, the manifest put last is what counts."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from fsspec.core import url_to_fs
from torch.distributed.checkpoint import FileSystemWriter, LoadPlan, LoadPlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem
from torch.futures import Future

from training.checkpointing.safe_reading import SafeReader
from training.checkpointing.storage import LATEST, MANIFEST, Storage, Unreachable, free_name, is_of_step, manifest_of

# Read ahead this far: tensors are read in the order in which they lie.
BLOCK_BYTES = 8 * 2**20


class RemoteStorage(Storage):
    """The checkpoints of one run at an address.

    Args:
        address: protocol, bucket and prefix; the driver takes credentials and endpoint from its usual variables.

    Raises:
        ImportError: the driver of this protocol is not installed.
        ValueError: no such protocol.
    """

    def __init__(self, address: str) -> None:
        self.location = address.rstrip("/")
        # Other ranks write here too, so a remembered listing would be wrong.
        self.files, self.root = url_to_fs(self.location, use_listings_cache=False)
        self.place = ""
        self.written: dict[str, dict[str, Any]] = {}

    def begin(self, step: int) -> None:
        """Choose the place of ``step``, and empty it of an earlier try."""
        self.discard(step)
        self._choose_place(step)

    def writer(self, step: int) -> StorageWriter:
        """Write tensors to the place of ``step``, one file a rank, each hashed while it is sent."""
        self._choose_place(step)
        # There is nothing to sync: without a file descriptor DCP would sync the whole machine.
        writer = FileSystemWriter(self.place, single_file_per_rank=True, sync_files=False)
        writer.fs, writer.path = _HashedFiles(self.files, self.written), self.place
        return writer

    def reader(self, path: str) -> StorageReader:
        """Read tensors of a checkpoint; no code in it is run."""
        return _Reader(path, self.files)

    def write_json(self, step: int, name: str, value: Any) -> None:
        """Write plain values to the place of ``step``."""
        data = json.dumps(value, indent=2, ensure_ascii=False).encode()
        self._put(f"{self.place}/{name}", data)
        self.written[f"{self.place}/{name}"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def hashes(self, step: int, prefix: str) -> dict[str, dict[str, Any]]:
        """The files that this rank wrote and whose names begin so: ``bytes`` and ``sha256`` of what was sent."""
        start = len(self.place) + 1
        names = [path[start:] for path in self.written if path.startswith(f"{self.place}/{prefix}")]
        return {name: self.written[f"{self.place}/{name}"] for name in names}

    def commit(self, step: int, files: dict[str, dict[str, Any]]) -> str:
        """Make a checkpoint of these files by putting their manifest, then ``latest``; returns its path."""
        manifest = manifest_of(step, files, self._sizes(self.place))
        self._put_whole(f"{self.place}/{MANIFEST}", json.dumps(manifest, indent=2).encode())
        self._put_whole(f"{self.location}/{LATEST}", f"{self.place.rsplit('/', 1)[-1]}\n".encode())
        return self.place

    def discard(self, step: int) -> None:
        """Remove what was written for ``step`` and has no manifest."""
        for name, is_whole in self._folders().items():
            if is_of_step(name, step) and not is_whole:
                self._remove(name)

    def move_aside(self, path: str) -> str:
        """Copy a checkpoint to the first free of ``PATH.1``, ``PATH.2``, ..., then remove it; returns the new name."""
        number, sizes = 1, self._sizes(path)
        with self._answering():
            while self.files.exists(target := f"{path}.{number}"):
                number += 1
            for name in sorted(sizes, key=lambda name: name == MANIFEST):
                self.files.cp_file(f"{path}/{name}", f"{target}/{name}")
        self._remove(path.rsplit("/", 1)[-1])
        return target

    def put_probe(self, name: str) -> None:
        """Write a small file."""
        self._put(f"{self.location}/{name}", b"\n")

    def sees_probe(self, name: str) -> bool:
        """Whether another rank's small file is seen from here."""
        with self._answering():
            return self.files.exists(f"{self.location}/{name}")

    def remove_probe(self, name: str) -> None:
        """Remove it again."""
        with self._answering():
            self.files.rm_file(f"{self.location}/{name}")

    def _choose_place(self, step: int) -> None:
        # No manifest appears during a save, so that all ranks choose alike.
        whole = {name: True for name, is_whole in self._folders().items() if is_whole}
        self.place = f"{self.location}/{free_name(step, whole)}"
        self.written = {path: known for path, known in self.written.items() if path.startswith(f"{self.place}/")}

    def _folders(self) -> dict[str, bool]:
        folders: dict[str, bool] = {}
        for file in self._sizes(self.location):
            folder, slash, name = file.partition("/")
            if slash:
                folders[folder] = folders.get(folder, False) or name == MANIFEST
        return folders

    def _sizes(self, path: str) -> dict[str, int]:
        with self._answering():
            start = len(self.files._strip_protocol(path)) + 1
            return {name[start:]: file["size"] for name, file in self.files.find(path, detail=True).items()}

    def _sha256(self, path: str, name: str) -> str:
        with self._answering(), self.files.open(f"{path}/{name}", "rb", block_size=BLOCK_BYTES) as file:
            sha256 = hashlib.sha256()
            while data := file.read(BLOCK_BYTES):
                sha256.update(data)
            return sha256.hexdigest()

    def _read(self, path: str, name: str) -> bytes:
        with self._answering():
            return self.files.cat_file(f"{path}/{name}")

    def _put(self, path: str, data: bytes) -> None:
        with self._answering():
            self.files.pipe_file(path, data)

    def _put_whole(self, path: str, data: bytes) -> None:
        """Put a file so that readers see all of it or none: not every driver sends a file in one piece."""
        aside = f"{path}.tmp"
        self._put(aside, data)
        with self._answering():
            self.files.mv(aside, path)

    def _remove(self, name: str) -> None:
        path = f"{self.location}/{name}"
        names = sorted(self._sizes(path), key=lambda name: name != MANIFEST)
        with self._answering():
            for file in names:
                self.files.rm_file(f"{path}/{file}")

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Turn what drivers raise, each its own kind, into errors of the system."""
        try:
            yield
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:
            raise Unreachable(" ".join(f"{type(error).__name__}: {error}".split())) from error


class _HashedFiles(FileSystem):
    """DCP's view of the remote files: what it writes is hashed on its way."""

    def __init__(self, files: Any, written: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self.fs = files
        self.written = written

    @contextmanager
    def create_stream(self, path: str, mode: str) -> Iterator[Any]:
        """Open a file, and keep size and hash of what was written."""
        options = {"block_size": BLOCK_BYTES} if "r" in mode else {}
        with self.fs.open(path, mode, **options) as stream:
            if "r" in mode:
                yield stream
                return
            hashed = _HashedStream(stream)
            yield hashed
            self.written[path] = {"bytes": hashed.size, "sha256": hashed.sha256.hexdigest()}

    def mkdir(self, path: str) -> None:
        """Do nothing: there are no folders, and a bucket is not for us to make."""

    def rename(self, path: str, new_path: str) -> None:
        """Rename a file, and what is known of it."""
        super().rename(path, new_path)
        self.written[new_path] = self.written.pop(path)


class _HashedStream:
    """A stream that is written from front to back."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.size += memoryview(data).nbytes
        return self.stream.write(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None: ...

    def close(self) -> None: ...


class _Reader(SafeReader):
    """DCP's reader, in the order in which tensors lie, each in one piece: every jump would be another request."""

    def __init__(self, path: str, files: Any) -> None:
        super().__init__(path)
        self.fs, self.path = _HashedFiles(files, {}), path

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of a plan."""

        def place(item: Any) -> tuple[str, int]:
            stored = self.storage_data[item.storage_index]
            return stored.relative_path, stored.offset

        return super().read_data(dataclasses.replace(plan, items=sorted(plan.items, key=place)), planner)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        file.seek(sinfo.offset)
        return io.BytesIO(file.read(sinfo.length))
