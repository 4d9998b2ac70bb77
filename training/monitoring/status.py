"""Status files: what each rank is doing now, rewritten about once per second, or less often by many ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from common.errors import reason_to_record
from training.monitoring.observer import Observer
from training.monitoring.records import EpochMetrics, SavedCheckpoint, StepMetrics

if TYPE_CHECKING:
    from training.parallelism.distributed import Ranks
    from training.run.phases import Phases

PERIOD = 1.0  # seconds between two writings, with few ranks
MOST_WRITES = 250  # per second, of all ranks: each is a rename, for which they share the server of a file system
STEPS_AVERAGED = 10
# How the last message of a rank begins that ends only because of others.
LOST = "lost at step"
_TAKER = "status"


@dataclass
class RankStatus:
    """What one rank does.

    ``state``: running, stopped (asked to, and saved), finished or failed, then ``message`` says why. Times are Unix
    times of the rank's own clock: readers compare them with one another or watch ``written`` change, and do not
    compare them with a clock of another machine. ``step``: steps done; ``phases``: mean seconds a step in each;
    ``slow_phases``: those in which the rank is slower than the others.
    """

    rank: int
    host: str
    pid: int
    local_rank: int
    world_size: int
    restart: int
    state: str = "running"
    phase: str = "start"
    phase_since: float = 0.0
    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    loss: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    slow_phases: list[str] = field(default_factory=list)
    last_checkpoint_step: int | None = None
    last_checkpoint_time: float | None = None
    message: str = ""
    written: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0

    @property
    def phase_seconds(self) -> float:
        """How long the rank had been in its phase when it last wrote."""
        return self.written - self.phase_since

    @property
    def slow_now(self) -> list[str]:
        """The phases in which a rank that still runs is slow: one that has ended holds up nobody."""
        return self.slow_phases if self.state == "running" else []


class StatusFile(Observer):
    """Writes this rank's status file while its context lasts, from a thread of its own, and at the end.

    Never fails a run: what cannot be written is left out, and tried again a second later.
    """

    def __init__(self, run_dir: Path, ranks: Ranks, phases: Phases) -> None:
        place = (ranks.rank, platform.node(), os.getpid(), ranks.local_rank, ranks.world_size, ranks.restart)
        self.status = RankStatus(*place)
        self._path = status_path(run_dir, ranks.rank)
        self._phases = phases
        self._steps_before = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="status", daemon=True)

    def __enter__(self) -> StatusFile:
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self.status.rank == 0:
                _remove_beyond(self._path.parent, self.status.world_size)
        self.write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(PERIOD)  # a disk that does not answer is no reason to stay
        if error is not None:
            self.failed(reason_to_record(error))
            return
        if self.status.state == "running":
            self.status.state = "finished"
        self.write()

    def write(self) -> None:
        """Write the file now, from any thread."""
        if not self._lock.acquire(timeout=PERIOD):
            return  # another thread waits for the disk
        try:
            self._look()
            aside = self._path.with_suffix(".tmp")
            aside.write_text(json.dumps(asdict(self.status)), encoding="utf-8")
            aside.replace(self._path)
        except OSError:
            pass
        finally:
            self._lock.release()

    def stopped(self) -> None:
        """Take that the run was asked to stop and has saved."""
        self.status.state = "stopped"

    def failed(self, message: str) -> None:
        """Say why this rank ends, at once."""
        self.status.state, self.status.message = "failed", message
        self.write()

    def _look(self) -> None:
        now, phases, status = time.time(), self._phases, self.status
        status.phase, status.step, status.written = phases.now, phases.step, now
        # Both times by one clock, so that their difference survives a jump of it.
        status.phase_since = now - (time.monotonic() - phases.since)
        status.cpu_seconds, status.memory_bytes = time.process_time(), _resident_bytes()

    def run_starts(self, step: int, total_steps: int, epochs: Sequence[EpochMetrics]) -> None:
        """Take how far the run is to go."""
        self.status.total_steps, self._steps_before = total_steps, step
        self._phases.take(_TAKER)

    def steps_agreed(self, steps: Sequence[StepMetrics]) -> None:
        """Take the last step's figures, and the phases of the last few."""
        if not steps:
            return
        last, status = steps[-1], self.status
        status.epoch, status.loss = last.epoch, last.loss if math.isfinite(last.loss) else None
        status.samples_per_second, status.tokens_per_second = last.samples_per_second, last.tokens_per_second
        count = last.step - self._steps_before
        if count >= STEPS_AVERAGED:
            status.phases = {name: seconds / count for name, seconds in self._phases.take(_TAKER).items()}
            self._steps_before = last.step

    def rolled_back(self, step: int) -> None:
        """Begin anew to average: the steps since do not count."""
        self._steps_before = step
        self._phases.take(_TAKER)

    def checkpoint_saved(self, saved: SavedCheckpoint) -> None:
        """Take when the newest checkpoint stood."""
        self.status.last_checkpoint_step, self.status.last_checkpoint_time = saved.step, time.time()

    def _keep_writing(self) -> None:
        while not self._ended.wait(writing_period(self.status.world_size)):
            self.write()


def writing_period(world_size: int) -> float:
    """Seconds between two writings of a rank's status."""
    return max(PERIOD, world_size / MOST_WRITES)


def status_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's status file lies."""
    return run_dir / "ranks" / f"rank_{rank:05d}.json"


def read_statuses(run_dir: Path) -> list[RankStatus]:
    """Read all ranks' statuses in the order of ranks; one that is missing or cannot be read is left out."""
    known = {known.name for known in fields(RankStatus)}
    statuses = []
    for path in sorted((run_dir / "ranks").glob("rank_*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            found = json.loads(path.read_text(encoding="utf-8"))
            statuses.append(RankStatus(**{name: value for name, value in found.items() if name in known}))
    return statuses


def _remove_beyond(folder: Path, world_size: int) -> None:
    """An earlier start of the run may have had more ranks."""
    for status in read_statuses(folder.parent):
        if status.rank >= world_size:
            status_path(folder.parent, status.rank).unlink(missing_ok=True)


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # only Linux tells what is resident now
        return 0
