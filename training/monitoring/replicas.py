"""Replicas: what several ranks hold copies of is compared, bit by bit, so that a copy that drifts
is named.

Copies of the weights drift when memory or a processor flips a bit, when machines round differently,
or when code updates only one of them; nothing in the loss shows it. AdamW's moments are not
compared: one that differs shows in its weight a step later. Copies of the gradients differ when a
backward pass went past the wrapper that reduces them: a part of the model called directly, a
``no_sync`` left on, a parameter used after the reduction. Each copy then learns only from its own
rows.

A rank reads its tensors once and sends one number, a checksum, for each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common.errors import TrainingFailure
from training.config import TrainConfig
from training.distributed.failures import translate_errors
from training.distributed.ranks import Ranks
from training.monitoring.events import (
    CheckpointStarted,
    Event,
    EventStream,
    RunStarted,
    StepDone,
    Subscriber,
)
from training.monitoring.exporter import Exporter
from training.monitoring.phases import Phases
from training.monitoring.records import SavedCheckpoint

# A parameter's name; which of its shards, along each dimension that splits it.
Part = tuple[str, tuple[int, ...]]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements at a time, so that their intermediate results stay in the processor's cache.
CHUNK = 1 << 18
ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2 to the 64th over the golden ratio, as int64


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same on all ranks that hold it; ``odd``: those that differ from most, all in a tie."""

    name: str
    odd: list[int]
    holders: list[int]

    def __str__(self) -> str:
        others = [rank for rank in self.holders if rank not in self.odd]
        if not others:
            return f"{self.name} is not the same on {_listed(self.odd)}"
        return f"{self.name} on {_listed(self.odd)} is not that of {_listed(others)}"


class ReplicaCheck(Subscriber):
    """Compares the weights at the start, every ``--check_replicas_every`` steps and before each
    checkpoint.

    So every checkpoint was made from equal copies. ``copies`` are this rank's weights and running
    statistics (of BatchNorm), by name; all ranks have a check.
    """

    follows_steps = True

    def __init__(
        self,
        copies: Mapping[str, torch.Tensor],
        config: TrainConfig,
        ranks: Ranks,
        phases: Phases,
        exporter: Exporter,
        events: EventStream,
    ) -> None:
        self.copies = copies
        self.every = config.check_replicas_every if ranks.world_size > 1 else 0  # 0: never
        self.how_to_resume = config.how_to_resume
        self.ranks = ranks
        self.phases = phases
        self.exporter = exporter
        self.events = events
        self.equal_at = self.saved_at = -1

    def receive(self, event: Event) -> None:
        """Compare if it is time; a collective call."""
        match event:
            case StepDone(step):
                if self.every and step % self.every == 0:
                    self._check(step)
            # A step that is due may be saved too: the same copies need not be compared twice.
            case CheckpointStarted(step):
                if self.every and self.equal_at != step:
                    self._check(step)
            case SavedCheckpoint(step):
                self.saved_at = step
            case RunStarted(step):
                self.saved_at = step
                if self.every:
                    self._check(step)

    def _check(self, step: int) -> None:
        with self.phases("agree"), translate_errors(self.ranks, step):
            found = first_difference(self.copies, self.ranks)
        self.exporter.replica_checks.labels("different" if found else "equal").inc()
        # All ranks have the same answer, so they go on together, or raise the same error together.
        # Rank 0 prints it, and the others are quiet.
        if not found:
            self.equal_at = step
            return
        self.events.write_on_rank0("divergence", parameter=found.name, ranks=found.odd)
        when = f"after step {step}" if step else "before the first step"
        since = f" They were the same after step {self.equal_at}." if self.equal_at >= 0 else ""
        good = (
            f"The checkpoint of step {self.saved_at} is good and is kept. " if self.saved_at else ""
        )
        raise TrainingFailure(
            f"{when} the copies of the weights differ: {found}.{since} {good}To resume, "
            f"{self.how_to_resume}. "
            f"If it happens again on {_listed(found.odd)}, look for failing memory or a failing "
            "processor or GPU there",
            quiet=not self.ranks.is_first,
            code="replicas-differ",
        )


def check_gradient_sync(
    parameters: Mapping[str, nn.Parameter], ranks: Ranks, when: str = ""
) -> None:
    """Compare the gradients of all copies, bit by bit; called on every rank after a step's last
    backward pass.

    A shard is compared with the same shard; ``when`` is for the message, such as ``step 1``.

    Raises:
        TrainingFailure: they differ, on all ranks; the message names the first parameter and the
            ranks.
    """
    found = first_difference(
        {name: parameter.grad for name, parameter in parameters.items()}, ranks
    )
    if found:
        raise TrainingFailure(
            f"{f'{when}: ' * bool(when)}the gradients differ after their reduction: that of "
            f"{found}. A backward pass "
            "bypasses what reduces them: call the wrapped model, and do not use no_sync for a "
            "step's last micro-batch",
            quiet=not ranks.is_first,
            code="gradients-differ",
        )


def first_difference(tensors: Mapping[str, torch.Tensor | None], ranks: Ranks) -> Difference | None:
    """The first tensor that is not the same, bit by bit, on all ranks that hold it; a collective
    call.

    A shard is compared with the same shard; None differs from any tensor.
    """
    local = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()
    ]
    numbers = [checksum(tensor).to(ranks.device) for tensor in local if tensor is not None]
    # Stacked, so that the host waits for the device once.
    sums = iter(torch.stack(numbers).tolist() if numbers else [])
    # Which part of which tensor this rank holds, with its checksum. Everything after the gather is
    # the same on all ranks, so all of them return the same answer and none waits for another.
    own = [
        (_part_of(name, tensor), next(sums) if tensor is not None else None)
        for name, tensor in tensors.items()
    ]
    copies: dict[Part, dict[int, int | None]] = {}
    for rank, parts in enumerate(ranks.gather(own)):
        for part, number in parts:
            copies.setdefault(part, {})[rank] = number
    different = (_odd_ones(name, by_rank) for (name, _), by_rank in copies.items())
    return next(filter(None, different), None)


def _odd_ones(name: str, by_rank: Mapping[int, int | None]) -> Difference | None:
    counts = Counter(by_rank.values()).most_common()
    if len(counts) == 1:
        return None
    # The majority is taken to be right; without one, nothing says who is.
    is_tie = counts[0][1] == counts[1][1]
    odd = [rank for rank, number in by_rank.items() if is_tie or number != counts[0][0]]
    return Difference(name, odd, list(by_rank))


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """One number of all bits of a plain tensor and of their order, on its device: int64, ().

    The sum of the elements' bits, each times an odd number that depends on its position, modulo 2
    to the 64th. An odd factor has an inverse there, so a flipped bit or a single element that
    differs always changes the sum.
    """
    # Bits and not values: NaN is not equal to itself, and 0.0 equals -0.0, although they differ.
    bits = tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # Wraps around in int64, which is the arithmetic modulo 2 to the 64th that is wanted.
    for chunk in bits.split(CHUNK):
        # What came before is multiplied each time, so two chunks that change places are seen.
        total = total * ODD + (chunk * _factors(tensor.device)[: len(chunk)]).sum()
    return total


@lru_cache
def _factors(device: torch.device) -> torch.Tensor:
    """An odd number for each position of a chunk: int64, (CHUNK,)."""
    return (torch.arange(1, CHUNK + 1, device=device) * ODD) | 1


def _part_of(name: str, tensor: torch.Tensor | None) -> Part:
    # Ranks with the same coordinates along the dimensions that split a tensor hold the same shard
    # of it.
    if not isinstance(tensor, DTensor):
        return name, ()
    shards = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return name, tuple(
        -1 if placement.is_replicate() else coordinate for coordinate, placement in shards
    )


def _listed(ranks: Iterable[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
