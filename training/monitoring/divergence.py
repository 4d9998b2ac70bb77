"""Divergence: what several ranks hold copies of is compared, bit by bit, so that a copy that drifts is named.

Copies drift when memory or a processor flips a bit, when machines round differently, or when code updates one of them
alone; nothing in the loss shows it. Compared are checksums: a rank reads its weights once and sends a number for each
parameter. AdamW's moments are not compared: one that differs shows in its weight a step later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from common.errors import TrainingFailure
from training.fault_tolerance.failures import translate_errors
from training.monitoring.events import EventLog
from training.monitoring.exporter import Exporter
from training.monitoring.observer import Observer
from training.monitoring.records import EpochMetrics, SavedCheckpoint
from training.parallelism.distributed import Ranks
from training.run.phases import Phases

if TYPE_CHECKING:
    from training.data.batching import MicroBatch
    from training.parallelism.strategy import StepResult

Part = tuple[str, tuple[int, ...]]  # a parameter's name; which of its shards, along each dimension that splits it
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 18  # numbers at a time: what they become in between stays in the processor's cache
ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2 to the 64th over the golden ratio, as int64


@dataclass(frozen=True)
class Difference:
    """What is not the same on the ranks that hold it; ``odd``: those that differ from most, of a tie all."""

    name: str
    odd: list[int]
    holders: list[int]

    def __str__(self) -> str:
        others = [rank for rank in self.holders if rank not in self.odd]
        if not others:
            return f"{self.name} is not the same on {_listed(self.odd)}"
        return f"{self.name} on {_listed(self.odd)} is not that of {_listed(others)}"


class ReplicaCheck(Observer):
    """Compares the weights at the start, each ``every``-th step and before each checkpoint, so that all are of equals.

    Args:
        parameters: this rank's, by their names.
        every: optimizer steps; 0 = never.
        ranks: all of them make one.
        phases: which it enters.
        exporter: what counts the comparisons.
        events: where a difference is written down.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        every: int,
        ranks: Ranks,
        phases: Phases,
        exporter: Exporter,
        events: EventLog,
    ) -> None:
        self.parameters = parameters
        self.every = every if ranks.world_size > 1 else 0
        self.ranks = ranks
        self.phases = phases
        self.exporter = exporter
        self.events = events
        self.equal_at = self.saved_at = -1

    def run_starts(self, step: int, total_steps: int, epochs: Sequence[EpochMetrics]) -> None:
        """Compare what the ranks start from."""
        self.saved_at = step
        self._check(step)

    def step_ends(self, step: int, micro_batches: Sequence[MicroBatch], result: StepResult) -> None:
        """Compare when it is time."""
        if self.every and step % self.every == 0:
            self._check(step)

    def checkpoint_begins(self, step: int) -> None:
        """Compare what is to be saved."""
        if self.equal_at != step:
            self._check(step)

    def checkpoint_saved(self, saved: SavedCheckpoint) -> None:
        """Know what there is to go back to."""
        self.saved_at = saved.step

    def _check(self, step: int) -> None:
        if not self.every:
            return
        with self.phases("agree"), translate_errors(self.ranks, step):
            found = first_difference(self.parameters, self.ranks)
        self.exporter.replica_checks.labels("different" if found else "equal").inc()
        if found:
            self._fail(step, found)
        self.equal_at = step

    def _fail(self, step: int, found: Difference) -> None:
        self.events.agreed("divergence", parameter=found.name, ranks=found.odd)
        when = f"after step {step}" if step else "before the first step"
        since = f" They were the same after step {self.equal_at}." if self.equal_at >= 0 else ""
        good = f"The checkpoint of step {self.saved_at} is good and is kept. " if self.saved_at else ""
        raise TrainingFailure(
            f"{when} the copies of the weights differ: {found}.{since} {good}To resume, rerun the same command. If "
            f"it comes back on {_listed(found.odd)}, look for a failing memory, processor or GPU there",
            quiet=not self.ranks.is_first,
            code="replicas-differ",
        )


def first_difference(tensors: Mapping[str, torch.Tensor | None], ranks: Ranks) -> Difference | None:
    """Find the first tensor that is not the same, bit by bit, on all ranks that hold it; a collective call.

    Args:
        tensors: this rank's, plain or DTensors; parts of a tensor are compared with the same parts. None differs from
            any tensor.
        ranks: all of them call this, each with the tensors that it holds, and get the same answer.
    """
    numbers = [checksum(_local(tensor)).to(ranks.device) for tensor in tensors.values() if tensor is not None]
    sums = iter(torch.stack(numbers).tolist() if numbers else [])  # one wait for the device
    mine = [(_part_of(name, tensor), next(sums) if tensor is not None else None) for name, tensor in tensors.items()]
    copies: dict[Part, dict[int, int | None]] = {}
    for rank, theirs in enumerate(ranks.gather(mine)):
        for part, number in theirs:
            copies.setdefault(part, {})[rank] = number
    return next((_difference(name, held) for (name, _), held in copies.items() if len(set(held.values())) > 1), None)


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """One number of all bits of a plain tensor and of their order, on its device: int64, ().

    A sum of the elements' bits, each times an odd number of its place, modulo 2 to the 64th: a flipped bit, or a single
    element that differs, always changes it.
    """
    bits = tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(CHUNK):
        total = total * ODD + (chunk * _factors(tensor.device)[: len(chunk)]).sum()
    return total


@lru_cache
def _factors(device: torch.device) -> torch.Tensor:
    """An odd number for each place of a chunk: int64, (CHUNK,)."""
    return (torch.arange(1, CHUNK + 1, device=device) * ODD) | 1


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _part_of(name: str, tensor: torch.Tensor | None) -> Part:
    """Ranks with the same coordinates along what splits a tensor hold the same part of it."""
    if not isinstance(tensor, DTensor):
        return name, ()
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return name, tuple(-1 if placement.is_replicate() else coordinate for coordinate, placement in places)


def _difference(name: str, held: Mapping[int, int | None]) -> Difference:
    counts: dict[int | None, int] = {}
    for number in held.values():
        counts[number] = counts.get(number, 0) + 1
    most = max(counts.values())
    usual = [number for number, count in counts.items() if count == most]
    odd = [rank for rank, number in held.items() if len(usual) > 1 or number != usual[0]]
    return Difference(name, odd, list(held))


def _listed(ranks: Iterable[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
