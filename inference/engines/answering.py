"""What a model's answers say: one label, several labels or a number. A class per problem type."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from common.escaping import some_of
from common.model_folder import SavedModel
from common.problem_types import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ProblemType
from inference.errors import RefusedTextError


class OneLabel(TypedDict):
    """The most likely label, its probability, and the probability of every label."""

    label: str
    confidence: float
    probabilities: dict[str, float]


class SeveralLabels(TypedDict):
    """The labels whose probability reaches their threshold, the best first, and the probability of
    every label.
    """

    labels: list[str]
    probabilities: dict[str, float]


class Number(TypedDict):
    """The number that a regression model answers."""

    value: float


Prediction = OneLabel | SeveralLabels | Number


class Answering:
    """Reads the answers of one model; ``values`` are those to one text, in the labels' order."""

    problem_type: ProblemType

    def __init__(self, labels: Sequence[str], thresholds: Sequence[float] = ()) -> None:
        self.labels = list(labels)
        self.thresholds = list(thresholds)

    @staticmethod
    def of(saved: SavedModel) -> Answering:
        return _CLASSES[saved.problem_type.name](saved.labels, saved.thresholds)

    def given(self, values: Sequence[float]) -> list[tuple[str, float | None]]:
        """The labels that a text gets, the best first, with probabilities (a number has none)."""
        raise NotImplementedError

    def fields(
        self,
        values: Sequence[float],
        given: Sequence[tuple[str, float | None]],
        top_k: int | None = None,
    ) -> dict[str, Any]:
        """A `Prediction`; ``given`` is what :meth:`given` returned, ``top_k`` how many
        probabilities to name.
        """
        raise NotImplementedError

    def predict(self, values: Sequence[float]) -> dict[str, Any]:
        return self.fields(values, self.given(values))

    def place_of(self, values: Sequence[float], label: str | None) -> int:
        """The position of the answer that is explained: of this label, or if none is asked for of
        the most probable.
        """
        return values.index(max(values)) if label is None else self.labels.index(label)

    def refuse_unknown(self, label: str) -> None:
        """Refuse to explain a label that the model has not.

        Raises:
            RefusedTextError: it has not.
        """
        if label not in self.labels:
            what = f"label {label[:60]!r} is not one of the model's labels {some_of(self.labels)}"
            raise RefusedTextError("unknown_label", what)

    def without_words(self, value: float) -> float:
        """The answer to a text without any word: what scores of 0 mean."""
        raise NotImplementedError

    def _named(self, values: Sequence[float], top_k: int | None) -> dict[str, float]:
        named = dict(zip(self.labels, values, strict=True))
        if top_k is not None:
            named = dict(sorted(named.items(), key=lambda item: -item[1])[:top_k])
        return named


class OneLabelAnswering(Answering):
    problem_type = SINGLE_LABEL

    def given(self, values: Sequence[float]) -> list[tuple[str, float | None]]:
        confidence = max(values)
        return [(self.labels[values.index(confidence)], confidence)]

    def fields(
        self,
        values: Sequence[float],
        given: Sequence[tuple[str, float | None]],
        top_k: int | None = None,
    ) -> dict[str, Any]:
        ((label, confidence),) = given
        return {
            "label": label,
            "confidence": confidence,
            "probabilities": self._named(values, top_k),
        }

    def without_words(self, value: float) -> float:
        return 1 / len(self.labels)


class SeveralLabelsAnswering(Answering):
    problem_type = MULTI_LABEL

    def given(self, values: Sequence[float]) -> list[tuple[str, float | None]]:
        reached = [
            (label, value)
            for label, value, threshold in zip(self.labels, values, self.thresholds, strict=True)
            if value >= threshold
        ]
        return sorted(reached, key=lambda one: -one[1])

    def fields(
        self,
        values: Sequence[float],
        given: Sequence[tuple[str, float | None]],
        top_k: int | None = None,
    ) -> dict[str, Any]:
        return {
            "labels": [label for label, _ in given],
            "probabilities": self._named(values, top_k),
        }

    def without_words(self, value: float) -> float:
        return 0.5

    def joined(self, labels: Sequence[str]) -> str:
        """The labels of a text in one cell, as training reads them."""
        # Names that would fall apart are written as a list, which is read too.
        if any(re.search(r"[,;|]|^\s*\[", label) for label in self.labels):
            return json.dumps(labels, ensure_ascii=False)
        return "|".join(labels)


class NumberAnswering(Answering):
    problem_type = REGRESSION

    def given(self, values: Sequence[float]) -> list[tuple[str, float | None]]:
        return [(self.labels[0], None)]

    def fields(
        self,
        values: Sequence[float],
        given: Sequence[tuple[str, float | None]],
        top_k: int | None = None,
    ) -> dict[str, Any]:
        return {"value": values[0]}

    def without_words(self, value: float) -> float:
        # A score of 0 may be far from every number that the model answers, so the only word weighs
        # nothing.
        return value


_CLASSES: dict[str, type[Answering]] = {
    one.problem_type.name: one
    for one in (OneLabelAnswering, SeveralLabelsAnswering, NumberAnswering)
}


def spread_of(answers: NDArray[np.float64], least_share: float = 1e-3) -> float:
    """The standard deviation of a regression model's answers, in which their differences are
    judged.

    Answers that are almost the same count as if they differed by ``least_share`` of their size.
    """
    return max(float(answers.std()), least_share * float(np.abs(answers).max())) or 1.0
