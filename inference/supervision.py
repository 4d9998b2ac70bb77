"""Threads that are started again when they fail, and that tell how long they have been at one piece of work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# A piece of work in hand is waited for so long when threads are stopped.
JOIN_SECONDS = 10.0


class SupervisedThread:
    """A thread that repeats a step until it is told to stop; a step that raises is reported and ends only itself.

    Attributes:
        busy_since: Monotonic instant at which the piece of work in hand began, None between pieces; set by the step.
    """

    def __init__(self, name: str, step: Callable[[], bool], on_failure: Callable[[BaseException], None]) -> None:
        """Make the thread; `start` starts it.

        Args:
            name: Of the thread.
            step: Waits for a piece of work and does it; returns False to end the thread.
            on_failure: Told, in the failing thread, what a step raised; then another thread goes on.
        """
        self.busy_since: float | None = None
        self._name = name
        self._step = step
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None

    @property
    def busy_s(self) -> float:
        """Seconds that the piece of work in hand has taken; 0 between pieces."""
        since = self.busy_since
        return 0.0 if since is None else max(0.0, time.monotonic() - since)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, at most so long."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def start(self) -> None:
        """Start the thread, or the one that goes on after it failed."""
        # A daemon: a forward pass that never returns must not keep the process from leaving.
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:  # SystemExit too: whatever ends this thread, its callers get their answer
            self.busy_since = None
            try:
                self._on_failure(error)
            finally:
                self.start()
