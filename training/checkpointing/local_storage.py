"""Checkpoints in a folder: files are synced to disk, then the folder is renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, StorageReader, StorageWriter

from common.files import (
    lock_run_folder,
    move_aside,
    nearest_folder,
    sha256_of,
    sync_folder,
    write_json,
    write_whole,
)
from training.checkpointing.safe_reading import SafeReader
from training.checkpointing.storage import LATEST, MANIFEST, Storage, free_name, manifest_of


class LocalStorage(Storage):
    """The checkpoints of one run in a folder that its machines share; the first save makes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = str(folder)

    def lock(self) -> AbstractContextManager[None]:
        _make_folder(self.folder)
        return lock_run_folder(self.folder, "--checkpoint_dir")

    def begin(self, step: int) -> None:
        # What an earlier attempt at this step left: its files may be of another number of ranks.
        self.discard(step)
        _make_folder(self._aside(step))

    def writer(self, step: int) -> StorageWriter:
        return FileSystemWriter(self._aside(step), single_file_per_rank=True, sync_files=True)

    def reader(self, path: str) -> StorageReader:
        return SafeReader(path)

    def write_json(self, step: int, name: str, value: Any) -> None:
        write_json(self._aside(step) / name, value)

    def hashes(self, step: int, prefix: str) -> dict[str, dict[str, Any]]:
        found = {}
        for path in sorted(self._aside(step).glob(f"{prefix}*")):
            with path.open("rb") as file:
                # Needed for .metadata: DCP syncs it before Python has flushed its last bytes.
                os.fsync(file.fileno())
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                found[path.name] = {"bytes": os.fstat(file.fileno()).st_size, "sha256": sha256}
        return found

    def commit(self, step: int, files: dict[str, dict[str, Any]]) -> str:
        aside = self._aside(step)
        # Order matters if the power fails: every file is on disk before the manifest names it, the
        # manifest before the rename, and the rename before `latest` points to it.
        write_json(aside / MANIFEST, manifest_of(step, files, self._sizes(str(aside))))
        target = self.folder / free_name(step, self._folders())
        aside.rename(target)
        sync_folder(self.folder)
        write_whole(self.folder / LATEST, f"{target.name}\n".encode())
        return str(target)

    def discard(self, step: int) -> None:
        if self._aside(step).exists():
            shutil.rmtree(self._aside(step))

    def prune(self, keep_last: int, keep_every: int, best_step: int | None) -> None:
        super().prune(keep_last, keep_every, best_step)
        with contextlib.suppress(OSError):
            # Of processes that were killed while they saved. This run saves one at a time, and has
            # just committed that, so nobody is writing there.
            for leftover in self.folder.glob(".step_*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            for leftover in self.folder.glob(f".{LATEST}.*.tmp"):
                leftover.unlink(missing_ok=True)

    def move_aside(self, path: str) -> str:
        return str(move_aside(Path(path)))

    def put_probe(self, name: str) -> None:
        (nearest_folder(self.folder) / name).touch()

    def sees_probe(self, name: str) -> bool:
        return self._find_probe(name) is not None

    def remove_probe(self, name: str) -> None:
        if probe := self._find_probe(name):
            probe.unlink(missing_ok=True)

    def _find_probe(self, name: str) -> Path | None:
        # The nearest folder may be another one by now: a second run has created folders in between.
        folder = self.folder.absolute()
        return next(
            (parent / name for parent in [folder, *folder.parents] if (parent / name).exists()),
            None,
        )

    def _aside(self, step: int) -> Path:
        return self.folder / f".step_{step:08d}.tmp"

    def _folders(self) -> dict[str, bool]:
        if not self.folder.is_dir():
            return {}
        return {
            path.name: (path / MANIFEST).is_file()
            for path in self.folder.iterdir()
            if path.is_dir()
        }

    def _sizes(self, path: str) -> dict[str, int]:
        return {file.name: file.stat().st_size for file in Path(path).iterdir() if file.is_file()}

    def _sha256(self, path: str, name: str) -> str:
        return sha256_of(Path(path, name))

    def _read(self, path: str, name: str) -> bytes:
        return Path(path, name).read_bytes()

    def _remove(self, name: str) -> None:
        # Without its manifest the folder is no checkpoint anymore, so a removal that is interrupted
        # leaves no half of one.
        (self.folder / name / MANIFEST).unlink(missing_ok=True)
        sync_folder(self.folder / name)
        shutil.rmtree(self.folder / name)


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents; each directory entry is on disk before the next is made."""
    for missing in reversed(
        [level for level in [folder, *folder.absolute().parents] if not level.exists()]
    ):
        missing.mkdir(exist_ok=True)
        sync_folder(missing.parent)
