"""Runs the reference and an artefact on the same rows, in turns: how much worse the artefact is in
the metric of the task, which answers changed, and how fast each was.

What `--max_drop` limits is the drop in accuracy or micro-F1, in percentage points, or the increase
of the RMSE of a regression model, in percent.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.model_folder import SavedModel
from common.problem_types import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from common.rows import LabelledRows, public_name
from common.text import Text, in_one_line
from inference.engines.answering import spread_of
from inference.engines.base import Engine, scores_of

# Long enough that a turn is more than warming up, short enough that both engines see the same
# machine load.
TURN_TEXTS = 64
_SHOWN_CHARS = 70


@dataclass(frozen=True, slots=True)
class Comparison(ABC):
    """What the reference (before) and the artefact (after) decided, and how long it took."""

    rows: LabelledRows
    labels: list[str]
    before: NDArray[Any]
    after: NDArray[Any]
    before_seconds: float
    after_seconds: float
    reference_scores: NDArray[np.float32]  # (rows, labels)
    scores: NDArray[np.float32]  # of the artefact, (rows, labels)

    @property
    @abstractmethod
    def loss(self) -> float:
        """How much worse the artefact is, in the unit of ``--max_drop``; negative: better."""

    @property
    @abstractmethod
    def loss_line(self) -> str:
        """The loss in words, with both figures."""

    @abstractmethod
    def measured(self) -> dict[str, Any]:
        """What the manifest notes about this metric."""

    @abstractmethod
    def table(self) -> list[tuple[str, str, str, str]]:
        """Rows for people: what, before, after, change."""

    @abstractmethod
    def changed_lines(self, limit: int) -> list[str]:
        """One line for each of the texts whose answer changed, the worst first."""

    @property
    def spread(self) -> float:
        """The unit in which answers are compared: probabilities are as they are."""
        return 1.0

    def accuracy(self) -> dict[str, Any]:
        """What the manifest notes about these rows."""
        return {
            "dataset": public_name(self.rows.name),
            "rows": len(self.rows.texts),
            **self.measured(),
        }

    @property
    def texts_per_second(self) -> tuple[float, float]:
        return len(self.before) / self.before_seconds, len(self.after) / self.after_seconds


class _AccuracyComparison(Comparison):
    """``before`` and ``after``: class ids, (rows,)."""

    @property
    def _class_ids(self) -> NDArray[np.int64]:
        return np.asarray(self.rows.targets, dtype=np.int64)

    @property
    def loss(self) -> float:
        lost = int((self.before == self._class_ids).sum()) - int(
            (self.after == self._class_ids).sum()
        )
        return 100 * lost / len(self._class_ids)

    @property
    def loss_line(self) -> str:
        found = self.measured()
        return (
            f"accuracy drops by {self.loss:.2f} points ({found['before']:.2%} to "
            f"{found['after']:.2%}"
        )

    def measured(self) -> dict[str, Any]:
        was_right, is_right = self.before == self._class_ids, self.after == self._class_ids
        changed = self.before != self.after
        return {
            "before": round(float(was_right.mean()), 6),
            "after": round(float(is_right.mean()), 6),
            "drop_points": round(self.loss, 4),
            "disagreement_percent": round(100 * float(changed.mean()), 4),
            "flipped": {
                "right_to_wrong": int((was_right & changed).sum()),
                "wrong_to_right": int((is_right & changed).sum()),
                "wrong_to_wrong": int((changed & ~was_right & ~is_right).sum()),
            },
        }

    def table(self) -> list[tuple[str, str, str, str]]:
        found = self.measured()
        return [
            (
                "accuracy",
                f"{found['before']:.2%}",
                f"{found['after']:.2%}",
                # Not with a minus sign in front, which would show a loss of zero as -0.00.
                f"{0 - found['drop_points']:+.2f} points",
            ),
            ("changed labels", "", "", f"{found['disagreement_percent']:.2f}%"),
        ]

    def changed_lines(self, limit: int) -> list[str]:
        changed, right = np.flatnonzero(self.before != self.after), self._class_ids
        # False sorts first: those that the reference has right and the artefact has not.
        worst_first = sorted(changed, key=lambda i: self.before[i] != right[i])
        return [
            f"{self.labels[self.before[i]]} -> {self.labels[self.after[i]]} (right: "
            f"{self.labels[right[i]]}): {_shortened(self.rows.texts[i])}"
            for i in worst_first[:limit]
        ]


class _F1Comparison(Comparison):
    """``before`` and ``after``: whether each label is given, (rows, labels)."""

    @property
    def _right(self) -> NDArray[np.bool_]:
        right = np.zeros(self.before.shape, dtype=bool)
        for row, applying in enumerate(self.rows.targets):
            right[row, list(applying)] = True
        return right

    def _f1(self, given: NDArray[np.bool_]) -> float:
        right = self._right
        # 2 TP / (2 TP + FP + FN), of all labels together: given and right ones are TP + FP and TP +
        # FN.
        every = int(given.sum()) + int(right.sum())
        return 2 * int((given & right).sum()) / every if every else 0.0

    @property
    def loss(self) -> float:
        return 100 * (self._f1(self.before) - self._f1(self.after))

    @property
    def loss_line(self) -> str:
        return (
            f"micro-F1 drops by {self.loss:.2f} points ({self._f1(self.before):.2%} to "
            f"{self._f1(self.after):.2%}"
        )

    def measured(self) -> dict[str, Any]:
        return {
            "metric": "micro_f1",
            "before": round(self._f1(self.before), 6),
            "after": round(self._f1(self.after), 6),
            "drop_points": round(self.loss, 4),
            "disagreement_percent": round(100 * float((self.before != self.after).mean()), 4),
        }

    def table(self) -> list[tuple[str, str, str, str]]:
        found = self.measured()
        return [
            (
                "micro-F1",
                f"{found['before']:.2%}",
                f"{found['after']:.2%}",
                f"{0 - found['drop_points']:+.2f} points",
            ),
            ("changed decisions", "", "", f"{found['disagreement_percent']:.2f}%"),
        ]

    def changed_lines(self, limit: int) -> list[str]:
        right = self._right
        # How many decisions became wrong that were right.
        worse = (self.after != right).sum(axis=1) - (self.before != right).sum(axis=1)
        changed = np.flatnonzero((self.before != self.after).any(axis=1))
        return [
            f"{self._names(self.before[i])} -> {self._names(self.after[i])} (right: "
            f"{self._names(right[i])}): {_shortened(self.rows.texts[i])}"
            for i in sorted(changed, key=lambda i: -worse[i])[:limit]
        ]

    def _names(self, given: NDArray[np.bool_]) -> str:
        return (
            ", ".join(label for label, is_given in zip(self.labels, given, strict=True) if is_given)
            or "none"
        )


class _ErrorComparison(Comparison):
    """``before`` and ``after``: numbers, (rows,)."""

    @property
    def _right(self) -> NDArray[np.float64]:
        return np.asarray(self.rows.targets, dtype=np.float64)

    def _rmse(self, found: NDArray[np.float64]) -> float:
        return float(np.sqrt(np.square(found - self._right).mean()))

    @property
    def spread(self) -> float:
        return spread_of(self.before)

    @property
    def loss(self) -> float:
        # A reference without any error would make every rounding an infinite increase.
        before = max(self._rmse(self.before), 1e-3 * self.spread)
        return 100 * (self._rmse(self.after) / before - 1)

    @property
    def loss_line(self) -> str:
        return (
            f"RMSE rises by {self.loss:.2f}% ({self._rmse(self.before):.6g} to "
            f"{self._rmse(self.after):.6g}"
        )

    def measured(self) -> dict[str, Any]:
        return {
            "metric": "rmse",
            "before": self._rmse(self.before),
            "after": self._rmse(self.after),
            "increase_percent": round(self.loss, 4),
            "spread": self.spread,
            "largest_change": float(np.abs(self.after - self.before).max()),
        }

    def table(self) -> list[tuple[str, str, str, str]]:
        found = self.measured()
        return [
            (
                "RMSE",
                f"{found['before']:.6g}",
                f"{found['after']:.6g}",
                f"{found['increase_percent']:+.2f}%",
            ),
            ("largest change", "", "", f"{found['largest_change']:.6g}"),
        ]

    def changed_lines(self, limit: int) -> list[str]:
        worst_first = np.argsort(-np.abs(self.after - self.before), kind="stable")
        return [
            f"{self.before[i]:.6g} -> {self.after[i]:.6g} (right: {self._right[i]:.6g}): "
            f"{_shortened(self.rows.texts[i])}"
            for i in worst_first[:limit]
        ]


_COMPARISONS: dict[str, type[Comparison]] = {
    SINGLE_LABEL.name: _AccuracyComparison,
    MULTI_LABEL.name: _F1Comparison,
    REGRESSION.name: _ErrorComparison,
}


def compare(
    saved: SavedModel,
    reference: Engine,
    artefact: Engine,
    token_ids: Sequence[Sequence[int]],
    rows: LabelledRows,
    advance: Callable[[int], None],
) -> Comparison:
    """Answer all rows with both engines; ``advance`` gets the rows done since its last call."""
    kind = saved.problem_type
    engines = {"before": reference, "after": artefact}
    found: dict[str, list[NDArray[np.float32]]] = {"before": [], "after": []}
    seconds = {"before": 0.0, "after": 0.0}
    for engine in engines.values():
        # The first pass prepares what later ones reuse, so it is not timed.
        scores_of(engine, token_ids[:TURN_TEXTS])
    for turn, start in enumerate(range(0, len(token_ids), TURN_TEXTS)):
        texts = token_ids[start : start + TURN_TEXTS]
        # Alternate which engine goes first, so that neither always finds the caches warm.
        for name in sorted(engines, reverse=bool(turn % 2)):
            began = time.perf_counter()
            found[name].append(scores_of(engines[name], texts))
            seconds[name] += time.perf_counter() - began
        advance(len(texts))
    before, after = (np.concatenate(found[name]) for name in ("before", "after"))
    return _COMPARISONS[kind.name](
        rows=rows,
        labels=saved.labels,
        before=_decisions(saved, kind.answers(before)),
        after=_decisions(saved, kind.answers(after)),
        reference_scores=before,
        scores=after,
        before_seconds=seconds["before"],
        after_seconds=seconds["after"],
    )


def _decisions(saved: SavedModel, answers: NDArray[np.float64]) -> NDArray[Any]:
    if saved.problem_type is SINGLE_LABEL:
        return answers.argmax(axis=1)
    if saved.problem_type is MULTI_LABEL:
        return answers >= np.array(saved.thresholds)
    return answers[:, 0]


def _shortened(text: Text) -> str:
    line = " ".join(in_one_line(text).split())
    return line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 1] + "…"
