"""Profiler: PyTorch's traces of a few steps on chosen ranks, and what they come to."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from common.errors import first_line
from training.monitoring.observer import Observer
from training.monitoring.profile_summary import (
    FOLDER,
    RankProfile,
    operator_table,
    rank_table,
    summarise,
    write_summary,
)
from training.monitoring.records import EpochMetrics

if TYPE_CHECKING:
    from training.config import TrainConfig
    from training.data.batching import MicroBatch
    from training.monitoring.console import Console
    from training.parallelism.distributed import Ranks
    from training.parallelism.strategy import StepResult
    from training.run.phases import Phases

FIRST_STEPS = 10  # in which caches warm up and buckets settle
_MEMORY_EVENTS = 100_000


class Profiler(Observer):
    """Records ``--profile`` steps; afterwards rank 0 prints and keeps what all recorded ranks found.

    The phases of a step are ranges of the trace. On a GPU a snapshot of its memory is kept as well, with where each
    piece was asked for. What goes wrong is one line, and ends no run.

    Args:
        config: which steps and which ranks.
        ranks: all of them make one.
        phases: of this rank.
        console: on rank 0.

    ``steps`` are those still to be recorded.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, phases: Phases, console: Console | None) -> None:
        self._config = config
        self._ranks = ranks
        self._phases = phases
        self._console = console
        self._folder = config.run_dir / FOLDER
        every, asked = range(ranks.world_size), config.profile_ranks
        self._chosen = set(every if asked == "all" else map(int, asked.split(",")))
        self.steps = range(0)
        self._profile: profile | None = None
        self._problem = ""

    def run_starts(self, step: int, total_steps: int, epochs: Sequence[EpochMetrics]) -> None:
        """Choose the steps."""
        if max(self._chosen) >= self._ranks.world_size:
            last = self._ranks.world_size - 1
            self._say(f"--profile_ranks {self._config.profile_ranks}: the ranks of this run are 0 to {last}")
        asked = self._config.profile
        first = self._config.profile_start or min(step + 1 + FIRST_STEPS, max(step + 1, total_steps - asked + 1))
        self.steps = range(first, min(first + asked - 1, total_steps) + 1)
        if first <= step or not self.steps:
            self.steps = range(0)
            self._say(f"--profile_start {first}: steps {step + 1} to {total_steps} are to be made; none is recorded")

    def step_begins(self, step: int) -> None:
        """Begin, where this rank is to."""
        if (
            self.steps
            and step >= self.steps.start
            and self._ranks.rank in self._chosen
            and not (self._profile or self._problem)
        ):
            self._guarded(self._start)

    def step_ends(self, step: int, micro_batches: Sequence[MicroBatch], result: StepResult) -> None:
        """After the last step, write and show what was found; all ranks take part."""
        if not self.steps or step < self.steps[-1]:
            return
        with self._phases("profile"):
            found = self._guarded(self._stop) if self._profile else None
            self.steps = range(0)
            gathered = self._ranks.gather(found or self._problem)
        for rank, problem in enumerate(gathered):
            if isinstance(problem, str) and problem:
                self._say(f"rank {rank}: no profile ({problem}); the run goes on")
        profiles = [found for found in gathered if isinstance(found, RankProfile)]
        if profiles and self._console:
            self._show(profiles, self._console)

    def close(self) -> None:
        """Drop a recording that the run's end has cut short."""
        if self._profile:
            self._guarded(self._leave)

    def _start(self) -> None:
        on_gpu = self._ranks.device.type == "cuda"
        self._folder.mkdir(parents=True, exist_ok=True)
        starting = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu)
        starting.start()
        self._profile = starting
        if on_gpu:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MEMORY_EVENTS)
        self._phases.mark = lambda name: record_function(f"phase/{name}")
        self._phases.take("profiler")

    def _leave(self) -> profile:
        stopped, self._profile = self._profile, None
        self._phases.mark = nullcontext
        stopped.stop()
        if self._ranks.device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
        return stopped

    def _stop(self) -> RankProfile:
        seconds = self._phases.take("profiler")
        seconds.pop("profile", None)
        first, last = self.steps[0], self.steps[-1]
        name = f"rank_{self._ranks.rank}_step_{first}_{last}"
        on_gpu = self._ranks.device.type == "cuda"
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}.memory.pickle"))
        stopped = self._leave()
        trace = self._folder / f"{name}.json.gz"
        _write_trace(stopped, trace)
        total = sum(seconds.values())
        return RankProfile(
            rank=self._ranks.rank,
            first_step=first,
            last_step=last,
            seconds=total,
            phases={phase: spent / total for phase, spent in seconds.items() if spent},
            trace=trace.name,
            **summarise(stopped.events(), on_gpu=on_gpu),
        )

    def _guarded(self, work: Callable[[], object]) -> RankProfile | None:
        """Do what may fail for many reasons, none of which is to end a run."""
        try:
            result = work()
        except Exception as error:
            self._problem = first_line(error)
            return None
        return result if isinstance(result, RankProfile) else None

    def _show(self, profiles: Sequence[RankProfile], console: Console) -> None:
        of = profiles[0]
        console.table(f"Profile of steps {of.first_step} to {of.last_step}", *rank_table(profiles))
        console.table(f"Costliest operators of rank {of.rank}", *operator_table(of))
        console.say(f"Traces for ui.perfetto.dev: {self._folder}")
        try:
            write_summary(self._config.run_dir, profiles)
        except OSError as error:
            console.say(f"{self._folder}: the summary of the profile could not be written ({error.strerror})")

    def _say(self, text: str) -> None:
        if self._console:
            self._console.say(text)


def _write_trace(stopped: profile, path: Path) -> None:
    """Write a trace as compressed JSON; raises OSError if it is not whole, of which the library says nothing."""
    plain = path.with_suffix("")
    try:
        stopped.export_chrome_trace(str(plain))
        with plain.open("rb") as source:
            source.seek(-2, 2)
            if not source.read().rstrip().endswith(b"}"):
                raise OSError(f"{plain} was cut short")
            source.seek(0)
            with gzip.open(path, "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target)
    finally:
        plain.unlink(missing_ok=True)
