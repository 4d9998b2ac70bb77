"""How often do both models together answer otherwise than the big one, on texts like those that
the cascade was certified on, and on others?
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean, pstdev
from typing import Any

import numpy as np

from benchmarks.cascading import audit
from benchmarks.cascading.scores import Both, Ids
from benchmarks.honest.promises import most_errors
from common.calibration import CalibrationError, certify_agreement
from common.errors import UserError

BOUNDS = (0.0025, 0.005, 0.01, 0.02)
BOUND = 0.005  # the command's default
ROWS = "rows"
_HALVES = 20
Figures = dict[str, Any]


def measure_splits(both: Both, right: Ids, num_splits: int) -> Figures:
    """Certify on a random half of the rows and count other answers in the other half."""
    return {
        "texts": len(both),
        "splits": num_splits,
        "accuracy": {
            "big": float((both.big == right).mean()),
            "small": float((both.small == right).mean()),
        },
        "differs": float(both.differs.mean()),
        "bounds": [_of_bound(both, right, bound, num_splits) for bound in BOUNDS],
    }


def _of_bound(both: Both, right: Ids, bound: float, num_splits: int) -> Figures:
    draw, found = np.random.default_rng(0), []
    for _ in range(num_splits):
        certified, judged = np.array_split(draw.permutation(len(both)), 2)
        threshold = _certified(both[certified], bound)
        if threshold is not None:
            found.append(judge(both, right, judged, threshold, bound))
    if not found:
        return {"bound": bound, "without": 1.0}
    figures = {name: mean(one[name] for one in found) for name in found[0]}
    # A split without a threshold has no cascade, and so breaks no promise.
    broken = {
        name: figures[name] * len(found) / num_splits for name in ("more", "beyond", "broken")
    }
    return {
        "bound": bound,
        "without": 1 - len(found) / num_splits,
        "sd": pstdev(one["other"] for one in found),
        **figures,
        **broken,
    }


def judge(both: Both, right: Ids, judged: Ids, threshold: float, bound: float) -> dict[str, float]:
    is_other, answers = both.is_other(threshold), both.answers(threshold)
    num_other = int(is_other[judged].sum())
    return {
        "easy": float(both.is_easy(threshold)[judged].mean()),
        "other": num_other / len(judged),
        "accuracy": float((answers == right)[judged].mean()),
        "more": num_other > bound * len(judged),
        "beyond": num_other > most_errors(len(judged), bound),
        "broken": bool(is_other.mean() > bound),
    }


def measure_shift(sets: Mapping[str, tuple[Both, Ids]], num_series: int) -> Figures:
    """What becomes of the rows' certificate on other texts; ``sets``: answers and what is right."""
    rows = sets[ROWS][0]
    threshold = _certified(rows, BOUND)
    if threshold is None:
        what = f"no threshold keeps {BOUND:.1%} on these {len(rows):,} rows; give more rows"
        raise UserError(f"--dataset: {what}", code="benchmark-input")
    found = {}
    for name, (both, right) in sets.items():
        series = audit.simulate(both, threshold, BOUND, num_series)
        found[name] = {
            "texts": len(both),
            "easy": float(both.is_easy(threshold).mean()),
            "other": float(both.is_other(threshold).mean()),
            "accuracy": {
                "big": float((both.big == right).mean()),
                "cascade": float((both.answers(threshold) == right).mean()),
            },
            "certified_again": _of_bound(both, right, BOUND, _HALVES),
            "audit": series,
        }
    return {"bound": BOUND, "threshold": threshold, "halves": _HALVES, "sets": found}


def _certified(both: Both, bound: float) -> float | None:
    try:
        return certify_agreement(both.confidence, both.differs, bound, 0.0).threshold
    except CalibrationError:
        return None
