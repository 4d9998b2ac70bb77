"""Signals that ask a run to stop: the step is finished, the state saved, and the run ends so that it can go on."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

# What a person, a launcher or Kubernetes sends (SIGTERM, SIGINT), and what SLURM sends before the time is up (SIGUSR1).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interruption:
    """Whether this process was asked to stop; within its context the signals ask, and do nothing else.

    Outside the main thread no signal can be caught: there the context changes nothing, and whoever started the
    thread decides when it ends (Ray runs training in a thread of its workers).
    """

    def __init__(self) -> None:
        self.asked = False
        self._before = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not Python that set it
        self._before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
