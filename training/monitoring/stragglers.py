"""Stragglers: which rank is slower than the others, and in what.

A step ends for all when its slowest rank is done, and who is faster waits for it in a collective: the seconds of a
step, or of a whole backward pass, are the same on all ranks and name nobody (github.com/pytorch/pytorch/issues/71303).
Compared is what a rank does before it waits: getting its rows, its forward pass, its backward pass up to the last
gradient. Where the passes themselves are full of collectives, it is the time of a step in which none of them runs.
"""

from __future__ import annotations

import platform
import zlib
from collections.abc import Sequence
from statistics import fmean, median_low
from typing import TYPE_CHECKING

import torch
from torch import nn

from training.data.balance import Stopwatch
from training.fault_tolerance.failures import translate_errors
from training.monitoring.collectives import Collectives
from training.monitoring.exporter import COMPARED
from training.monitoring.observer import Observer
from training.monitoring.records import EpochMetrics, StepMetrics
from training.run.context import RunContext

if TYPE_CHECKING:
    from training.data.batching import MicroBatch
    from training.parallelism.strategy import StepResult

LOOKS_IN_A_ROW = 3
SLOW = 1.2  # times the median of the ranks; of two that is the faster one
LEAST_SECONDS = 0.01  # a step
PASSES = ("forward", "backward", "optimizer", "step")

Seconds = dict[str, float]  # a step, by phase
Slowness = dict[tuple[int, str], tuple[float, float]]  # of a rank in a phase: its seconds, the median


class Stragglers(Observer):
    """Compares the ranks every so many steps; one that is slow in several looks in a row is named, once.

    Args:
        context: whose ranks, strategy, phases, exporter, status, events and console are used.
        collectives: looks at one step in as many.
        every: optimizer steps between two looks.
    """

    def __init__(self, context: RunContext, collectives: Collectives, every: int) -> None:
        self.context = context
        self.ranks = context.ranks
        self.collectives = collectives
        self.every = every
        # Balanced ranks have rows by their speed: what is compared then is their seconds a token.
        self.by_tokens = context.config.balance == "auto"
        self.watches: dict[str, Stopwatch] = {}
        if (model := context.strategy.unsynchronized_model) is not None:
            device = self.ranks.device
            self.watches = {"forward": Stopwatch(model, device), "backward": BackwardStopwatch(model, device)}
        self.looks: dict[tuple[int, str], int] = {}  # in a row in which a rank was slow in a phase
        self._start_anew()

    def run_starts(self, step: int, total_steps: int, epochs: Sequence[EpochMetrics]) -> None:
        """Learn where the ranks are, and which do the same work: those of one stage of a pipeline."""
        stage = zlib.crc32(" ".join(self.context.strategy.parameters).encode())
        self.hosts, self.stages = zip(*self.ranks.gather((platform.node(), stage)), strict=True)

    def step_begins(self, step: int) -> None:
        """Leave out what came between two steps."""
        self.context.phases.take("stragglers")

    def step_ends(self, step: int, micro_batches: Sequence[MicroBatch], result: StepResult) -> None:
        """Add up what this rank did in a step before it waited."""
        spent = self.context.phases.take("stragglers")
        self.steps += 1
        self.tokens += sum(batch.input_ids.numel() for batch in micro_batches)
        self.data += spent.get("data", 0.0)
        if not self.watches and self.collectives.waited is not None:
            self.compute = sum(spent.get(phase, 0.0) for phase in PASSES) - self.collectives.waited

    def steps_agreed(self, steps: Sequence[StepMetrics]) -> None:
        """Look, when it is time."""
        if self.steps < self.every:
            return
        with self.context.phases("agree"), translate_errors(self.ranks, self.context.phases.step):
            everyone = self.ranks.gather((self.tokens, self._seconds()))
        self._start_anew()
        if self.by_tokens:
            everyone = at_even_shares(everyone)
        self._judge(compare([seconds for _, seconds in everyone], self.stages))

    def _start_anew(self) -> None:
        self.steps = self.tokens = 0
        self.data, self.compute = 0.0, None
        for watch in self.watches.values():
            watch.reset()

    def _seconds(self) -> Seconds:
        seconds = {"data": self.data / self.steps}
        seconds |= {phase: watch.seconds() / self.steps for phase, watch in self.watches.items()}
        return seconds if self.compute is None else {**seconds, "compute": self.compute}

    def _judge(self, found: Slowness) -> None:
        """Count looks, show this rank's own figures, and say who has become slow, or is so no longer."""
        for (rank, phase), (seconds, median) in found.items():
            is_slow = seconds > SLOW * median and seconds - median > LEAST_SECONDS
            before = self.looks.get((rank, phase), 0)
            self.looks[rank, phase] = before + 1 if is_slow else 0
            if rank == self.ranks.rank:
                self.context.exporter.slowness.labels(phase).set(seconds / median if median else 1.0)
            if self.looks[rank, phase] == LOOKS_IN_A_ROW:
                self._tell(rank, phase, seconds, median, slow=True)
            elif before >= LOOKS_IN_A_ROW and not is_slow:
                self._tell(rank, phase, seconds, median, slow=False)

    def _tell(self, rank: int, phase: str, seconds: float, median: float, *, slow: bool) -> None:
        where = f"rank {rank} on {self.hosts[rank]}"
        figures = f"{phase} takes {seconds:.3f} s a step, the median of the ranks {median:.3f} s"
        self.context.say(
            f"Straggler: {where} is slow: {phase} {seconds / max(median, 1e-9):.1f}x the median ({figures})."
            if slow
            else f"Straggler no more: {where} ({figures})."
        )
        fields = {"host": self.hosts[rank], "phase": phase, "seconds": seconds, "median": median, "slow": slow}
        self.context.events.agreed("straggler", slow_rank=rank, **fields)
        if rank == self.ranks.rank:
            self.context.exporter.straggler.labels(phase).set(int(slow))
            slow_in = [name for name in COMPARED if self.looks.get((rank, name), 0) >= LOOKS_IN_A_ROW]
            self.context.status.status.slow_phases = slow_in


class BackwardStopwatch(Stopwatch):
    """Seconds from the end of a forward pass to the gradient of the model's first parameter, the last to be there.

    Only then does DDP wait for what it began to reduce on the way.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        first.register_post_accumulate_grad_hook(self._gradient_is_there)

    def _begin(self, model: nn.Module, arguments: tuple) -> None:
        """Not before the forward pass."""

    def _end(self, model: nn.Module, arguments: tuple, output: torch.Tensor) -> None:
        self._began = self._now()

    def _gradient_is_there(self, parameter: nn.Parameter) -> None:
        self.laps.append((self._began, self._now()))


def compare(everyone: Sequence[Seconds], stages: Sequence[int]) -> Slowness:
    """Each rank's seconds in each phase beside the lower median of the ranks that do the same work.

    Args:
        everyone: seconds a step, by rank; a phase counts where all ranks of a stage measured it.
        stages: which ranks do the same work, by rank.
    """
    found: Slowness = {}
    for stage in set(stages):
        team = [rank for rank, other in enumerate(stages) if other == stage]
        for phase in COMPARED:
            if len(team) > 1 and all(phase in everyone[rank] for rank in team):
                median = median_low([everyone[rank][phase] for rank in team])
                found |= {(rank, phase): (everyone[rank][phase], median) for rank in team}
    return dict(sorted(found.items()))


def at_even_shares(everyone: Sequence[tuple[int, Seconds]]) -> list[tuple[int, Seconds]]:
    """What each rank's seconds would be if all had as many tokens, at its seconds a token."""
    mean = fmean(tokens for tokens, _ in everyone)
    return [
        (tokens, {phase: spent * mean / max(tokens, 1) for phase, spent in seconds.items()})
        for tokens, seconds in everyone
    ]
