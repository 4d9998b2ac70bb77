"""Phases: what a process is doing, and how long it spent in each phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Phases:
    """The phase that the main thread is in; other threads may read the public attributes at any
    time.

    Phases nest; time in an inner phase is not counted for the outer one.
    """

    def __init__(self) -> None:
        self.now = "start"
        self.since = self.moved = time.monotonic()  # when it began; when it last made progress
        self.step = 0  # optimizer steps done
        # What a profiler puts around phases.
        self.mark: Callable[[str], AbstractContextManager] = nullcontext
        # Totals since the start. Each reader remembers what it saw last, so the status file, the
        # exporter and the profiler, which look at different times, take nothing from each other.
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._last_read: dict[str, dict[str, float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        # The inner phase stops the outer one's clock and starts it again when it ends, also by an
        # error. So each second belongs to one phase, and all of them add up to the time.
        outer = self.now
        self._enter(name)
        try:
            with self.mark(name):
                yield
        finally:
            self._enter(outer)

    def heartbeat(self) -> None:
        """Show that a long phase is still making progress."""
        self.moved = time.monotonic()

    def elapsed(self, reader: str) -> dict[str, float]:
        """Seconds in each phase since ``reader`` last asked; for the main thread."""
        # Entering the phase again records what it has taken so far; its own clock starts over.
        self._enter(self.now)
        before, self._last_read[reader] = self._last_read.get(reader, {}), dict(self._seconds)
        return {name: seconds - before.get(name, 0.0) for name, seconds in self._seconds.items()}

    def _enter(self, name: str) -> None:
        now = time.monotonic()
        self._seconds[self.now] += now - self.since
        self.now, self.since, self.moved = name, now, now
