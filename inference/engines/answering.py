"""What a model's answers say: one label, several labels or a number. A class per problem type."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from common.calibration import Calibration, CalibrationError, OperatingPoint, SetRule
from common.errors import share_or_name
from common.escaping import some_of
from common.model_folder import SavedModel
from common.problem_types import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ProblemType
from inference.engines.base import TokenBatch
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

# Why a model does not answer.
UNCERTAIN, UNFAMILIAR = "uncertain", "unfamiliar"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for in addition to the answer: a set or interval with coverage, an answer only
    if it is sure enough, and how familiar the text is.
    """

    rule: SetRule | None = None
    point: OperatingPoint | None = None
    familiarity: bool = False

    @property
    def needs_familiarity(self) -> bool:
        return self.familiarity or self.point is not None


NOTHING_MORE = Wanted()


class Answering:
    """Reads the answers of one model; ``values`` are those to one text, in the labels' order."""

    problem_type: ProblemType

    def __init__(
        self,
        labels: Sequence[str],
        thresholds: Sequence[float] = (),
        calibration: Calibration | None = None,
    ) -> None:
        self.labels = list(labels)
        self.calibration = calibration
        self.thresholds = self._calibrated(list(thresholds))

    @staticmethod
    def of(saved: SavedModel, calibration: Calibration | None = None) -> Answering:
        return _CLASSES[saved.problem_type.name](saved.labels, saved.thresholds, calibration)

    def _calibrated(self, thresholds: list[float]) -> list[float]:
        return thresholds

    def scores(self, logits: NDArray[np.float32]) -> NDArray[Any]:
        """The calibrated scores, (texts, labels); those of a model without calibration as is."""
        return logits if self.calibration is None else self.calibration.scores(logits)

    def answers(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """What the engine's scores mean, (texts, labels): calibrated probabilities, or a number."""
        return self.problem_type.answers(self.scores(logits))

    def read(
        self, batch: TokenBatch, logits: NDArray[np.float32], wanted: Wanted
    ) -> tuple[NDArray[np.float64], Sequence[float | None]]:
        """The answers to the texts of a forward pass, (texts, labels), and how familiar each text
        is: None where nothing that is asked for needs it, or the model cannot tell.
        """
        # Scores that are no finite number become NaN, which the caller looks for.
        with np.errstate(invalid="ignore"):
            scores = self.scores(logits)
            known = self.familiarity(batch, scores) if wanted.needs_familiarity else []
            return self.problem_type.answers(scores), known or [None] * len(scores)

    def familiarity(self, batch: TokenBatch, scores: NDArray[Any]) -> list[float]:
        """Of each text, by its calibrated scores; empty if the model cannot tell."""
        if self.calibration is None or self.calibration.familiarity is None:
            return []
        return self.calibration.familiarity.of(batch.ids, batch.lengths, scores).tolist()

    def wanted(
        self,
        coverage: float | None = None,
        max_error: float | str | None = None,
        familiarity: bool = False,
    ) -> Wanted:
        """What is asked for, in terms of this model; ``max_error`` is a share of wrong answers,
        such as 0.02 or "2%", or the name of an operating point.

        Raises:
            CalibrationError: the model cannot promise it.
            ValueError: ``max_error`` is no share and no name.
        """
        if coverage is None and max_error is None and not familiarity:
            return NOTHING_MORE
        known = self.calibration
        if known is None:
            what = "is not calibrated, so it has no coverage, no max_error and no familiarity"
            raise CalibrationError(f"this model {what}; export it again, with labelled rows")
        if familiarity and known.familiarity is None:
            what = "this model cannot tell how familiar a text is: its export had too few texts"
            raise CalibrationError(what)
        if isinstance(max_error, str):
            max_error = share_or_name(max_error)
        return Wanted(
            None if coverage is None else known.set_rule(coverage),
            None if max_error is None else known.point(max_error),
            familiarity,
        )

    def honest(
        self, values: Sequence[float], familiarity: float | None, wanted: Wanted
    ) -> dict[str, Any]:
        """The fields that are asked for in addition to those of :meth:`fields`, or in their place:
        ``set`` or ``interval`` with their ``coverage``, ``familiarity``, and ``abstained``, which
        is None where the model answers, and says why where it does not.
        """
        more: dict[str, Any] = {}
        if wanted.familiarity:
            more["familiarity"] = familiarity
        if wanted.rule is not None:
            more |= self._set(values, wanted.rule) | {"coverage": wanted.rule.coverage}
        if wanted.point is not None:
            limit = self.calibration.familiarity.limit if familiarity is not None else 0.0
            more |= self._decided(values, wanted.point, (familiarity or 0.0) < limit)
        return more

    def _set(self, values: Sequence[float], rule: SetRule) -> dict[str, Any]:
        return {"set": [self.labels[i] for i in rule.members(values)]}

    def _decided(
        self, values: Sequence[float], point: OperatingPoint, is_foreign: bool
    ) -> dict[str, Any]:
        raise NotImplementedError

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

    def predict(
        self,
        values: Sequence[float],
        familiarity: float | None = None,
        wanted: Wanted = NOTHING_MORE,
    ) -> dict[str, Any]:
        plain = self.fields(values, self.given(values))
        return plain | self.honest(values, familiarity, wanted)

    def joined(self, labels: Sequence[str]) -> str:
        """Several labels in one cell, as training reads them."""
        if self._would_fall_apart:  # a list is read too
            return json.dumps(labels, ensure_ascii=False)
        return "|".join(labels)

    @cached_property
    def _would_fall_apart(self) -> bool:
        return any(re.search(r"[,;|]|^\s*\[", label) for label in self.labels)

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

    def _set(self, values: Sequence[float], rule: SetRule) -> dict[str, Any]:
        # The most probable label is in every set: more than asked for never breaks the promise, and
        # an empty set would say nothing.
        best = self.given(values)[0][0]
        others = [self.labels[i] for i in rule.members(values)]
        return {"set": [best, *(label for label in others if label != best)]}

    def _decided(
        self, values: Sequence[float], point: OperatingPoint, is_foreign: bool
    ) -> dict[str, Any]:
        chosen, is_sure = point.choose(values)
        if is_foreign or not is_sure:
            return {"label": None, "abstained": UNFAMILIAR if is_foreign else UNCERTAIN}
        return {"label": self.labels[chosen], "confidence": values[chosen], "abstained": None}

    def without_words(self, value: float) -> float:
        return 1 / len(self.labels)


class SeveralLabelsAnswering(Answering):
    problem_type = MULTI_LABEL

    def _calibrated(self, thresholds: list[float]) -> list[float]:
        # They were chosen for the probabilities as the model gives them. Calibrated in the same
        # way, they give the same labels as before.
        if self.calibration is None or not thresholds:
            return thresholds
        inside = np.clip(thresholds, 1e-12, 1 - 1e-12)
        scores = np.log(inside) - np.log1p(-inside)
        return self.answers(scores[None])[0].tolist()

    def given(self, values: Sequence[float]) -> list[tuple[str, float | None]]:
        return self._reaching(self.thresholds, values)

    def _reaching(
        self, thresholds: Sequence[float], values: Sequence[float]
    ) -> list[tuple[str, float | None]]:
        reached = [
            (label, value)
            for label, value, threshold in zip(self.labels, values, thresholds, strict=True)
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

    def _decided(
        self, values: Sequence[float], point: OperatingPoint, is_foreign: bool
    ) -> dict[str, Any]:
        if is_foreign:
            return {"labels": [], "abstained": UNFAMILIAR}
        # Where the point bounds a label, it alone decides, as it was certified; else the model does.
        least = [own or usual for own, usual in zip(point.thresholds, self.thresholds, strict=True)]
        sure = [label for label, _ in self._reaching(least, values)]
        return {"labels": sure, "abstained": UNCERTAIN if self.given(values) and not sure else None}

    def without_words(self, value: float) -> float:
        return 0.5


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

    def _set(self, values: Sequence[float], rule: SetRule) -> dict[str, Any]:
        return {"interval": [values[0] - rule.half_width, values[0] + rule.half_width]}

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
