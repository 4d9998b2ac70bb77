"""What becomes of the promises on texts that are unlike the rows they were fitted on?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.honest import promises
from benchmarks.honest.texts import LABEL_OF, Event, Model, Scored
from common import calibration
from common.calibration import calibration_error
from inference.engines.answering import UNCERTAIN, UNFAMILIAR, Answering

COVERAGE, MAX_ERROR = 0.95, 0.02
_BINS = 15
_ROWS_OF_EVENTS, _SPLITS = 1000, 50  # to calibrate on instead


def measure(model: Model, events: Sequence[Event]) -> dict[str, Any]:
    """Rows, their titles and current events by year, judged by what half of the rows say."""
    kind = model.loaded.saved.problem_type
    fitted = calibration.fit(kind, model.scored.logits, model.right, model.labels)
    answering = model.fit_on_half().answering
    known = [one for one in events if one.category in LABEL_OF]
    right = np.array([model.labels.index(LABEL_OF[one.category]) for one in known])
    scored = model.score([one.text for one in known])
    titles = model.score(model.titles)[::2]
    sets = {"rows": (model.scored[::2], model.right[::2]), "titles": (titles, model.right[::2])}
    years = np.array([one.year for one in known])
    for year in sorted(set(years)):
        places = np.flatnonzero(years == year)
        sets[f"events of {year}"] = (scored[places], right[places])
    sets["all events"] = (scored, right)
    return {
        "coverage": COVERAGE,
        "max_error": MAX_ERROR,
        "cross_fitted": fitted["calibration_error"],
        "sets": {name: judge(answering, *one) for name, one in sets.items()},
        "calibrated_again": promises.measure(
            scored.logits, right, model.labels, _ROWS_OF_EVENTS, _SPLITS
        ),
    }


def judge(answering: Answering, scored: Scored, right: NDArray[np.int64]) -> dict[str, Any]:
    """What the product answers, text by text, and how often that is right."""
    wanted = answering.wanted(COVERAGE, MAX_ERROR, familiarity=True)
    raw = answering.problem_type.answers(scored.logits)
    calibrated = answering.answers(scored.logits)
    familiar = answering.familiarity(scored.batch, answering.scores(scored.logits))
    told = [
        answering.honest(values, share, wanted)
        for values, share in zip(calibrated.tolist(), familiar, strict=True)
    ]
    names = [answering.labels[i] for i in right]
    in_set = [name in one["set"] for name, one in zip(names, told, strict=True)]
    given = [(one["label"], name) for one, name in zip(told, names, strict=True) if one["label"]]
    is_right = calibrated.argmax(axis=1) == right

    def share(reason: str) -> float:
        return float(np.mean([one["abstained"] == reason for one in told]))

    return {
        "texts": len(right),
        "accuracy": float(is_right.mean()),
        "error_before": calibration_error(raw.max(axis=1), raw.argmax(axis=1) == right),
        "error_after": calibration_error(calibrated.max(axis=1), is_right),
        "held": float(np.mean(in_set)),
        "size": float(np.mean([len(one["set"]) for one in told])),
        "answered": len(given) / len(right),
        "wrong": float(np.mean([label != name for label, name in given])),
        "uncertain": share(UNCERTAIN),
        "unfamiliar": share(UNFAMILIAR),
        "bins_before": bins(raw.max(axis=1), raw.argmax(axis=1) == right),
        "bins_after": bins(calibrated.max(axis=1), is_right),
    }


def bins(confidence: NDArray[np.float64], correct: NDArray[np.bool_]) -> list[list[float]]:
    """Mean confidence and accuracy of equally many answers each, from the least sure on."""
    parts = np.array_split(np.argsort(confidence, kind="stable"), _BINS)
    means = [(float(confidence[one].mean()), float(correct[one].mean())) for one in parts]
    return [[round(value, 4) for value in pair] for pair in means]
