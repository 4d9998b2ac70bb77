"""Distinguishes a broken engine from texts that it cannot process."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np

from common.errors import first_line
from inference.engines.base import Engine, TokenBatch

logger = logging.getLogger(__name__)

# This many consecutive forward passes have to fail before requests are sent elsewhere.
FAILED_PASSES = 3


class EngineHealth:
    """Whether an engine works at all; used from worker threads.

    A client may send texts that a model cannot process, so failed texts prove nothing. After a pass
    in which every text failed, a known good text decides: if that fails too, it is the engine.

    Attributes:
        failure: why the engine is considered broken; None if it is not.
        needs_restart: whether only a new process can help: after most CUDA errors, every later call
            fails too.
    """

    def __init__(self, engine: Engine, good_ids: list[int]) -> None:
        self._engine = engine
        self._batch = TokenBatch.of([good_ids])
        self._lock = threading.Lock()
        self._num_failed = 0
        self._broken_since = 0.0
        self.failure: str | None = None
        self.needs_restart = False

    @property
    def broken_s(self) -> float:
        """Seconds for which the engine has been considered broken; 0 while it is not."""
        return 0.0 if self.failure is None else time.monotonic() - self._broken_since

    def pass_answered(self) -> None:
        """Record a pass that answered at least one of its texts."""
        # Nearly always there is nothing to do, and then it should cost nothing: no lock.
        if self._num_failed:
            with self._lock:
                self._recover()

    def works(self, threads: int) -> bool:
        # The pass is outside of the lock: it may hang, and others have to be able to ask meanwhile.
        problem = self._problem(threads)
        with self._lock:
            if problem is None:
                self._recover()
            else:
                self._num_failed += 1
                if self._num_failed >= FAILED_PASSES:
                    self._break(problem)
        return problem is None

    def _problem(self, threads: int) -> str | None:
        try:
            logits = self._engine.logits(self._batch, threads)
        except BaseException as error:  # whatever it raises, the worker goes on
            return first_line(error)
        return None if np.isfinite(logits).all() else "its answer is NaN"

    def _break(self, problem: str) -> None:
        self.needs_restart = "CUDA error" in problem
        remedy = "it is tried again every few seconds"
        if self.needs_restart:
            remedy = "only a restart of the server helps"
        is_news = self.failure is None
        if is_news:
            self._broken_since = time.monotonic()
        self.failure = (
            f"the model fails on every text, including a known good one ({problem}); {remedy}"
        )
        if is_news:
            logger.error("not ready: %s", self.failure)

    def _recover(self) -> None:
        self._num_failed = 0
        if self.failure is not None:
            logger.warning("ready again: the model answers")
            self.failure, self.needs_restart = None, False
