"""Events: what happened in a run and when, in the words of its ranks; and how long each part of a restart took."""

from __future__ import annotations

import math
import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import reason_to_record
from training.monitoring.json_lines import JsonLines, read_lines
from training.monitoring.observer import Observer
from training.monitoring.records import EpochMetrics, SavedCheckpoint, StepMetrics
from training.run.phases import Phases

if TYPE_CHECKING:
    from training.data.batching import MicroBatch
    from training.parallelism.distributed import Ranks
    from training.parallelism.strategy import StepResult

EVENTS_FILE = "events.jsonl"
# What is written of a loss after it, not by what was lost.
_AFTERMATH = ("failed", "hang", "stop_asked")


class EventLog(Observer):
    """Appends this rank's events to the run folder's ``events.jsonl``, which all ranks share.

    A line has ``time`` (Unix), ``rank``, ``restart``, ``step`` (steps done) and ``kind``, and what belongs to its kind.
    Until :meth:`writing` lines are kept back, since a run that cannot start writes nothing. No method raises: a full
    disk loses the line, not the run. Any thread may write. As an observer it is for rank 0.
    """

    def __init__(self, run_dir: Path, ranks: Ranks, phases: Phases, log_every: int = 1) -> None:
        self._lines = JsonLines(run_dir / EVENTS_FILE)
        self._kept: list[dict[str, Any]] | None = []
        self._ranks = ranks
        self._phases = phases
        self._log_every = log_every
        self._first_step = self._total_steps = 0
        for kind, when in ranks.milestones.items():
            self.agreed(kind, time=when, **({"process_started": process_started()} if kind == "imported" else {}))

    def write(self, kind: str, **fields: Any) -> None:
        """Write what happened to this rank; ``fields`` may hold another ``time`` or ``step`` than now's."""
        now = {"time": time.time(), "rank": self._ranks.rank, "restart": self._ranks.restart, "step": self._phases.step}
        event = {**now, "kind": kind, **fields}
        if self._kept is None:
            self._lines.write(event)
        else:
            self._kept.append(event)

    def agreed(self, kind: str, **fields: Any) -> None:
        """Write what all ranks know: rank 0 does."""
        if self._ranks.is_first:
            self.write(kind, **fields)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """From here on the folder is this run's; what raises is written down as ``failed``."""
        kept, self._kept = self._kept or [], None
        for event in kept:
            self._lines.write(event)
        try:
            yield
        except BaseException as error:
            self.write("failed", message=reason_to_record(error))
            raise

    def run_starts(self, step: int, total_steps: int, epochs: Sequence[EpochMetrics]) -> None:
        """Write where the run stands."""
        self._first_step, self._total_steps = step + 1, total_steps
        place = {"world_size": self._ranks.world_size, "host": platform.node(), "pid": os.getpid()}
        self.write("start", step=step, total_steps=total_steps, **place)

    def step_ends(self, step: int, micro_batches: Sequence[MicroBatch], result: StepResult) -> None:
        """Write this process's first step."""
        if step == self._first_step:
            self.write("first_step", step=step)

    def steps_agreed(self, steps: Sequence[StepMetrics]) -> None:
        """Write the steps that are due."""
        for metrics in steps:
            if metrics.step % self._log_every == 0 or metrics.step in (1, self._total_steps):
                self.write("step", **asdict(metrics))

    def epoch_ends(self, epoch: EpochMetrics) -> None:
        """Write an epoch with the figures of its validation."""
        fields = asdict(epoch)
        validation = fields.pop("validation")
        figures = {f"validation_{name}": validation.get(name) for name in ("loss", "accuracy", "macro_f1")}
        self.write("epoch", **fields, **figures)

    def checkpoint_failed(self, step: int) -> None:
        """Write that a checkpoint is not there."""
        self.write("checkpoint_failed")

    def checkpoint_saved(self, saved: SavedCheckpoint) -> None:
        """Write a checkpoint."""
        self.write("checkpoint", **asdict(saved))


def process_started() -> float:
    """Unix time at which this process began; NaN where the system does not tell (it does on Linux)."""
    try:
        after_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + after_boot
    except (OSError, AttributeError):
        return math.nan


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Read a run's events in the order in which they were written; torn lines are left out."""
    return read_lines(run_dir / EVENTS_FILE)


@dataclass(frozen=True)
class RestartSplit:
    """The moments of a restart, in Unix time; NaN for one that is not known.

    ``lost``: the last sign of life of the processes before. ``detected``: the launcher saw one of them gone. The rest
    are rank 0's: its process began, had read the program, stood in the process group, had data, model and checkpoint,
    and had done its first optimizer step.
    """

    lost: float
    detected: float
    started: float
    imported: float
    grouped: float
    loaded: float
    stepped: float

    def seconds(self) -> dict[str, float]:
        """How long each part took; ``rendezvous`` begins with ending the ranks that are left."""
        moments = list(asdict(self).values())
        names = ("detection", "rendezvous", "import", "group", "load", "first_step")
        parts = {name: after - before for name, (before, after) in zip(names, pairwise(moments), strict=True)}
        return parts | {"total": self.stepped - self.lost}


def restart_split(run_dir: Path, launcher_log: str = "") -> list[RestartSplit]:
    """Say of each start of a run but the first what its time went into.

    Args:
        run_dir: the run folder.
        launcher_log: what torchrun printed on the machine of the lost rank, for ``detected``.
    """
    attempts: list[list[dict[str, Any]]] = []
    for event in read_events(run_dir):
        if event["kind"] == "imported":
            attempts.append([])
        if attempts:
            attempts[-1].append(event)
    return [_split(before, after, launcher_log) for before, after in pairwise(attempts)]


def _split(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], launcher_log: str) -> RestartSplit:
    times = {event["kind"]: event["time"] for event in reversed(after)}  # of a kind's first event
    imported, started = after[0]["time"], after[0]["process_started"] or math.nan
    alive = [event["time"] for event in before if event["kind"] not in _AFTERMATH]
    seen = [when for when in _losses(launcher_log, imported) if alive[0] < when < imported]
    return RestartSplit(
        lost=max(alive),
        detected=seen[0] if seen else math.nan,
        started=started,
        imported=imported,
        grouped=times.get("group_formed", imported),
        loaded=times.get("start", math.nan),
        stepped=times.get("first_step", math.nan),
    )


def _losses(launcher_log: str, near: float) -> list[float]:
    """When torchrun saw a rank fail. Its lines name no year and count in local time: those of ``near`` are meant."""
    year = time.localtime(near).tm_year
    found = re.findall(r"^E(\d{4} \d\d:\d\d:\d\d)(\.\d+) .*failed \(exitcode:", launcher_log, re.MULTILINE)
    return [time.mktime(time.strptime(f"{year} {clock}", "%Y %m%d %H:%M:%S")) + float(rest) for clock, rest in found]
