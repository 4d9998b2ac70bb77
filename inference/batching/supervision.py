"""Threads that outlive whatever their work raises, and that tell how long they have been at one piece of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# A piece of work in hand is waited for so long when threads are stopped.
JOIN_SECONDS = 2.0


class SupervisedThread:
    """A thread that repeats a step; a step that raises, whatever it raises, ends only itself.

    Attributes:
        busy_since: Monotonic instant at which the piece of work in hand began, None between pieces; set by the step.
    """

    def __init__(self, name: str, step: Callable[[], bool], on_failure: Callable[[BaseException], None]) -> None:
        """Make the thread; `start` starts it.

        Args:
            name: Of the thread.
            step: Waits for a piece of work and does it; returns False to end the thread.
            on_failure: Told what a step raised, before the next one.
        """
        self.busy_since: float | None = None
        self._step = step
        self._on_failure = on_failure
        # A daemon: a forward pass that never returns must not keep the process from leaving.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def busy_s(self) -> float:
        """Seconds that the piece of work in hand has taken; 0 between pieces."""
        since = self.busy_since
        return 0.0 if since is None else max(0.0, time.monotonic() - since)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, at most so long."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                if not self._step():
                    return
            except BaseException as error:  # SystemExit too: the callers of this work and of the next get answers
                self.busy_since = None
                self._on_failure(error)
