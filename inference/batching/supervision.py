"""Threads that survive whatever their work raises, and know how long its current piece takes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

# When threads are stopped, the current piece of work is waited for this many seconds.
JOIN_SECONDS = 2.0
# What the niceness of a thread that computes is above that of the process.
COMPUTING_NICENESS = 5


class SupervisedThread:
    """A thread that repeats a step; if a step raises anything, only that step ends.

    ``busy_since``: monotonic time at which the current piece of work began, None between pieces;
    set by the step.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], bool],
        on_failure: Callable[[BaseException], None],
        *,
        computes: bool = False,
    ) -> None:
        """Args:
        step: does one piece of work, and returns False to end the thread.
        on_failure: gets what it raised.
        computes: whether it takes whole cores, which should not delay the event loop.
        """
        self.busy_since: float | None = None
        self._computes = computes
        self._step = step
        self._on_failure = on_failure
        # A daemon, because a forward pass that never returns must not keep the process from
        # exiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def busy_s(self) -> float:
        """Seconds that the current piece of work has taken; 0 between pieces."""
        since = self.busy_since
        return 0.0 if since is None else max(0.0, time.monotonic() - since)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        # With as many passes as cores, the event loop would get no more than its equal share of
        # them. Under overload that is too little to accept connections and refuse requests, which
        # then took seconds. Only Linux has a niceness per thread.
        if self._computes and sys.platform == "linux":
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                niceness = os.getpriority(os.PRIO_PROCESS, 0) + COMPUTING_NICENESS
                os.setpriority(os.PRIO_PROCESS, 0, niceness)
        while True:
            try:
                if not self._step():
                    return
            # SystemExit too: a thread that ended would leave the callers of this work, and of all
            # that comes after it, without an answer until their deadline.
            except BaseException as error:
                self.busy_since = None
                self._on_failure(error)
