"""One run at a time, in its own thread, and the clients that follow it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ForeseenError
from learn.cards.history import History
from learn.cards.picture import card_picture
from learn.cards.pipeline import Pipeline
from learn.cards.runner import Event, Runner

KILL_RETRY_INTERVAL = 0.1


class Refused(Exception):
    """The request cannot be served now; the message says why."""


class _Stopped(Exception):
    """Raised in the run's thread to end it."""


@dataclass(frozen=True)
class _Run:
    """Replaced as one, so that no reader sees a part of one run and a part of the next."""

    number: int
    runner: Runner
    history: History


class Session:
    """A pipeline to step, run, configure and reset; a context manager that ends all ranks."""

    def __init__(self, pipeline: Pipeline, folder: Path, cluster: str | None = None) -> None:
        self.folder = folder
        self._cluster = cluster
        self.is_over = False
        self._lock = threading.Lock()
        self._followers: set[Callable[[], Any]] = set()
        self._begin(pipeline, number=1)

    def _begin(self, pipeline: Pipeline, number: int) -> None:
        runner = Runner(pipeline, self.folder, self._on_event, self._cluster)
        self._now = _Run(number, runner, History(pipeline))
        self.busy = self._stopping = False
        self._thread = threading.Thread()

    @property
    def number(self) -> int:
        return self._now.number

    @property
    def runner(self) -> Runner:
        return self._now.runner

    @property
    def history(self) -> History:
        return self._now.history

    @property
    def pipeline(self) -> Pipeline:
        return self.runner.pipeline

    def step(self) -> None:
        self._start(lambda runner: runner.step())

    def run(self) -> None:
        self._start(lambda runner: runner.run())

    def configure(self, node_id: str, values: dict[str, Any]) -> None:
        """Set a card, and start over."""
        self.rewire(lambda pipeline: pipeline.configured(node_id, **values))

    def rewire(self, change: Callable[[Pipeline], Pipeline]) -> None:
        """Change the pipeline, and start over."""
        with self._lock:
            if self.busy:
                raise Refused("a run is in progress; wait until it is done, or reset")
            self._start_over(change(self.pipeline))

    def reset(self, workers: int | None = None) -> None:
        """Abort the current run and start over, with another number of ranks if given."""
        with self._lock:
            pipeline = self.pipeline
            if workers is not None:
                pipeline = pipeline.with_setting("workers", workers, f"workers {workers}")
            self._start_over(pipeline)

    def picture(self, node_id: str) -> list[dict[str, Any]]:
        """The card's picture; empty before it has run."""
        with self._lock:
            node = self.pipeline.node(node_id)
            return card_picture(self.runner, node) if self.history.has_run(node_id) else []

    def state(self, run: int = 0, losses_from: int = 0) -> dict[str, Any]:
        """Progress as JSON; if ``run`` is still the current one, without the first losses."""
        now = self._now  # read once: a reset in another thread replaces it
        following = now.runner.next_node
        state = {"run": now.number, "busy": self.busy, "next": following and following.id}
        return state | now.history.state(losses_from if run == now.number else 0)

    @contextmanager
    def follow(self) -> Iterator[asyncio.Event]:
        """An event of the running loop that is set when the state changes."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        # Called from the run's thread, and an asyncio event may only be set in its own loop.
        def notify() -> None:
            loop.call_soon_threadsafe(changed.set)

        self._followers.add(notify)
        try:
            yield changed
        finally:
            self._followers.discard(notify)

    def end(self) -> None:
        self.is_over = True
        self._notify()

    def _start(self, work: Callable[[Runner], Any]) -> None:
        with self._lock:
            if self.busy:
                raise Refused("a run is already in progress")
            if self.history.failure:
                raise Refused("a card has failed; reset to start over")
            if self.runner.next_node is None:
                raise Refused("all cards have run; reset to start over")
            self.busy = True
            # A thread, so that the page is answered while ranks work; daemon, so that it does not
            # keep the program alive.
            work_on = (work, self.runner)
            self._thread = threading.Thread(target=self._work, args=work_on, daemon=True)
            self._thread.start()

    def _work(self, work: Callable[[Runner], Any], runner: Runner) -> None:
        try:
            work(runner)
        except (ForeseenError, _Stopped):
            pass  # a foreseen error is in the history already; a stopped run has no result
        finally:
            self.busy = False
            self._notify()

    def _on_event(self, event: Event) -> None:
        # Called in the run's own thread, before and after a card: there it can be stopped without
        # leaving a card half done.
        if self._stopping:
            raise _Stopped
        self.history.record(event)
        self._notify()

    def _start_over(self, pipeline: Pipeline) -> None:
        self._stop()
        self._begin(pipeline, self.number + 1)
        self._notify()

    def _stop(self) -> None:
        # Between two cards the run stops on its own. Inside a card, a collective may wait forever:
        # then the ranks are killed, repeatedly, because they may just be starting.
        self._stopping = True
        while self._thread.is_alive():
            self.runner.close()
            self._thread.join(KILL_RETRY_INTERVAL)
        self.runner.close()

    def _notify(self) -> None:
        for notify in list(self._followers):
            notify()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stop()
