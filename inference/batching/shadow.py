"""A candidate in shadow: it answers a share of the texts after the live model has, only to compare
the two.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from common.problem_types import SINGLE_LABEL
from common.text import Text
from inference.batching.calls import Answer
from inference.batching.classifier import BUSY_ABOVE, Classifier
from inference.batching.stage import QueueLimits
from inference.engines.model_loader import ModelLoader
from inference.errors import QueueFullError, WorkerDownError
from inference.metrics import ModelMetrics
from inference.observing.stream import InShadow

# Of the machine, compared with the live model's: after a pass of the candidate, the fair queue lets
# texts of the live model go first for fifty times as long as that pass took.
_WEIGHT = 0.02
# Texts that wait for the candidate; further ones are dropped.
_MOST_WAITING = 32

# Told the position of a text in its call, and the candidate's answer to it.
Compared = Callable[[int, InShadow], None]


class Shadow:
    """Used from the event loop. The answers of the live model never wait for it: a text comes here
    once it is answered. The candidate reads it only while the live queue is nearly empty, and what
    waits for the candidate is dropped as soon as that changes. At most a pass that has begun is in
    the way of a new text, as with any text of another model.
    """

    def __init__(
        self,
        candidate: ModelLoader,
        live: ModelLoader,
        classifier: Classifier,
        metrics: ModelMetrics,
        limits: QueueLimits,
        share: float,
        weight: float = 1.0,
    ) -> None:
        """Args:
        classifier: of the live model, whose workers the candidate uses too.
        metrics: of the live model.
        share: of the answered texts, how many the candidate reads too.
        weight: of the live model's share of the workers.

        Raises:
            ValueError: the two cannot be compared.
        """
        if why_not := _why_not(candidate, live):
            raise ValueError(why_not)
        self._candidate, self._live = candidate, live
        self._of_live, self._metrics, self._share = classifier, metrics, share
        self._max_wait_s = limits.max_wait_seconds
        # Its own metrics, which nobody sees: those of the live model tell of live answers only.
        self._own = Classifier(
            candidate, limits, ModelMetrics(), classifier.workers, _WEIGHT * weight
        )
        self._waiting: set[asyncio.Future[Answer]] = set()
        self._random = random.Random()
        # By the label that the live model gave: texts that were compared, and equal labels.
        self._compared: Counter[str] = Counter()
        self._same: Counter[str] = Counter()

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds that its current pass has taken: while that hangs, the machine lacks a worker."""
        return self._own.heartbeat_age_s

    @property
    def record(self) -> dict[str, Any]:
        """What is in shadow, and how often it agrees with the live model since both were loaded."""
        compared, same = self._compared.total(), self._same.total()
        info = self._candidate.info
        return {
            **{name: info[name] for name in ("name", "revision", "engine", "precision")},
            "share": self._share,
            "texts": compared,
            "agreement": same / compared if compared else None,
            "labels": {
                label: {"texts": texts, "same": self._same[label]}
                for label, texts in sorted(self._compared.items())
            },
        }

    def saw(
        self,
        texts: Sequence[Text],
        answers: Sequence[Answer],
        compared: Compared | None = None,
    ) -> None:
        """Draw some of the texts that the live model has answered, whatever the answers are;
        ``compared`` is called for each that the candidate has answered too.
        """
        is_busy = self._of_live.load > BUSY_ABOVE
        if is_busy:
            for future in list(self._waiting):
                future.cancel()
        drawn = [place for place in range(len(texts)) if self._draws()]
        if not drawn:
            return
        if is_busy:
            self._metrics.in_shadow("dropped", len(drawn))
        else:
            # Not before the answer, which this callback would otherwise hold up.
            asyncio.get_running_loop().call_soon(self._ask, drawn, texts, answers, compared)

    def _draws(self) -> bool:
        return self._random.random() < self._share

    def _ask(
        self,
        drawn: Sequence[int],
        texts: Sequence[Text],
        answers: Sequence[Answer],
        compared: Compared | None,
    ) -> None:
        for place in drawn:
            if len(self._waiting) >= _MOST_WAITING:
                self._metrics.in_shadow("dropped")
                continue
            try:
                (future,) = self._own.submit([texts[place]], self._max_wait_s)
            except (QueueFullError, WorkerDownError):
                self._metrics.in_shadow("dropped")
                continue
            self._waiting.add(future)
            tell = compared and functools.partial(compared, place)
            future.add_done_callback(functools.partial(self._compare, answers[place], tell))

    def _compare(
        self,
        answer: Answer,
        tell: Callable[[InShadow], None] | None,
        future: asyncio.Future[Answer],
    ) -> None:
        self._waiting.discard(future)
        # What was withdrawn, came too late, or failed was not compared.
        if future.cancelled() or future.exception() is not None:
            self._metrics.in_shadow("dropped")
            return
        label, _ = self._live.answering.given(answer.values)[0]
        given, confidence = self._candidate.answering.given(future.result().values)[0]
        is_same = given == label
        self._compared[label] += 1
        self._same[label] += is_same
        self._metrics.in_shadow("same" if is_same else "differs")
        if tell is not None:
            tell(InShadow(self._candidate.info["revision"], given, confidence))

    def close(self) -> None:
        """Drop what waits, and end after the current pass."""
        self._own.close()


def _why_not(candidate: ModelLoader, live: ModelLoader) -> str:
    """Why two models cannot be compared; empty if they can."""
    kinds = {one.answering.problem_type for one in (candidate, live)}
    build = [
        [one.info[key] for key in ("revision", "engine", "precision")] for one in (candidate, live)
    ]
    holds = {
        "it is the model that is served": build[0] == build[1],
        "only models that give one label can be compared": kinds != {SINGLE_LABEL},
        "one reads pairs of texts, and the other one single texts": (
            candidate.reads_pairs != live.reads_pairs
        ),
    }
    return next((why for why, is_so in holds.items() if is_so), "")
