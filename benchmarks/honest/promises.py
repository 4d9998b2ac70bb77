"""Are the promises kept on rows that are like those they were fitted on?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import betabinom, binom

from common import calibration
from common.calibration import CONFIDENCE, Calibration, CalibrationError, Floats
from common.problem_types import SINGLE_LABEL

COVERAGES = (0.9, 0.95, 0.99)
MAX_ERRORS = (0.01, 0.02, 0.05)
Scores = NDArray[np.float32]
Ids = NDArray[np.int64]


def coverage_band(num_fitted: int, num_judged: int, coverage: float) -> tuple[float, float]:
    """The middle 95% of the share of judged rows whose right label is in the set, if the threshold
    is that of conformal prediction: the k-th of n values, k = (n + 1) x coverage, is exceeded by a
    beta-binomial number of the others.
    """
    rank = math.ceil(round((num_fitted + 1) * coverage, 9))
    low, high = betabinom.ppf((0.025, 0.975), num_judged, rank, num_fitted + 1 - rank)
    return low / num_judged, high / num_judged


def most_errors(num_answered: int, max_error: float) -> int:
    """As many errors as chance allows, in 95% of cases, if ``max_error`` is the rate of errors."""
    return int(binom.ppf(CONFIDENCE, num_answered, max_error))


class Rows:
    """Scores and what is right, (rows, labels) and (rows,), with what was fitted on some of them."""

    def __init__(self, scores: Scores, right: Ids, labels: Sequence[str], fitted_on: Ids) -> None:
        self._right, self._is_fitted = right, np.zeros(len(right), dtype=bool)
        self._is_fitted[fitted_on] = True
        record = calibration.fit(SINGLE_LABEL, scores[fitted_on], right[fitted_on], labels)
        self._calibration = Calibration(record, labels)
        self._probabilities = SINGLE_LABEL.answers(self._calibration.scores(scores))
        self._answered = self._probabilities.argmax(axis=1)

    def coverage(self, level: float) -> dict[str, Any]:
        """What sets hold on the other rows."""
        is_in = self._probabilities >= self._calibration.set_rule(level).thresholds
        is_in[np.arange(len(is_in)), self._answered] = True  # as the product does
        judged, right = is_in[~self._is_fitted], self._right[~self._is_fitted]
        held = judged[np.arange(len(right)), right]
        low, high = coverage_band(int(self._is_fitted.sum()), len(right), level)
        share = float(held.mean())
        return {
            "held": share,
            "below": bool(share < low),
            "above": bool(share > high),
            "size": float(judged.sum(axis=1).mean()),
            "by_label": [float(held[right == i].mean()) for i in range(judged.shape[1])],
        }

    def errors(self, bound: float) -> dict[str, Any] | None:
        """How often the answers that are given to the other rows are wrong; None: no threshold."""
        try:
            thresholds = np.asarray(self._calibration.point(bound).thresholds)
        except CalibrationError:
            return None
        is_given = self._probabilities.max(axis=1) >= thresholds[self._answered]
        is_wrong = is_given & (self._answered != self._right)
        answered, wrong = (int(one[~self._is_fitted].sum()) for one in (is_given, is_wrong))
        return {
            "answered": answered / int((~self._is_fitted).sum()),
            "wrong": wrong / max(1, answered),
            "more": wrong > bound * answered,
            "beyond_chance": wrong > most_errors(answered, bound),
            "more_in_all": bool(is_wrong.sum() > bound * is_given.sum()),
        }


def measure(
    scores: Scores, right: Ids, labels: Sequence[str], size: int, splits: int
) -> dict[str, Any]:
    """Fit on ``size`` rows drawn at random and judge on the others, ``splits`` times."""
    coverages: dict[float, list[dict[str, Any]]] = {level: [] for level in COVERAGES}
    errors: dict[float, list[dict[str, Any] | None]] = {bound: [] for bound in MAX_ERRORS}
    draw = np.random.default_rng(size)
    for _ in range(splits):
        rows = Rows(scores, right, labels, draw.permutation(len(right))[:size])
        for level, found in coverages.items():
            found.append(rows.coverage(level))
        for bound, told in errors.items():
            told.append(rows.errors(bound))
    return {
        "rows": size,
        "judged": len(right) - size,
        "splits": splits,
        "coverage": [_of_coverage(level, found) for level, found in coverages.items()],
        "errors": [_of_errors(bound, told) for bound, told in errors.items()],
    }


def _of_coverage(level: float, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    held = [one["held"] for one in found]
    by_label: Floats = np.array([one["by_label"] for one in found])
    return {
        "coverage": level,
        "held": mean(held),
        "sd": pstdev(held),
        "below": mean(one["below"] for one in found),
        "above": mean(one["above"] for one in found),
        "size": mean(one["size"] for one in found),
        "lowest_label": float(by_label.mean(axis=0).min()),
    }


def _of_errors(bound: float, told: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    found = [one for one in told if one is not None]
    figures = {name: mean(one[name] for one in found) for name in found[0]} if found else {}
    return {"max_error": bound, "without": 1 - len(found) / len(told), **figures}
