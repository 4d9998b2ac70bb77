"""Status files: what each rank is doing now, rewritten about once per second, or less often if there are many ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import resource
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from common.errors import reason_to_record
from common.files import write_whole
from training.monitoring.events import (
    Event,
    Rescheduled,
    RolledBack,
    RunEnded,
    RunStarted,
    StepsAgreed,
    Subscriber,
)
from training.monitoring.records import SavedCheckpoint

if TYPE_CHECKING:
    from training.distributed.ranks import Ranks
    from training.monitoring.phases import Phases

PERIOD = 1.0  # seconds between two writings, with few ranks
# Per second, of all ranks: each is a rename, and a shared file system has one server for them.
MOST_WRITES = 250
STEPS_AVERAGED = 10
# The beginning of a rank's last message if it ends only because of others.
LOST = "lost at step"


@dataclass
class RankStatus:
    """What one rank does.

    ``state``: running, stopped (as asked, and saved), finished or failed, which ``message``
    explains. Times are Unix times of the rank's own clock: readers compare them with each other or
    watch ``written`` change, and never compare them with another machine's clock. ``step``: steps
    done; ``phases``: mean seconds per step in each; ``slow_phases``: those in which the rank is
    slower than the others.
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
        """The phases in which a rank is slow, if it still runs: one that has ended delays nobody."""
        return self.slow_phases if self.state == "running" else []


class StatusFile(Subscriber):
    """Writes this rank's status file while its context lasts, from a thread of its own, and at the
    end.

    Never fails a run: what cannot be written is skipped, and tried again a second later.
    """

    def __init__(self, run_dir: Path, ranks: Ranks, phases: Phases) -> None:
        identity = (
            ranks.rank,
            platform.node(),
            os.getpid(),
            ranks.local_rank,
            ranks.world_size,
            ranks.restart,
        )
        self.status = RankStatus(*identity)
        self._run_dir, self._path = run_dir, status_path(run_dir, ranks.rank)
        self._phases = phases
        self._averaged_from = 0  # the step after which the phases are averaged
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="status", daemon=True)

    def __enter__(self) -> StatusFile:
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self.status.rank == 0:
                for status in read_statuses(self._run_dir):
                    # Left by an earlier start, which had more ranks.
                    if status.rank >= self.status.world_size:
                        status_path(self._run_dir, status.rank).unlink(missing_ok=True)
        self.write()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        # With a limit: a disk that does not answer must not keep the process.
        self._thread.join(PERIOD)
        if error is not None:
            self.failed(reason_to_record(error))
            return
        # Not if the run was stopped: the event said so before this context was left.
        if self.status.state == "running":
            self.status.state = "finished"
        self.write()

    def write(self) -> None:
        """Write the file now, from any thread."""
        # The watchdog and the main thread write too, just before the process ends.
        if not self._lock.acquire(timeout=PERIOD):
            return  # another thread waits for the disk
        try:
            now, phases, status = time.time(), self._phases, self.status
            status.phase, status.step, status.written = phases.now, phases.step, now
            # Both times by one clock, so that their difference survives a jump of it.
            status.phase_since = now - (time.monotonic() - phases.since)
            status.cpu_seconds, status.memory_bytes = time.process_time(), _resident_bytes()
            # Not synced: the next one comes in a second, and after a power failure nobody asks for
            # this one.
            write_whole(self._path, json.dumps(asdict(self.status)).encode(), sync=False)
        except OSError:
            pass
        finally:
            self._lock.release()

    def failed(self, message: str) -> None:
        self.status.state, self.status.message = "failed", message
        self.write()

    def receive(self, event: Event) -> None:
        status = self.status
        match event:
            case StepsAgreed(steps):
                if not steps:
                    return
                last = steps[-1]
                status.epoch, status.loss = (
                    last.epoch,
                    last.loss if math.isfinite(last.loss) else None,
                )
                status.samples_per_second, status.tokens_per_second = (
                    last.samples_per_second,
                    last.tokens_per_second,
                )
                # Averaged here and not by the thread that writes: only the main thread may ask for
                # the seconds, because asking moves its phases' clock.
                count = last.step - self._averaged_from
                if count >= STEPS_AVERAGED:
                    status.phases = {
                        name: seconds / count
                        for name, seconds in self._phases.elapsed("status").items()
                    }
                    self._averaged_from = last.step
            case SavedCheckpoint(step):
                status.last_checkpoint_step, status.last_checkpoint_time = step, time.time()
            case Rescheduled(total_steps):
                status.total_steps = total_steps
            case RunStarted(step, total_steps):
                status.total_steps = total_steps
                self._average_from(step)
            case RolledBack(step):
                self._average_from(step)
            case RunEnded(finished):
                status.state = "finished" if finished else "stopped"

    def _average_from(self, step: int) -> None:
        self._averaged_from = step
        self._phases.elapsed("status")

    def _keep_writing(self) -> None:
        while not self._ended.wait(writing_period(self.status.world_size)):
            self.write()


def writing_period(world_size: int) -> float:
    """Seconds between two writings of a rank's status file."""
    return max(PERIOD, world_size / MOST_WRITES)


def status_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "ranks" / f"rank_{rank:05d}.json"


def read_statuses(run_dir: Path) -> list[RankStatus]:
    """All ranks' statuses in the order of ranks, those that are missing or unreadable skipped."""
    known = {known.name for known in fields(RankStatus)}
    # A file of a newer version may have more fields, which are left out here.
    statuses = []
    for path in sorted((run_dir / "ranks").glob("rank_*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            found = json.loads(path.read_text(encoding="utf-8"))
            statuses.append(
                RankStatus(**{name: value for name, value in found.items() if name in known})
            )
    return statuses


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # only Linux has this file
        return 0
