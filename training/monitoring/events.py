"""Events: what happens in a run, published once. ``events.jsonl`` is their record; everything else reads along."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import reason_to_record
from common.files import write_whole
from common.processes import process_fields
from training.monitoring.phases import Phases
from training.monitoring.records import (
    CollectiveUse,
    EpochMetrics,
    SavedCheckpoint,
    StepMetrics,
    metrics_of,
)

if TYPE_CHECKING:
    from training.data.batching import MicroBatch
    from training.distributed.ranks import Ranks

EVENTS_FILE = "events.jsonl"
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class RunStarted:
    """The first step of this process is next; ``step`` steps and ``epochs`` were done before a resume."""

    step: int
    total_steps: int
    epochs: Sequence[EpochMetrics]


@dataclass(frozen=True)
class Rescheduled:
    """The run is to end after ``total_steps`` steps, more or fewer than before, since it has a time budget."""

    total_steps: int


@dataclass(frozen=True)
class StepStarted:
    """Optimizer step ``step`` begins; its rows are not read yet."""

    step: int


@dataclass(frozen=True)
class StepDone:
    """This rank has taken optimizer step ``step`` with ``micro_batches``; a GPU may still be computing it."""

    step: int
    micro_batches: Sequence[MicroBatch]


@dataclass(frozen=True)
class StepsAgreed:
    """All ranks know the losses of the steps since the last such event; there may be none."""

    steps: Sequence[StepMetrics]


@dataclass(frozen=True)
class CollectivesRecorded:
    """This rank's collectives of ``step``, by operation; every rank publishes its own, of the same steps."""

    step: int
    operations: Mapping[str, CollectiveUse]


@dataclass(frozen=True)
class RanksCompared:
    """The ranks' own seconds of the steps up to ``step`` were compared.

    ``scaling_efficiency``: what all ranks achieved over what they would have if none had waited for
    another, 0 to 1; None if the ranks cannot tell, because collectives are all through their
    passes.
    """

    step: int
    scaling_efficiency: float | None


@dataclass(frozen=True)
class CheckpointStarted:
    """The state after ``step`` is about to be saved."""

    step: int


@dataclass(frozen=True)
class CheckpointFailed:
    """After ``step`` steps it turned out that a checkpoint could not be written; training continues."""

    step: int


@dataclass(frozen=True)
class RolledBack:
    """The run is back at ``step``: later ones, up to ``from_step``, do not count. ``rows`` are left out from now on."""

    step: int
    from_step: int
    rows: Sequence[int]


@dataclass(frozen=True)
class RunTested:
    """The best epoch's evaluation on the test rows, once ``step`` steps were done."""

    step: int
    test: Mapping[str, Any]


@dataclass(frozen=True)
class RunEnded:
    """The run has ended without an error: finished, or stopped with all saved, to be resumed."""

    finished: bool


# StepMetrics is published for the steps that --log_every asks for: the others are only in
# StepsAgreed.
Event = (
    RunStarted
    | Rescheduled
    | StepStarted
    | StepDone
    | StepsAgreed
    | StepMetrics
    | EpochMetrics
    | CollectivesRecorded
    | RanksCompared
    | CheckpointStarted
    | CheckpointFailed
    | SavedCheckpoint
    | RolledBack
    | RunTested
    | RunEnded
)


class Subscriber:
    """Reads a run's events while it runs.

    Every rank publishes the same events in the same order, so a subscriber that all ranks have may
    communicate, and may end the run with an error that it raises on all of them.
    """

    follows_steps = False  # whether it receives StepStarted and StepDone too

    def receive(self, event: Event) -> None:
        """Called with each event, on the thread that trains."""
        raise NotImplementedError

    def close(self) -> None:
        """Free files, threads and ports; called once the run has ended, well or badly."""


class EventStream:
    """One rank's events: recorded in the run folder's ``events.jsonl``, which all ranks share, and
    passed on.

    A line has ``time`` (Unix), ``rank``, ``restart``, ``step`` (steps done), ``kind`` and the
    fields of its kind. Lines are held back until :meth:`recording`, because a run that cannot start
    writes nothing. A full disk loses lines, not the run.
    """

    def __init__(self, run_dir: Path, ranks: Ranks, phases: Phases, log_every: int = 1) -> None:
        self.subscribers: list[Subscriber] = []
        self._lines = JsonLines(run_dir / EVENTS_FILE)
        self._held_back: list[dict[str, Any]] | None = []
        self._ranks = ranks
        self._phases = phases
        self._log_every = log_every
        self._first_step = self._total_steps = 0
        # What happened before there was a stream, with the time at which it did: the program was
        # imported, the group was formed. From these a restart's time is split, see `restart_split`.
        for kind, when in ranks.milestones.items():
            extra = {"process_started": process_started()} if kind == "imported" else {}
            self.write_on_rank0(kind, time=when, **extra)

    def publish(self, event: Event) -> None:
        """Record an event that all ranks know, and pass it to the subscribers in their order."""
        # A step publishes three events, and most subscribers need only the last of them.
        inside_step = type(event) in (StepStarted, StepDone)
        if type(event) is RunStarted:
            self._first_step, self._total_steps = event.step + 1, event.total_steps
        elif type(event) is Rescheduled:
            self._total_steps = event.total_steps
        if type(event) is StepsAgreed:
            # The only place that decides which steps are logged: their own events follow from here,
            # so events.jsonl, metrics.jsonl and the trackers have the same ones.
            for metrics in event.steps:
                if metrics.step % self._log_every == 0 or metrics.step in (1, self._total_steps):
                    self.publish(metrics)
        # All ranks publish the same event and one line is enough, so rank 0 writes it. Within steps
        # only the first one's end is recorded: a restart counts as over then.
        elif self._ranks.is_first and not (inside_step and event.step != self._first_step):
            self._record(event)
        # After the record, because a subscriber may end the run with an error: then events.jsonl
        # still says what it was about.
        for subscriber in self.subscribers:
            if subscriber.follows_steps or not inside_step:
                subscriber.receive(event)

    def _record(self, event: Event) -> None:
        match event:
            case StepDone(step):
                self.write("first_step", step=step)
            case StepMetrics():
                # flat, and asdict would copy it deeply each step
                self.write("step", **event.known())
            case RunStarted(step, total_steps):
                process = {
                    "world_size": self._ranks.world_size,
                    "host": platform.node(),
                    "pid": os.getpid(),
                }
                self.write("start", step=step, total_steps=total_steps, **process)
            case EpochMetrics():
                fields = asdict(event)
                self.write("epoch", **fields, **_headline("validation_", fields.pop("validation")))
            case SavedCheckpoint():
                self.write("checkpoint", **asdict(event))
            case CheckpointFailed():
                self.write("checkpoint_failed")
            case RolledBack(from_step=from_step, rows=rows):
                self.write("rolled_back", from_step=from_step, rows=list(rows))
            case RunTested(test=test):
                self.write("test", **_headline("test_", test))
            case RunEnded(finished):
                self.write("finished" if finished else "stopped")

    def write(self, kind: str, **fields: Any) -> None:
        """Record what only this rank knows, from any thread; ``fields`` may hold another ``time`` or ``step``."""
        now = {
            "time": time.time(),
            "rank": self._ranks.rank,
            "restart": self._ranks.restart,
            "step": self._phases.step,
        }
        line = {**now, "kind": kind, **fields}
        # Once the context of `recording` was entered, nothing is held back any more.
        if self._held_back is None:
            self._lines.write(line)
        else:
            self._held_back.append(line)

    def write_on_rank0(self, kind: str, **fields: Any) -> None:
        """Record once what all ranks know and no subscriber needs."""
        if self._ranks.is_first:
            self.write(kind, **fields)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The folder belongs to this run from here on; an error that leaves this context is recorded as ``failed``."""
        # Switched over before the first line is written: another thread that writes meanwhile goes
        # to the file, and not into a list that nobody reads again.
        held_back, self._held_back = self._held_back or [], None
        for line in held_back:
            self._lines.write(line)
        try:
            yield
        # Also a request to stop, which is no Exception: readers must not take the run for alive.
        except BaseException as error:
            self.write("failed", message=reason_to_record(error))
            raise

    def close(self) -> None:
        """Close the subscribers, the last one first."""
        for subscriber in reversed(self.subscribers):
            subscriber.close()


def _headline(prefix: str, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    # The loss and the two figures that are shown wherever there is little room. The whole
    # evaluation, which may hold a matrix of all labels, is in metrics.jsonl.
    return {
        prefix + name: evaluation.get(name) for name in ("loss", *list(metrics_of(evaluation))[:2])
    }


class MetricsFile(Subscriber):
    """Writes the run's curves to ``metrics.jsonl``: logged steps, epochs with their whole
    validation, the test; of some steps rank 0's collectives, and the ranks' scaling efficiency.

    Records after ``resume_step`` are dropped first, so a resumed run has one line per step; 0
    starts an empty file. What cannot be written is lost and does not end the run.
    """

    def __init__(self, run_dir: Path, resume_step: int, say: Callable[[str], None] = print) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lines = JsonLines(run_dir / METRICS_FILE)
        self._say = say
        self._drop_after(resume_step)

    def receive(self, event: Event) -> None:
        """Append what belongs to the curves."""
        match event:
            case StepMetrics():
                self._lines.write({"kind": "step", **event.known()})
            case EpochMetrics():
                self._lines.write({"kind": "epoch", **asdict(event)})
            case CollectivesRecorded(step, operations):
                used = {
                    name: {"calls": use.calls, "bytes": use.num_bytes, "seconds": sum(use.seconds)}
                    for name, use in operations.items()
                }
                self._lines.write({"kind": "collectives", "step": step, "operations": used})
            case RanksCompared(step, efficiency) if efficiency is not None:
                self._lines.write(
                    {"kind": "efficiency", "step": step, "scaling_efficiency": efficiency}
                )
            case RunTested(step, test):
                self._lines.write({"kind": "test", **test, "step": step})
            case RolledBack(step):
                self._drop_after(step)

    def _drop_after(self, step: int) -> None:
        path = self._lines.path
        if not path.exists():
            return
        # A test belongs to a finished run; one that resumes makes its own.
        kept = [
            record
            for record in read_lines(path)
            if record["kind"] != "test" and record["step"] <= step
        ]
        try:
            # Replaced as a whole and not cut where it is: whoever follows the file sees a new inode
            # and starts over, instead of reading on in the middle of a line.
            write_whole(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        except OSError as error:
            self._say(
                f"{path}: the lines after step {step} could not be removed ({error.strerror}); "
                "the run continues"
            )


class JsonLines:
    """Appends records to a file, each in one write, so that lines of several processes do not mix.

    On NFS that holds only for processes on one machine: lines that several machines write at the
    same moment may overwrite one another (open(2), ``O_APPEND``), and readers skip what is torn.

    A full or broken disk raises nothing here: a record is lost, not the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._torn = False

    def write(self, record: Mapping[str, Any]) -> bool:
        """Append a record, with null for what is not finite; returns whether the system took all of it."""
        line = (
            json.dumps(_null_if_not_finite(record), allow_nan=False, ensure_ascii=False).encode()
            + b"\n"
        )
        # Part of the last line is in the file: end it, so that it spoils only itself.
        if self._torn:
            line = b"\n" + line
        written = 0
        try:
            # Opened for each line, because the file may have been replaced meanwhile.
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                written = os.write(file, line)
            finally:
                os.close(file)
        except OSError:
            pass
        # A disk that runs full takes the first part of a line, and the next write may succeed
        # again.
        self._torn = 0 < written < len(line) or (self._torn and not written)
        return written == len(line)


def _null_if_not_finite(value: Any) -> Any:
    # JSON has no NaN and no infinity; a browser or jq would refuse the whole line.
    if isinstance(value, Mapping):
        return {key: _null_if_not_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_null_if_not_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """The records in the bytes of a JSON lines file; torn lines are skipped."""
    records = []
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file in their order; what is no file has none, torn lines are skipped."""
    return parse_lines(path.read_bytes()) if path.is_file() else []


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """A run's events in the order in which they were written."""
    return read_lines(run_dir / EVENTS_FILE)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return read_lines(run_dir / METRICS_FILE)


def process_started(process: int | str = "self") -> float:
    """Unix time at which this or another process began; NaN on systems other than Linux."""
    try:
        # Field 22 of its stat: ticks from boot to the start.
        after_boot = int(process_fields(process)[19]) / os.sysconf("SC_CLK_TCK")
        # Boot time goes on while the machine sleeps, as the ticks do. Monotonic time stops.
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + after_boot
    except (IndexError, AttributeError):
        return math.nan
