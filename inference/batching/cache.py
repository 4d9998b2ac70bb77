"""Answers without a forward pass of their own: cached ones, and those of an identical text that is being classified."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable


class Probabilities(tuple[float, ...]):
    """The probability of every label, by class id.

    ``log_total``: logarithm of the sum of the exponentials of the scores, which the softmax divided by.
    """

    log_total: float

    def __new__(cls, values: Iterable[float], log_total: float) -> Probabilities:
        probabilities = super().__new__(cls, values)
        probabilities.log_total = log_total
        return probabilities

    def scores(self) -> list[float]:
        """The scores before the softmax (logits)."""
        return [math.log(one or math.ulp(0.0)) + self.log_total for one in self]


class AnswerCache:
    """The most recently used answers, by the bytes of their token ids; 0 entries turn the cache off."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._answers: OrderedDict[bytes, Probabilities] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes) -> Probabilities | None:
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, answer: Probabilities) -> None:
        if not self.max_entries:
            return
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self.max_entries:
            self._answers.popitem(last=False)
