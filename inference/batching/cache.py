"""Answers that need no forward pass of their own: remembered ones, and those of the same text still on its way."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable


class Probabilities(tuple[float, ...]):
    """The probability of every label, by class id.

    Attributes:
        log_total: Logarithm of the sum of the exponentials of the model's scores, which the softmax divided by.
    """

    log_total: float

    def __new__(cls, values: Iterable[float], log_total: float) -> Probabilities:
        """Keep the values with what leads back to the scores."""
        probabilities = super().__new__(cls, values)
        probabilities.log_total = log_total
        return probabilities

    def scores(self) -> list[float]:
        """Return the model's scores before the softmax (logits)."""
        return [math.log(one or math.ulp(0.0)) + self.log_total for one in self]


class AnswerCache:
    """The answers to the texts asked for last, by the bytes of their token ids; 0 entries turn it off."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._answers: OrderedDict[bytes, Probabilities] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes) -> Probabilities | None:
        """The answer, if it is still known."""
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, answer: Probabilities) -> None:
        """Remember an answer, and forget the one that was asked for longest ago."""
        if not self.max_entries:
            return
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self.max_entries:
            self._answers.popitem(last=False)
