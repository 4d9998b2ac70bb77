"""Watchdog: a thread on each rank that ends a run without progress and reports who is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from common.errors import LostRank, in_one_line
from training.config import TrainConfig
from training.distributed.group import limit_collective_time, start_timeout
from training.distributed.ranks import is_lost_rank
from training.fault_tolerance.hangs import (
    BUSY,
    LOST,
    Missing,
    describe_position,
    find_missing,
    is_any_gone,
    write_hang_record,
)
from training.fault_tolerance.interruption import STOP_SECONDS, Interruption, leave
from training.monitoring.events import Event, RunStarted, StepsAgreed, Subscriber
from training.monitoring.monitors import Monitors

TICK = 0.5  # seconds
# A launcher asks the others to stop when a rank has died. Whoever still waits for it after so long
# will wait in vain.
GONE_SECONDS = 3.0
# If another rank reports the failure, give it this long to do so.
REPORT_SECONDS = 10.0


class Watchdog(Subscriber):
    """Ends this process when its main thread makes no progress, or cannot stop when asked to.

    Staying in one phase for longer than the timeout without a :meth:`Phases.heartbeat` is a hang:
    the rank writes its threads' stacks and its last collectives to the run folder, and the lowest
    rank that is alive prints one line with the ranks that are missing. If a collective breaks
    because a rank is gone, the error that leaves this context says the same.

    Args:
        config: of the run. Its ``--collective_timeout`` applies after the first steps, and at least
            an hour before.
    """

    def __init__(self, config: TrainConfig, monitors: Monitors, interruption: Interruption) -> None:
        self._run_dir = config.run_dir
        self._resume_hint = f"The last checkpoint is safe: to resume, {config.how_to_resume}"
        self._timeout = config.collective_timeout
        self._limit = start_timeout(self._timeout)
        self._has_stepped = False
        self._ranks, self._phases, self._events = monitors.ranks, monitors.phases, monitors.events
        self._status, self._interruption = monitors.status, interruption
        self._report_lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._ended.set()
        # If the thread is about to end the process, let it do the reporting.
        with self._report_lock:
            if isinstance(error, LostRank) or is_lost_rank(error):
                missing, reports = self._find_missing_ranks()
                words = in_one_line((isinstance(error, LostRank) and error.__cause__) or error)
                line = f"{self._line(missing, 'a connection ended')}. PyTorch's own error: {words}"
                raise LostRank(line, quiet=not reports) from error

    def receive(self, event: Event) -> None:
        """Set the timeout of a start, and the normal one once the first steps have compiled all."""
        match event:
            case RunStarted():
                limit_collective_time(self._limit)  # also in the process groups of the strategy
            case StepsAgreed(steps):
                if steps and not self._has_stepped:
                    self._has_stepped = True
                    self._limit = self._timeout
                    limit_collective_time(self._timeout)

    def _watch(self) -> None:
        still = asked = 0.0
        before, moved = time.monotonic(), None
        while not self._ended.wait(TICK):
            # If the whole process was paused (SIGSTOP), count little of that time.
            passed = min(time.monotonic() - before, 2 * TICK)
            before = time.monotonic()
            still = still + passed if self._phases.moved == moved else 0.0
            moved = self._phases.moved
            if self._interruption.asked:
                if not asked:
                    self._events.write("stop_asked")
                asked += passed
            if still > self._limit:
                self._end_hang(still)
            # Both: still for so long, and asked to stop that long ago. A slow step is no hang.
            if min(still, asked) > STOP_SECONDS:
                self._stop_without_agreement()
            elif min(still, asked) > GONE_SECONDS and is_any_gone(self._run_dir, self._ranks):
                self._end_lost()

    def _end_hang(self, seconds: float) -> NoReturn:
        with self._report_lock:
            status = self._status.status
            waits = write_hang_record(self._run_dir, status, self._phases, seconds)
            why = f"{BUSY} {seconds:.0f} s"
            if not waits:
                self._status.failed(why)
            missing, reports = self._find_missing_ranks()
            exit_code = LostRank.exit_code if waits and missing else 1
            if not waits:
                missing.append(Missing(status, why))
            line = self._line(missing, f"no progress for {seconds:.0f} s (--collective_timeout)")
            hangs = self._run_dir / "hangs"
            line += f". Stacks and last collectives of the ranks: {hangs} [no-progress]"
            self._events.write("hang", seconds=seconds, message=line)
            self._report_and_exit(exit_code, line, reports=reports, at_once=not waits)

    def _end_lost(self) -> None:
        with self._report_lock:
            # The connection should have said so; NCCL's does not, and gloo's rarely misses it.
            missing, reports = self._find_missing_ranks()
            line = f"{self._line(missing, 'a connection is silent')} [rank-lost]"
            self._report_and_exit(LostRank.exit_code, line, reports=reports, at_once=True)

    def _stop_without_agreement(self) -> None:
        with self._report_lock:
            missing, reports = self._find_missing_ranks()
            if missing:  # else the others live, and a slow step or a long save will end
                what = "asked to stop, but the ranks could not agree on it"
                line = f"{self._line(missing, what)} [stop-not-agreed]"
                self._report_and_exit(
                    self._interruption.exit_code, line, reports=reports, at_once=True
                )

    def _find_missing_ranks(self) -> tuple[list[Missing], bool]:
        """Which ranks are missing, and whether this one, the lowest of the others, reports it."""
        missing, waiting = find_missing(self._run_dir, self._ranks)
        return missing, self._ranks.rank < min(waiting, default=self._ranks.world_size)

    def _line(self, missing: Sequence[Missing], what: str) -> str:
        here = describe_position(self._phases.now, self._phases.step)
        who = (
            "; ".join(map(str, missing))
            or f"no rank seems to be missing; rank {self._ranks.rank} is {here}"
        )
        return f"{LOST} {self._phases.step + 1}: {what}; {who}. {self._resume_hint}"

    def _report_and_exit(
        self, exit_code: int, line: str, *, reports: bool, at_once: bool
    ) -> NoReturn:
        self._status.failed(line)
        if not reports and not at_once:
            # torchrun ends all ranks once one is gone: the one that reports must not be cut short.
            time.sleep(REPORT_SECONDS)
        leave(exit_code, f"error: {line}" if reports else "")
