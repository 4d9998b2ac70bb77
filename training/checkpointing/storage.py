"""A place for checkpoints. One is complete or absent, and the newest complete one is found.

A checkpoint is a folder such as ``step_00000120`` with the files that every rank wrote,
``state.json``, and ``manifest.json`` with size and SHA-256 of each. The manifest is written last,
and readers ignore a folder without it. If a step is saved again, it gets the next free name,
``step_00000120-2``, so the older one stays valid until the newer one is.
"""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.checkpoint import StorageReader, StorageWriter

from common.errors import UserError
from training.checkpointing.retention import steps_to_keep

MANIFEST = "manifest.json"
LATEST = "latest"
FORMAT = 1
# The step, and from the second save of it on the number of the save. At least eight digits, so that
# the names sort like the steps.
_NAME = re.compile(r"step_(\d{8,})(?:-([1-9]\d*))?")


class Unreachable(OSError):
    """The storage does not respond, so nothing is known about its contents."""


class Storage(ABC):
    """The checkpoints of one run in one place.

    Files are written to a staging place until :meth:`commit`. Rank 0 begins, commits, discards and
    prunes; every rank writes. Paths are strings: a folder, or an address such as
    ``s3://bucket/run/step_00000120``.

    Raises:
        OSError: by every method, if the storage cannot be read or written.
    """

    location: str

    def lock(self) -> AbstractContextManager[None]:
        """Lock the storage for this run, if it can be locked."""
        return contextlib.nullcontext()

    @abstractmethod
    def begin(self, step: int) -> None: ...

    @abstractmethod
    def writer(self, step: int) -> StorageWriter:
        """DCP's writer to the staging place of ``step``, one file per rank."""

    @abstractmethod
    def reader(self, path: str) -> StorageReader:
        """DCP's reader of a checkpoint, which runs no code from it."""

    @abstractmethod
    def write_json(self, step: int, name: str, value: Any) -> None: ...

    @abstractmethod
    def hashes(self, step: int, prefix: str) -> dict[str, dict[str, Any]]:
        """``bytes`` and ``sha256`` of the files that this rank staged under this prefix."""

    @abstractmethod
    def commit(self, step: int, files: dict[str, dict[str, Any]]) -> str:
        """Make the staged files a checkpoint: manifest, name, ``latest``. Returns its path."""

    @abstractmethod
    def discard(self, step: int) -> None: ...

    @abstractmethod
    def move_aside(self, path: str) -> str:
        """Rename a checkpoint to the first free of ``PATH.1``, ``PATH.2``, ...; return that."""

    @abstractmethod
    def put_probe(self, name: str) -> None: ...

    @abstractmethod
    def sees_probe(self, name: str) -> bool:
        """Whether the small file that rank 0 wrote is visible here."""

    @abstractmethod
    def remove_probe(self, name: str) -> None: ...

    @abstractmethod
    def _folders(self) -> dict[str, bool]:
        """The name of every folder here, and whether it has a manifest."""

    @abstractmethod
    def _sizes(self, path: str) -> dict[str, int]: ...

    @abstractmethod
    def _sha256(self, path: str, name: str) -> str: ...

    @abstractmethod
    def _read(self, path: str, name: str) -> bytes: ...

    @abstractmethod
    def _remove(self, name: str) -> None:
        """Remove a folder, its manifest first: an interrupted removal leaves no checkpoint."""

    def steps(self) -> dict[int, str]:
        """The path of each step's checkpoint, complete or not."""
        return {
            step: f"{self.location}/{name}" for step, name in _newest_names(self._folders()).items()
        }

    def read_json(self, path: str, name: str) -> Any:
        return json.loads(self._read(path, name))

    def prune(self, keep_last: int, keep_every: int, best_step: int | None) -> None:
        """Remove the checkpoints that need not be kept, after a :meth:`commit`."""
        # What cannot be removed now is tried again after the next save.
        with contextlib.suppress(OSError):
            # Only complete checkpoints count. If none of them is kept, nothing is removed: a wrong
            # setting must not delete the last good checkpoint.
            folders = self._folders()
            whole = _newest_names({name: True for name, is_whole in folders.items() if is_whole})
            kept = {whole[step] for step in steps_to_keep(whole, keep_last, keep_every, best_step)}
            for name in sorted(folders):
                if _NAME.fullmatch(name) and kept and name not in kept:
                    self._remove(name)

    def find_damage(self, path: str, part: int = 0, parts: int = 1) -> str | None:
        """Why a checkpoint is not complete, or None; hashes the files part, part + parts, ...

        Raises:
            UserError: the storage does not respond.
        """
        try:
            return self._find_damage(path, part, parts)
        # A storage that does not respond says nothing about the checkpoint. If it counted as
        # damaged, the run would resume from an older one.
        except Unreachable as error:
            raise UserError(
                f"{path}: cannot be read now ({error}); rerun the same command when it can be read "
                "again",
                code="storage-unreachable",
            ) from error
        except FileNotFoundError:
            return f"{MANIFEST} is missing"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{MANIFEST} cannot be read ({error})"

    def _find_damage(self, path: str, part: int, parts: int) -> str | None:
        # Cheap checks first: manifest, names, sizes. Only a checkpoint that passes them is hashed.
        manifest = self.read_json(path, MANIFEST)
        files, sizes = manifest["files"], self._sizes(path)
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}"
        if not files:
            return f"{MANIFEST} names no files"
        named = _NAME.fullmatch(path.rsplit("/", 1)[-1])
        if named and int(named[1]) != manifest["step"]:
            return f"{MANIFEST} belongs to step {manifest['step']}"
        for name, expected in sorted(files.items()):
            if name not in sizes:
                return f"{name} is missing"
            if sizes[name] != expected["bytes"]:
                return f"{name} has {sizes[name]:,} bytes, not {expected['bytes']:,}"
        # Hashing reads every byte, so the ranks share it: rank r of n takes the files r, r + n, ...
        for name in sorted(files)[part::parts]:
            if damage := self._find_wrong_content(path, name, files[name]["sha256"]):
                return damage
        return None

    def _find_wrong_content(self, path: str, name: str, expected: str) -> str | None:
        try:
            is_same = self._sha256(path, name) == expected
        except Unreachable:
            raise
        except OSError as error:
            return f"{name} cannot be read ({error})"
        return None if is_same else f"{name} does not match its SHA-256"


def manifest_of(
    step: int, files: dict[str, dict[str, Any]], sizes: dict[str, int]
) -> dict[str, Any]:
    """The manifest, after checking that rank 0 sees every file in its full size."""
    for name, expected in files.items():
        if sizes.get(name) != expected["bytes"]:
            raise OSError(
                f"rank 0 sees {name} with {sizes.get(name, 0):,} of {expected['bytes']:,} bytes"
            )
    return {"format": FORMAT, "step": step, "files": dict(sorted(files.items()))}


def free_name(step: int, taken: dict[str, Any]) -> str:
    """The name for a checkpoint of ``step``, with a number larger than any existing one."""
    # Larger than all, not the first that is free: the higher number is the later save, even if
    # pruning has removed those between.
    tries = [
        int(match[2] or 1)
        for match in map(_NAME.fullmatch, taken)
        if match and int(match[1]) == step
    ]
    return f"step_{step:08d}-{max(tries) + 1}" if tries else f"step_{step:08d}"


def is_of_step(name: str, step: int) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and int(match[1]) == step


def _newest_names(folders: dict[str, bool]) -> dict[int, str]:
    """For each step the folder that was saved last, preferring those with a manifest."""
    found: dict[int, tuple[bool, int, str]] = {}
    for name, is_whole in folders.items():
        if match := _NAME.fullmatch(name):
            # The order of a tuple decides: a complete one wins over a later one that is not, which
            # may be what a killed save or a broken disk left.
            candidate = (is_whole, int(match[2] or 1), name)
            found[int(match[1])] = max(found.get(int(match[1]), candidate), candidate)
    return {step: name for step, (_, _, name) in found.items()}
