"""One run at a time, in a thread of its own, and those who follow it."""

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

SECONDS_BETWEEN_KILLS = 0.1


class Refused(Exception):
    """What is asked for cannot be done now; the message says why."""


class _Stopped(Exception):
    """The run is given up."""


@dataclass(frozen=True)
class _Run:
    """What belongs together, so that nobody sees a part of one run and a part of the next."""

    number: int
    runner: Runner
    history: History


class Session:
    """A pipeline that can be stepped, run, set otherwise and reset; a context manager, after which no rank is left.

    Args:
        pipeline: a checked one.
        folder: for the values of its runs, of which the latest is kept.
    """

    def __init__(self, pipeline: Pipeline, folder: Path) -> None:
        self.folder = folder
        self.is_over = False
        self._lock = threading.Lock()
        self._followers: set[Callable[[], Any]] = set()
        self._begin(pipeline, number=1)

    def _begin(self, pipeline: Pipeline, number: int) -> None:
        self._now = _Run(number, Runner(pipeline, self.folder, self._on_event), History(pipeline))
        self.busy = self._stopping = False
        self._thread = threading.Thread()

    @property
    def number(self) -> int:
        """Of the run, from 1."""
        return self._now.number

    @property
    def runner(self) -> Runner:
        """Of the run."""
        return self._now.runner

    @property
    def history(self) -> History:
        """Of the run."""
        return self._now.history

    @property
    def pipeline(self) -> Pipeline:
        """What is run, as it is set now."""
        return self.runner.pipeline

    def step(self) -> None:
        """Start to run the next card.

        Raises:
            Refused: one runs already, one has failed, or all are done.
        """
        self._start(lambda runner: runner.step())

    def run(self) -> None:
        """Start to run all cards that are left.

        Raises:
            Refused: as :meth:`step`.
        """
        self._start(lambda runner: runner.run())

    def configure(self, node_id: str, values: dict[str, Any]) -> None:
        """Set a card, and start over.

        Raises:
            Refused: a card runs.
            UserError: the card does not take the values.
        """
        with self._lock:
            if self.busy:
                raise Refused("the ranks are at work; wait until they are done, or reset")
            self._start_over(self.pipeline.configured(node_id, **values))

    def reset(self, workers: int | None = None) -> None:
        """Give up what runs, and start over, on another number of ranks if one is given.

        Raises:
            UserError: no card says how many ranks there are, or it does not take as many.
        """
        with self._lock:
            pipeline = self.pipeline
            if workers is not None:
                pipeline = pipeline.with_setting("workers", workers, f"workers {workers}")
            self._start_over(pipeline)

    def picture(self, node_id: str) -> list[dict[str, Any]]:
        """What there is to see of a card; nothing before it has run.

        Raises:
            UserError: there is no such card.
        """
        with self._lock:
            node = self.pipeline.node(node_id)
            return card_picture(self.runner, node) if self.history.has_run(node_id) else []

    def state(self, run: int = 0, losses_from: int = 0) -> dict[str, Any]:
        """How far the run is, as JSON; of the run of that number, the losses from one on that was not told."""
        now = self._now
        following = now.runner.next_node
        state = {"run": now.number, "busy": self.busy, "next": following and following.id}
        return state | now.history.state(losses_from if run == now.number else 0)

    @contextmanager
    def follow(self) -> Iterator[asyncio.Event]:
        """An event, of the running loop, that is set whenever the state has changed."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(changed.set)

        self._followers.add(tell)
        try:
            yield changed
        finally:
            self._followers.discard(tell)

    def end(self) -> None:
        """Let those who follow go."""
        self.is_over = True
        self._tell()

    def _start(self, work: Callable[[Runner], Any]) -> None:
        with self._lock:
            if self.busy:
                raise Refused("the ranks are at work already")
            if self.history.failure:
                raise Refused("a card has failed; reset to start over")
            if self.runner.next_node is None:
                raise Refused("all cards have run; reset to start over")
            self.busy = True
            self._thread = threading.Thread(target=self._work, args=(work, self.runner), daemon=True)
            self._thread.start()

    def _work(self, work: Callable[[Runner], Any], runner: Runner) -> None:
        try:
            work(runner)
        except (ForeseenError, _Stopped):
            pass  # the runner has told of the one; nobody waits for the other
        finally:
            self.busy = False
            self._tell()

    def _on_event(self, event: Event) -> None:
        if self._stopping:
            raise _Stopped
        self.history.record(event)
        self._tell()

    def _start_over(self, pipeline: Pipeline) -> None:
        self._stop()
        self._begin(pipeline, self.number + 1)
        self._tell()

    def _stop(self) -> None:
        # A collective that never ends is ended with its ranks, as soon as there are any; between two cards the run ends
        # by itself.
        self._stopping = True
        while self._thread.is_alive():
            self.runner.close()
            self._thread.join(SECONDS_BETWEEN_KILLS)
        self.runner.close()

    def _tell(self) -> None:
        for tell in list(self._followers):
            tell()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stop()
