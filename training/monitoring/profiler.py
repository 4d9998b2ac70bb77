"""Profiler: PyTorch's traces of a few steps on rank 0, and their summary.

The summary has the costliest operators, how much of the communication is hidden behind computation,
and how long a rank waited for data.
"""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from common.errors import first_line
from common.files import write_json
from training.monitoring.events import Event, RunStarted, StepDone, StepStarted, Subscriber
from training.monitoring.records import format_percent

if TYPE_CHECKING:
    from torch.autograd.profiler_util import EventList, FunctionEvent

    from training.config import TrainConfig
    from training.distributed.ranks import Ranks
    from training.monitoring.console import Console
    from training.monitoring.phases import Phases

FOLDER = "profile"
SUMMARY_FILE = "summary.json"
FIRST_STEPS = 10  # in which caches warm up and buckets settle
MOST_OPERATORS = 12
_MEMORY_EVENTS = 100_000
# A collective's name when gloo or NCCL runs it, and when torch asks for it.
_COMMUNICATION = ("gloo:", "nccl")
_ASKED = ("c10d::", "_c10d_functional::", "record_param_comms")
_PHASES = ("data", "forward", "backward", "optimizer")
_RANK_HEADINGS = (
    "Rank",
    "A step",
    "Data wait",
    "Forward",
    "Backward",
    "Optimizer",
    "Other",
    "Collectives",
    "Hidden",
)

Interval = tuple[float, float]
Table = tuple[list[str], list[list[str]]]  # headings, rows


@dataclass(frozen=True)
class Operator:
    """All calls of one operator; ``seconds`` exclude the operators that it called, ``share`` is of all operators."""

    name: str
    calls: int
    seconds: float
    share: float


@dataclass(frozen=True)
class RankProfile:
    """The profiled steps of one rank.

    ``phases``: shares of ``seconds``. ``communication``: seconds in which a collective was in
    progress, the wait for other ranks included. ``hidden``: the share of those in which operators
    ran too; None without communication.
    """

    rank: int
    first_step: int
    last_step: int
    seconds: float
    phases: dict[str, float]
    communication: float
    hidden: float | None
    operators: list[Operator]
    trace: str


class Profiler(Subscriber):
    """Records ``--profile`` steps of rank 0, and prints and keeps what was found.

    The phases of a step are ranges of the trace. On a GPU a snapshot of its memory is kept as well,
    with the place in the code that asked for each piece. A problem costs one line and does not end
    the run. All ranks have a profiler; ``console`` is on rank 0, ``steps`` are those still to be
    recorded.
    """

    follows_steps = True

    def __init__(
        self, config: TrainConfig, ranks: Ranks, phases: Phases, console: Console | None
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._phases = phases
        self._console = console
        self._folder = config.run_dir / FOLDER
        self._on_gpu = ranks.device.type == "cuda"
        self.steps = range(0)
        self._profile: profile | None = None
        self._problem = ""

    def receive(self, event: Event) -> None:
        match event:
            case StepStarted(step):
                # From the chosen step on, and not at it: a step whose rows are all left out
                # publishes nothing, so that very number may never come. So it is with the last one.
                is_chosen = self.steps and step >= self.steps.start and self._ranks.is_first
                if is_chosen and not (self._profile or self._problem):
                    self._try(self._start)
            case StepDone(step):
                if self.steps and step >= self.steps[-1]:
                    self._finish()
            case RunStarted(step, total_steps):
                # Ten steps after the first one of this process, or fewer in a short run.
                asked = self._config.profile
                first = min(step + 1 + FIRST_STEPS, max(step + 1, total_steps - asked + 1))
                self.steps = range(first, min(first + asked - 1, total_steps) + 1)
                if not self.steps:
                    self._say(f"--profile {asked}: no step is left to record")

    def close(self) -> None:
        """Drop a recording that the run's end has cut short."""
        if self._profile:
            self._try(self._stop_recording)

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        starting = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu
        )
        starting.start()
        # Only what has started is kept: a profiler that failed to start cannot be stopped either.
        self._profile = starting
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MEMORY_EVENTS)
        # While this is set, each phase of a step becomes a named range of the trace.
        self._phases.mark = lambda name: record_function(f"phase/{name}")
        # What went before is no part of the profile: from here on this reader's seconds count.
        self._phases.elapsed("profiler")

    def _stop_recording(self) -> profile:
        # Forgotten before it is stopped: if that fails, `close` must not try it a second time.
        stopped, self._profile = self._profile, None
        self._phases.mark = nullcontext
        stopped.stop()
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
        return stopped

    def _finish(self) -> None:
        """Write the trace, and show and keep its summary; a collective call."""
        with self._phases("profile"):
            found = self._try(self._write_profile) if self._profile else None
            self.steps = range(0)
            # Otherwise the others would wait in their next step, which would count as slow.
            self._ranks.barrier()
        if self._problem:
            self._say(f"rank 0: no profile ({self._problem}); the run continues")
        if not (found and self._console):
            return
        self._console.table(
            f"Profile of steps {found.first_step} to {found.last_step}", *rank_table([found])
        )
        self._console.table("Costliest operators of rank 0", *operator_table(found))
        self._say(f"Traces for ui.perfetto.dev: {self._folder}")
        try:
            write_json(self._folder / SUMMARY_FILE, {"ranks": [asdict(found)]})
        except OSError as error:
            self._say(
                f"{self._folder}: the summary of the profile could not be written "
                f"({error.strerror})"
            )

    def _write_profile(self) -> RankProfile:
        seconds = self._phases.elapsed("profiler")
        # This method runs in a phase of its own, which is no part of the recorded steps.
        seconds.pop("profile", None)
        total = sum(seconds.values())
        name = f"rank_{self._ranks.rank}_step_{self.steps[0]}_{self.steps[-1]}"
        # The snapshot comes first, because the end of the recording also ends the memory's history.
        if self._on_gpu:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}.memory.pickle"))
        stopped = self._stop_recording()
        trace = self._folder / f"{name}.json.gz"
        _write_trace(stopped, trace)
        events = stopped.events()
        return RankProfile(
            rank=self._ranks.rank,
            first_step=self.steps[0],
            last_step=self.steps[-1],
            seconds=total,
            phases={phase: spent / total for phase, spent in seconds.items() if spent},
            **communication(events, on_gpu=self._on_gpu),
            operators=_top_operators(events, on_gpu=self._on_gpu),
            trace=trace.name,
        )

    def _try(self, work: Callable[[], Any]) -> Any:
        """Do what may fail for many reasons, none of which should end a run."""
        try:
            return work()
        except Exception as error:
            self._problem = first_line(error)
            return None

    def _say(self, text: str) -> None:
        if self._console:
            self._console.say(text)


def _write_trace(stopped: profile, path: Path) -> None:
    """Write a trace as compressed JSON; raises OSError if it is cut short, which the library does not report."""
    plain = path.with_suffix("")
    try:
        stopped.export_chrome_trace(str(plain))
        with plain.open("rb") as source:
            source.seek(-2, 2)  # a complete trace is one JSON object, so it ends with a brace
            if not source.read().rstrip().endswith(b"}"):
                raise OSError(f"{plain} was cut short")
            source.seek(0)
            with gzip.open(path, "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target)
    finally:
        plain.unlink(missing_ok=True)


def communication(events: Iterable[FunctionEvent], *, on_gpu: bool) -> dict[str, Any]:
    """The fields ``communication`` and ``hidden`` of a profiler's events.

    On a GPU the times are those of the kernels that run there, on a CPU those of the operators.
    """
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    ran = [event for event in events if event.device_type == device]
    # Merged, because seconds in which two collectives or two operators run must not count twice.
    communicating = merge_intervals(
        (event.time_range.start, event.time_range.end)
        for event in ran
        if _communicates(event, on_gpu=on_gpu)
    )
    working = merge_intervals(
        interval for event in ran if _computes(event) for interval in _own_times(event)
    )
    microseconds = math.fsum(end - start for start, end in communicating)
    hidden = overlap(communicating, working) / microseconds if microseconds else None
    return {"communication": microseconds / 1e6, "hidden": hidden}


def _communicates(event: FunctionEvent, *, on_gpu: bool) -> bool:
    # gloo marks its work as an annotation, as user code would; NCCL's kernels are kernels.
    return event.name.startswith(_COMMUNICATION) and not (on_gpu and event.is_user_annotation)


def _computes(event: FunctionEvent) -> bool:
    # Of nested events only the innermost, or operators: an outer one, such as a node of autograd,
    # may be waiting.
    is_operator = event.name.startswith("aten::") or not event.cpu_children
    is_other = event.is_user_annotation or event.name.startswith(_COMMUNICATION + _ASKED)
    return is_operator and not is_other


def _own_times(event: FunctionEvent) -> Iterator[Interval]:
    """When an operator ran, the operators that it called excluded."""
    start = event.time_range.start
    for child in sorted(
        (child.time_range for child in event.cpu_children), key=lambda span: span.start
    ):
        yield start, child.start
        start = child.end
    yield start, event.time_range.end


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times, as rising intervals that do not touch."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """How long both are in progress; both as :func:`merge_intervals` returns them."""
    # Both are sorted: compare the current two, then advance the one that ends first.
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return total


def _top_operators(events: EventList, *, on_gpu: bool) -> list[Operator]:
    # The operators are those of the CPU in any case. On a GPU each has the time of the kernels that
    # it has started.
    averages = [
        a
        for a in events.key_averages()
        if a.device_type == DeviceType.CPU and not a.is_user_annotation
    ]
    seconds = {
        a.key: (a.self_device_time_total if on_gpu else a.self_cpu_time_total) / 1e6
        for a in averages
    }
    total = math.fsum(seconds.values()) or 1.0
    top = sorted(averages, key=lambda average: -seconds[average.key])[:MOST_OPERATORS]
    return [
        Operator(a.key, a.count, seconds[a.key], seconds[a.key] / total)
        for a in top
        if seconds[a.key] > 0
    ]


def read_summary(run_dir: Path) -> list[RankProfile]:
    """The profiles of a run, in the order of ranks; empty without ``--profile``."""
    path = run_dir / FOLDER / SUMMARY_FILE
    if not path.exists():
        return []
    ranks = json.loads(path.read_text(encoding="utf-8"))["ranks"]
    return [
        RankProfile(**{**rank, "operators": [Operator(**o) for o in rank["operators"]]})
        for rank in ranks
    ]


def rank_table(profiles: Sequence[RankProfile]) -> Table:
    rows = []
    for rank in profiles:
        shares = [rank.phases.get(name, 0.0) for name in _PHASES]
        # Collectives run beside the phases or within them, so their column is no part of the 100%.
        times = [*shares, max(0.0, 1 - sum(shares)), rank.communication / rank.seconds]
        hidden = "-" if rank.hidden is None else format_percent(rank.hidden, 1)
        step = rank.seconds / (rank.last_step - rank.first_step + 1)
        rows.append(
            [
                str(rank.rank),
                _milliseconds(step),
                *(format_percent(time, 1) for time in times),
                hidden,
            ]
        )
    return [*_RANK_HEADINGS], rows


def operator_table(profile: RankProfile) -> Table:
    rows = [
        [o.name, f"{o.calls:,}", _milliseconds(o.seconds), format_percent(o.share, 1)]
        for o in profile.operators
    ]
    return ["Operator", "Calls", "Own time", "Share"], rows


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
