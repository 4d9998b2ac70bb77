"""Stragglers: which rank is slower than the others, and in what; and the collectives in which the
others wait for it.

A step ends for all ranks when the slowest one is done, because the faster ones wait for it in a
collective: the seconds of a step, or of a whole backward pass, are the same on all ranks and name
nobody (github.com/pytorch/pytorch/issues/71303). So what is compared is what a rank does before it
waits: getting its rows, its forward pass, its backward pass up to the last gradient. If the passes
themselves are full of collectives, it is the time of a step in which none of them runs.
"""

from __future__ import annotations

import contextlib
import platform
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean, median_low

import torch
from torch import nn
from torch.autograd import DeviceType

from training.config import TrainConfig
from training.data.balance import Stopwatch
from training.distributed.failures import translate_errors
from training.monitoring.events import (
    CollectivesRecorded,
    Event,
    EventStream,
    RanksCompared,
    RunStarted,
    StepDone,
    StepsAgreed,
    StepStarted,
    Subscriber,
)
from training.monitoring.exporter import COMPARED
from training.monitoring.monitors import Monitors
from training.monitoring.profiler import merge_intervals
from training.monitoring.records import CollectiveUse

BACKENDS = ("gloo", "nccl")
# By the profiler's names of types; one byte for those that are not here.
BYTES = {
    "double": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "short int": 2,
}

CHECKS_IN_A_ROW = 3
SLOW = 1.2  # times the median of the ranks; with two ranks that is the faster one
LEAST_SECONDS = 0.01  # per step
PASSES = ("forward", "backward", "optimizer", "step")

Seconds = dict[str, float]  # per step, by phase
Slowness = dict[tuple[int, str], tuple[float, float]]  # by rank and phase: its seconds, the median


@dataclass(frozen=True)
class Collective:
    """One call: the ``num_bytes`` that this rank passed to it, and when it ran, in seconds of the profiler's clock."""

    operation: str
    num_bytes: int
    start: float
    end: float


class CollectiveRecorder(Subscriber):
    """Publishes the collectives of every ``every``-th step, of the same steps on all ranks.

    DDP's reducer and DTensors call theirs from C++, so no wrapper in Python sees them; PyTorch's
    flight recorder sees all, but knows no durations with gloo. The profiler sees both. It records
    only named ranges here, of which a step has a few dozen, and no operators, so that a recorded
    step costs about a millisecond more with gloo. With ``nccl`` a range only shows when a call was
    started; its seconds are those of NCCL's kernels, for which the profiler records the GPU too and
    the end of a recorded step waits for it.
    """

    follows_steps = True

    def __init__(self, events: EventStream, backend: str, every: int) -> None:
        self.events = events
        self.on_gpu = backend == "nccl"
        self.every = every
        # Seconds of the last step in which a collective ran; None if unknown.
        self.waited: float | None = None
        self._records = False

    def receive(self, event: Event) -> None:
        match event:
            case StepStarted(step):
                self.waited = None
                is_due = step % self.every == 0
                # PyTorch has one profiler per process: a step that --profile records is left to it.
                self._records = (
                    is_due
                    and not torch.autograd._profiler_enabled()
                    and _start_recording(on_gpu=self.on_gpu)
                )
            case StepDone(step):
                if not self._records:
                    return
                self._records = False
                calls, kernels = _stop_recording(on_gpu=self.on_gpu)
                self.waited = None if self.on_gpu else covered_seconds(calls)
                self.events.publish(
                    CollectivesRecorded(step, by_operation(calls, kernels if self.on_gpu else None))
                )

    def close(self) -> None:
        """End a recording that an error cut short."""
        if self._records:
            _stop_recording(on_gpu=self.on_gpu)


def by_operation(
    calls: Sequence[Collective], kernels: Sequence[Collective] | None
) -> dict[str, CollectiveUse]:
    """Calls and bytes of each operation; the seconds are those of its ``kernels``, or of its calls without a GPU."""
    found = {}
    for name in sorted({one.operation for one in (*calls, *(kernels or ()))}):
        own = [call for call in calls if call.operation == name]
        timed = (
            [kernel for kernel in kernels if kernel.operation == name]
            if kernels is not None
            else own
        )
        seconds = tuple(one.end - one.start for one in timed)
        found[name] = CollectiveUse(len(own), sum(call.num_bytes for call in own), seconds)
    return found


def covered_seconds(collectives: Iterable[Collective]) -> float:
    """Seconds in which at least one of them ran."""
    return sum(
        end - start for start, end in merge_intervals((one.start, one.end) for one in collectives)
    )


def operation_of_kernel(name: str) -> str | None:
    """The operation of a kernel of NCCL, such as ncclDevKernel_AllReduce_Sum_f32_RING_LL(...); None of any other."""
    found = re.match(r"nccl(?:Dev)?Kernel_([A-Za-z]+)", name)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found[1]).lower() if found else None


def _start_recording(*, on_gpu: bool) -> bool:
    """Record named ranges from now on, and a GPU's kernels; false if this build of PyTorch cannot."""
    # torch.profiler has no public way to record named ranges only (as of 2.13).
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
            ProfilerState.KINETO,
            True,
            False,
            False,
            False,
            False,
            _ExperimentalConfig(),
            "collectives",
        )
        activities = (
            {ProfilerActivity.CPU, ProfilerActivity.CUDA} if on_gpu else {ProfilerActivity.CPU}
        )
        torch.autograd._prepare_profiler(config, activities)
        torch.autograd._enable_profiler(config, activities, {RecordScope.USER_SCOPE})
        return True
    return False


def _stop_recording(*, on_gpu: bool) -> tuple[list[Collective], list[Collective]]:
    """The calls of collectives since the recording began, and the kernels that ran for them."""
    if on_gpu:
        torch.cuda.synchronize()  # what is still queued would be missing
    calls, kernels = [], []
    for event in torch.autograd._disable_profiler().events():
        start, seconds = event.start_ns() / 1e9, event.duration_ns() / 1e9
        if event.device_type() != DeviceType.CPU:
            # The GPU's timeline repeats the names of ranges; only kernels count.
            if operation := operation_of_kernel(event.name()):
                kernels.append(Collective(operation, 0, start, start + seconds))
            continue
        # Such as "gloo:all_reduce" or "nccl:_all_gather_base".
        backend, _, rest = event.name().partition(":")
        if backend in BACKENDS:
            inputs = zip(event.shapes(), event.dtypes(), strict=True)
            num_bytes = sum(prod(shape) * BYTES.get(dtype, 1) for shape, dtype in inputs)
            operation = rest.split(" ")[0].removeprefix("_").removesuffix("_base")
            calls.append(Collective(operation, num_bytes, start, start + seconds))
    return calls, kernels


class Stragglers(Subscriber):
    """Compares the ranks every ``every`` steps; one that is slow several times in a row is named,
    once.

    Args:
        model: whose passes wait for no other rank; None if the strategy has collectives in all of
            them.
        parameters: the names of those that this rank trains.
    """

    follows_steps = True

    def __init__(
        self,
        monitors: Monitors,
        config: TrainConfig,
        collectives: CollectiveRecorder,
        every: int,
        model: nn.Module | None,
        parameters: Iterable[str],
    ) -> None:
        self.monitors = monitors
        self.ranks = monitors.ranks
        self.collectives = collectives
        self.every = every
        # Balanced ranks have rows according to their speed, so their seconds per token are
        # compared.
        self.by_tokens = config.balance == "auto"
        self.watches: dict[str, Stopwatch] = {}
        # Ranks with the same parameters do the same work: those of one stage of a pipeline. Not
        # hash(), whose salt differs from process to process: equal names must give equal numbers.
        self.stage = zlib.crc32(" ".join(parameters).encode())
        # Other strategies communicate within their passes or, as zero1, in the optimizer.
        self.knows_own_time = model is not None and config.strategy == "ddp"
        if model is not None:
            device = self.ranks.device
            self.watches = {
                "forward": Stopwatch(model, device),
                "backward": BackwardStopwatch(model, device),
            }
        self.times_slow: dict[tuple[int, str], int] = {}  # in a row, by rank and phase
        self._reset()

    def _reset(self) -> None:
        self.steps = self.tokens = 0
        self.data, self.compute = 0.0, None
        self.elapsed = self.beside = 0.0  # seconds of steps and agreements; of data and optimizer
        for watch in self.watches.values():
            watch.reset()

    def receive(self, event: Event) -> None:
        """Add up what this rank did before it waited, and compare the ranks when it is time."""
        match event:
            case StepStarted():
                # Of what came between two steps, such as a save, only the agreement belongs to
                # them.
                agreed = self.monitors.phases.elapsed("stragglers").get("agree", 0.0)
                self.elapsed += agreed if self.steps else 0.0
            case StepDone():
                spent = self.monitors.phases.elapsed("stragglers")
                self.steps += 1
                self.tokens += sum(batch.input_ids.numel() for batch in event.micro_batches)
                self.data += spent.get("data", 0.0)
                self.elapsed += sum(spent.values())
                # On a GPU these are the seconds in which the CPU prepares work, most of them hidden
                # by the passes.
                if self.ranks.device.type == "cpu":
                    self.beside += (
                        spent.get("data", 0.0)
                        + spent.get("step", 0.0)
                        + spent.get("optimizer", 0.0)
                    )
                # If the passes are full of collectives (FSDP, tensor parallelism), their seconds
                # are no rank's own: take off those in which a collective ran, in the steps in which
                # they were recorded.
                if not self.watches and self.collectives.waited is not None:
                    self.compute = (
                        sum(spent.get(phase, 0.0) for phase in PASSES) - self.collectives.waited
                    )
            case StepsAgreed():
                if self.steps >= self.every:
                    self._compare_ranks()
            case RunStarted():
                self.hosts, self.stages = zip(
                    *self.ranks.gather((platform.node(), self.stage)), strict=True
                )

    def _compare_ranks(self) -> None:
        seconds = {"data": self.data / self.steps}
        seconds |= {phase: watch.seconds() / self.steps for phase, watch in self.watches.items()}
        if self.compute is not None:
            seconds["compute"] = self.compute
        with self.monitors.phases("agree"), translate_errors(self.ranks, self.monitors.phases.step):
            own = self.beside + sum(seconds.get(phase, 0.0) for phase in PASSES) * self.steps
            measured = self.ranks.gather((self.tokens, seconds, own, self.elapsed))
        by_rank = [(tokens, seconds) for tokens, seconds, _, _ in measured]
        efficiency = (
            scaling_efficiency([(tokens, own, all_) for tokens, _, own, all_ in measured])
            if self.knows_own_time
            else None
        )
        self._reset()
        self.monitors.events.publish(RanksCompared(self.monitors.phases.step, efficiency))
        # From here on every rank has all figures and comes to the same verdicts; each exports only
        # its own.
        if self.by_tokens:
            by_rank = at_equal_tokens(by_rank)
        self._judge(compare([seconds for _, seconds in by_rank], self.stages))

    def _judge(self, found: Slowness) -> None:
        """Export this rank's own figures, and report who has become slow or has recovered."""
        for (rank, phase), (seconds, median) in found.items():
            # Both must hold: a fifth of a phase that takes a millisecond is noise. And it must hold
            # for several checks in a row, since a machine may be busy with something else once.
            is_slow = seconds > SLOW * median and seconds - median > LEAST_SECONDS
            before = self.times_slow.get((rank, phase), 0)
            self.times_slow[rank, phase] = before + 1 if is_slow else 0
            if rank == self.ranks.rank:
                self.monitors.exporter.slowness.labels(phase).set(
                    seconds / median if median else 1.0
                )
            if self.times_slow[rank, phase] == CHECKS_IN_A_ROW:
                self._report(rank, phase, seconds, median, slow=True)
            elif before >= CHECKS_IN_A_ROW and not is_slow:
                self._report(rank, phase, seconds, median, slow=False)

    def _report(self, rank: int, phase: str, seconds: float, median: float, *, slow: bool) -> None:
        who = f"rank {rank} on {self.hosts[rank]}"
        figures = f"{phase} takes {seconds:.3f} s per step, the median of the ranks {median:.3f} s"
        self.monitors.say(
            f"Straggler: {who} is slow: {phase} {seconds / max(median, 1e-9):.1f}x the median "
            f"({figures})."
            if slow
            else f"No longer a straggler: {who} ({figures})."
        )
        fields = {
            "host": self.hosts[rank],
            "phase": phase,
            "seconds": seconds,
            "median": median,
            "slow": slow,
        }
        self.monitors.events.write_on_rank0("straggler", slow_rank=rank, **fields)
        if rank == self.ranks.rank:
            self.monitors.exporter.straggler.labels(phase).set(int(slow))
            slow_in = [
                name for name in COMPARED if self.times_slow.get((rank, name), 0) >= CHECKS_IN_A_ROW
            ]
            self.monitors.status.status.slow_phases = slow_in


class BackwardStopwatch(Stopwatch):
    """Seconds from the end of a forward pass to the gradient of the model's first parameter, which
    comes last.

    Only then does DDP wait for the reductions that it has started on the way.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        first.register_post_accumulate_grad_hook(
            lambda _: self.laps.append((self._began, self._now()))
        )

    def _begin(self, model: nn.Module, arguments: tuple) -> None:
        """The forward pass is not timed here."""

    def _end(self, model: nn.Module, arguments: tuple, output: torch.Tensor) -> None:
        self._began = self._now()


def compare(by_rank: Sequence[Seconds], stages: Sequence[int]) -> Slowness:
    """Each rank's seconds per step in each phase, with the lower median of the ranks that do the
    same work.

    ``stages``: by rank, the same number for ranks that do the same work. A phase counts if all
    ranks of a stage measured it.
    """
    found: Slowness = {}
    for stage in set(stages):
        team = [rank for rank, other in enumerate(stages) if other == stage]
        for phase in COMPARED:
            if len(team) > 1 and all(phase in by_rank[rank] for rank in team):
                # The lower one: with two ranks the slow one is compared with the fast one, and not
                # with a mean that is half its own.
                median = median_low([by_rank[rank][phase] for rank in team])
                found |= {(rank, phase): (by_rank[rank][phase], median) for rank in team}
    return dict(sorted(found.items()))


def scaling_efficiency(by_rank: Sequence[tuple[int, float, float]]) -> float:
    """What the ranks achieved together, over what they would have if none had waited for another.

    ``by_rank``: the tokens of each rank, the seconds that it spent on them itself, and the seconds
    that they took with the wait for others.
    """
    # Tokens per second, each at its own pace.
    ideal = sum(tokens / max(own, 1e-9) for tokens, own, _ in by_rank)
    achieved = sum(tokens for tokens, _, _ in by_rank) / max(
        1e-9, fmean(elapsed for _, _, elapsed in by_rank)
    )
    return min(1.0, achieved / max(ideal, 1e-9))


def at_equal_tokens(by_rank: Sequence[tuple[int, Seconds]]) -> list[tuple[int, Seconds]]:
    """What each rank's seconds would be if all had the same number of tokens, at its seconds per token."""
    mean = fmean(tokens for tokens, _ in by_rank)
    return [
        (tokens, {phase: spent * mean / max(tokens, 1) for phase, spent in seconds.items()})
        for tokens, seconds in by_rank
    ]
