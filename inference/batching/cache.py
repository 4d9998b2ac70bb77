"""Answers without a forward pass of their own: cached ones, and those of an identical text that is
being classified.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.problem_types import SINGLE_LABEL
from inference.engines.answering import Answering
from inference.engines.base import TokenBatch


class Values(tuple[float, ...]):
    """What the model answers to one text, in the order of its labels: probabilities, or the number
    of a regression.

    ``given``: the scores (logits) that they were computed from. Where a sigmoid is rounded to 1, it
    has no inverse.
    """

    given: Sequence[float]
    decided_by: Sequence[int] = ()  # of a text in several windows: which one decided each value
    of_pass: FamiliarityOfPass | None = None
    place: int = 0  # of the text in that pass

    def __new__(cls, values: Iterable[float], given: Sequence[float]) -> Values:
        found = super().__new__(cls, values)
        found.given = given
        return found

    def scores(self) -> Sequence[float]:
        return self.given

    @property
    def familiarity(self) -> float | None:
        """The share of held-out texts that are no more like the training texts; None if the model
        cannot tell.
        """
        known = self.of_pass.values if self.of_pass is not None else []
        return known[self.place] if known else None


class FamiliarityOfPass:
    """How familiar the texts of one pass are: computed when the first of them is asked for, and
    then for all, which costs little more than for one. Most requests never ask.
    """

    def __init__(
        self, answering: Answering, batch: TokenBatch, scores: NDArray[np.float64]
    ) -> None:
        self.answering, self._batch, self._scores = answering, batch, scores

    @functools.cached_property
    def values(self) -> list[float]:
        return self.answering.familiarity(self._batch, self._scores)

    @staticmethod
    def compute(passes: Sequence[FamiliarityOfPass]) -> None:
        """Compute the values of several passes of one model at once, if nobody has asked for them
        yet: a pass of eight texts takes 160 us, of which most is the number of calls.
        """
        new = [one for one in passes if "values" not in vars(one)]
        if not new:
            return
        batch = TokenBatch(
            np.concatenate([one._batch.ids for one in new]),
            np.concatenate([one._batch.lengths for one in new]),
        )
        scores = np.concatenate([one._scores for one in new])
        values = new[0].answering.familiarity(batch, scores)
        for one in new:
            size = len(one._batch.lengths)
            # Where the cached property looks; the sums are the same, to the bit.
            vars(one)["values"], values = values[:size], values[size:]


class Probabilities(Values):
    """Of labels of which exactly one applies. One number brings back all scores, and models may
    have many labels.

    ``log_total``: logarithm of the sum of the exponentials of the scores, which the softmax divided
    by.
    """

    log_total: float

    def __new__(cls, values: Iterable[float], log_total: float) -> Probabilities:
        probabilities = tuple.__new__(cls, values)
        probabilities.log_total = log_total
        return probabilities

    def scores(self) -> list[float]:
        """The scores before the softmax (logits)."""
        return [math.log(one or math.ulp(0.0)) + self.log_total for one in self]


def values_of(
    answering: Answering, batch: TokenBatch, logits: NDArray[np.float32]
) -> list[Values | None]:
    """The answers to the texts of a forward pass; None for a text that is answered with NaN."""
    # Scores that are no finite number become NaN, which is looked for below.
    with np.errstate(invalid="ignore"):
        scores = answering.scores(logits)
        answers = answering.problem_type.answers(scores)
        rows: list[Values | None]
        if answering.problem_type is SINGLE_LABEL:
            totals = (scores.max(axis=1) - np.log(answers.max(axis=1))).tolist()
            rows = [
                Probabilities(row, total)
                for row, total in zip(answers.tolist(), totals, strict=True)
            ]
        else:
            rows = [
                Values(row, given)
                for row, given in zip(answers.tolist(), scores.tolist(), strict=True)
            ]
        if answering.calibration is not None:
            of_pass = FamiliarityOfPass(answering, batch, scores)
            for place, row in enumerate(rows):
                row.of_pass, row.place = of_pass, place
    for i in np.flatnonzero(~np.isfinite(answers).all(axis=1)):
        rows[i] = None
    return rows


class AnswerCache:
    """The most recently used answers, by the bytes of their token ids; 0 entries turn it off."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._answers: OrderedDict[bytes, Values] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes) -> Values | None:
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, answer: Values) -> None:
        if not self.max_entries:
            return
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self.max_entries:
            self._answers.popitem(last=False)
