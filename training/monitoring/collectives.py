"""Collectives: what a step's calls to the other ranks move and take, by operation, whoever makes them.

DDP's reducer and DTensors call theirs from C++, past any wrapper in Python; PyTorch's flight recorder sees all, but of
gloo no durations. The profiler sees both. It is told to record named ranges alone, of which a step has a few dozen, and
no operators, so that a look costs about a millisecond.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from training.monitoring.exporter import Exporter
from training.monitoring.observer import Observer
from training.monitoring.profile_summary import merged

if TYPE_CHECKING:
    from training.data.batching import MicroBatch
    from training.parallelism.strategy import StepResult

BACKENDS = ("gloo", "nccl")
# Of the profiler's names of types; those that are not here have one.
BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2, "short int": 2}


@dataclass(frozen=True)
class Collective:
    """One call: ``num_bytes`` that this rank handed over, and when it ran, in seconds of the profiler's clock."""

    operation: str
    num_bytes: int
    start: float
    end: float


class Collectives(Observer):
    """Looks at the collectives of each ``every``-th step, on all ranks of the same ones.

    Args:
        exporter: what counts them.
        backend: with ``nccl`` no seconds are known: its calls return before the GPU has begun.
        every: optimizer steps between two looks; 0 = none.
    """

    def __init__(self, exporter: Exporter, backend: str, every: int) -> None:
        self.exporter = exporter
        self.has_seconds = backend == "gloo"
        self.every = every
        self.waited: float | None = None  # seconds of the last step in which a collective ran; None if not looked at
        self._looks = False

    def step_begins(self, step: int) -> None:
        """Begin to record, if a look is due and nobody else profiles."""
        self.waited = None
        self._looks = self.every > 0 and step % self.every == 0 and not torch.autograd._profiler_enabled()
        if self._looks:
            self._looks = _start()

    def step_ends(self, step: int, micro_batches: Sequence[MicroBatch], result: StepResult) -> None:
        """Count what was recorded."""
        if not self._looks:
            return
        self._looks = False
        found = _stop()
        self.exporter.collective_steps.inc()
        for collective in found:
            seconds = collective.end - collective.start if self.has_seconds else None
            self.exporter.collective(collective.operation, collective.num_bytes, seconds)
        self.waited = covered_seconds(found) if self.has_seconds else None

    def close(self) -> None:
        """End a look that an error cut short."""
        if self._looks:
            _stop()


def covered_seconds(collectives: Iterable[Collective]) -> float:
    """Seconds in which at least one of them ran."""
    return sum(end - start for start, end in merged((one.start, one.end) for one in collectives))


def _start() -> bool:
    """Record named ranges from now on; false where this build of PyTorch cannot."""
    with contextlib.suppress(ImportError, AttributeError, TypeError, RuntimeError):
        from torch._C._profiler import (
            ProfilerActivity,
            ProfilerConfig,
            ProfilerState,
            RecordScope,
            _ExperimentalConfig,
        )

        # Shapes, but no memory, stacks, operations or modules.
        config = ProfilerConfig(
            ProfilerState.KINETO, True, False, False, False, False, _ExperimentalConfig(), "collectives"
        )
        torch.autograd._prepare_profiler(config, {ProfilerActivity.CPU})
        torch.autograd._enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})
        return True
    return False


def _stop() -> list[Collective]:
    """What was recorded since :func:`_start`."""
    found = []
    for event in torch.autograd._disable_profiler().events():
        backend, _, rest = event.name().partition(":")
        if backend in BACKENDS:
            inputs = zip(event.shapes(), event.dtypes(), strict=True)
            sizes = [prod(shape) * BYTES.get(dtype, 1) for shape, dtype in inputs]
            start = event.start_ns() / 1e9
            operation = rest.split(" ")[0].lstrip("_")
            found.append(Collective(operation, sum(sizes), start, start + event.duration_ns() / 1e9))
    return found
