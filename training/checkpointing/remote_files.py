"""How ``torch.distributed.checkpoint`` writes to and reads from an fsspec file system."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
from collections.abc import Iterator
from typing import IO, Any

from torch.distributed.checkpoint import LoadPlan, LoadPlanner
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem
from torch.futures import Future

from training.checkpointing.safe_reading import SafeReader

# Bytes to read ahead: tensors are read in the order in which they are stored.
BLOCK_BYTES = 8 * 2**20


class HashedFiles(FileSystem):
    """DCP's view of the remote files, which hashes everything while it is written."""

    def __init__(self, files: Any, written: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self.fs = files
        self.written = written

    @contextlib.contextmanager
    def create_stream(self, path: str, mode: str) -> Iterator[Any]:
        options = {"block_size": BLOCK_BYTES} if "r" in mode else {}
        with self.fs.open(path, mode, **options) as stream:
            if "r" in mode:
                yield stream
                return
            # Hashed on the way: to hash the object later, it would have to be downloaded again.
            hashed = _HashedStream(stream)
            yield hashed
            self.written[path] = {"bytes": hashed.size, "sha256": hashed.sha256.hexdigest()}

    def mkdir(self, path: str) -> None:
        """Object stores have no folders, and creating a bucket is not our business."""

    def rename(self, path: str, new_path: str) -> None:
        # DCP writes .metadata under another name first, so its hash moves along.
        super().rename(path, new_path)
        self.written[new_path] = self.written.pop(path)


class _HashedStream:
    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.size += memoryview(data).nbytes
        return self.stream.write(data)

    # DCP asks for the offset of each tensor before it writes it.
    def tell(self) -> int:
        return self.size

    # Nothing to do: whoever opened the stream closes it, which completes the upload.
    def flush(self) -> None: ...

    def close(self) -> None: ...


class RemoteReader(SafeReader):
    """DCP's reader, reading tensors in file order and each in one piece."""

    def __init__(self, path: str, files: Any) -> None:
        super().__init__(path)
        self.fs, self.path = HashedFiles(files, {}), path

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:

        def place(item: Any) -> tuple[str, int]:
            stored = self.storage_data[item.storage_index]
            return stored.relative_path, stored.offset

        return super().read_data(
            dataclasses.replace(plan, items=sorted(plan.items, key=place)), planner
        )

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        # In one piece, because the driver makes another request after each seek.
        file.seek(sinfo.offset)
        return io.BytesIO(file.read(sinfo.length))
