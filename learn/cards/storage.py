"""Where a run keeps what can be looked at: JSON for values, safetensors for tensors, by pipeline,
node and rank.

iris/prepare/prepared.safetensors          of a local card
iris/allreduce/rank_0/before.json          of a distributed card: what rank 0 held before it
iris/allreduce/first/rank_0/before.json    of a card of the training loop, in the first pass
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from common.errors import UserError
from common.files import write_whole

# Marks a folder that a run made, so that a later run may empty it.
MARK = ".cards"


class Storage:
    """One card's part of a run's folder: reads from everywhere, writes only to its own place.

    What it saves has a key, the path without its ending, relative to the folder:
    ``forward/rank_0/batch``.

    Args:
        rank: of the process that the card runs in; None for a local card, or to read all ranks.
        live: what no file can hold, kept by a rank from card to card: model, optimizer, the graph
            of a forward pass.
        recording: if false, nothing is written: most passes of the training loop are not looked at.
    """

    def __init__(
        self,
        folder: Path,
        node: str = "",
        rank: int | None = None,
        *,
        live: dict[str, Any] | None = None,
        recording: bool = True,
    ) -> None:
        self.folder = folder
        self.node = node
        self.rank = rank
        self.live = {} if live is None else live
        self.recording = recording

    def begin_run(self) -> None:
        """Make an empty folder, deleting what an earlier run left in it."""
        # Never delete what is not ours: a mistyped --output would cost someone their files.
        if self.folder.exists() and not (self.folder / MARK).exists():
            raise UserError(
                f"{self.folder}: already exists and is not a run of cards; choose another --output",
                code="output-not-empty",
            )
        try:
            with suppress(FileNotFoundError):
                shutil.rmtree(self.folder)
            self.folder.mkdir(parents=True)
            (self.folder / MARK).touch()
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
            raise UserError(f"{self.folder}: {problem}", code="not-writable") from error

    def at(self, node: str) -> Storage:
        return Storage(self.folder, node)

    def key(self, name: str, rank: int | None = None) -> str:
        rank = self.rank if rank is None else rank
        return "/".join([self.node, *([] if rank is None else [f"rank_{rank}"]), name])

    def save(self, name: str, value: Any) -> str:
        """Write a value as JSON, atomically; returns its key."""
        key = self.key(name)
        if self.recording:
            self._write(f"{key}.json", json.dumps(value, indent=2, ensure_ascii=False).encode())
        return key

    def save_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> str:
        """Write tensors as safetensors, atomically; returns their key."""
        key = self.key(name)
        if self.recording:
            # safetensors writes a tensor's memory as it is, so it must be contiguous.
            plain = {label: tensor.detach().cpu().contiguous() for label, tensor in tensors.items()}
            self._write(f"{key}.safetensors", save(plain))
        return key

    def load(self, key: str) -> Any:
        return json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))

    def tensors(self, key: str) -> dict[str, torch.Tensor]:
        """The tensors under any card's key, sorted by name."""
        # Sorted because a file may return empty tensors in any order, and ranks that run a
        # collective per tensor must go through them in the same order.
        return dict(sorted(load_file(self.folder / f"{key}.safetensors").items()))

    def of_ranks(self, name: str) -> list[Any]:
        """What each rank of this card saved as JSON under a name."""
        return [self.load(self.key(name, rank)) for rank in self.ranks()]

    def ranks(self) -> range:
        return range(len(list((self.folder / self.node).glob("rank_*"))))

    def first_pass(self) -> Storage:
        """This card's part as it was after its first pass of the training loop."""
        return Storage(self.folder, f"{self.node}/first", self.rank)

    def keep_first_pass(self) -> None:
        """Copy what the ranks saved, before a later pass overwrites it."""
        for rank in self.ranks():
            source = self.folder / self.node / f"rank_{rank}"
            copy = self.folder / self.node / "first" / source.name
            shutil.copytree(source, copy, dirs_exist_ok=True)

    def _write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without waiting for the disk: a pass writes hundreds of files, and a run is not resumed
        # after a power cut.
        write_whole(path, data, sync=False)
