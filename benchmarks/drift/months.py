"""How well is the accuracy of later months known without their labels?"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression

from benchmarks.drift.answers import (
    FIRST_MONTH,
    Answers,
    Served,
    dated_events,
    trained_on_first_months,
)
from benchmarks.harness import report
from benchmarks.honest.texts import LABEL_OF
from common.problem_types import SINGLE_LABEL
from common.rows import read_labelled_rows
from inference.observing.estimates import Estimate, estimate, label_shares
from inference.observing.reference import Floats

OURS = "cells"
SWAPPED = ("Business", "Sports")
REVIEWED = 200
_DRAWS = 20  # of the reviewed texts, for each month
_MOST_WEIGHT = 20.0


def measure(options: Namespace) -> dict[str, Any]:
    """A model of the first months, on each of the later ones."""
    served = Served(trained_on_first_months(options), options.work)
    rows = read_labelled_rows(options.work, served.labels)
    held_out = served.answer(rows.texts, rows.targets)
    months = by_month(served, options)
    reference = served.reference
    report(f"{sum(map(len, months.values())):,} texts of {len(months)} months")
    found = []
    for month, one in months.items():
        said = estimate(reference, one.counted(reference), unfamiliar=one.unfamiliar)
        others = methods(served, held_out, one)
        found.append(_figures(one, said) | {"month": month, "others": others})
    draw = np.random.default_rng(0)
    places = [served.labels.index(label) for label in SWAPPED]
    swapped = {month: _swapped(one, *places) for month, one in months.items()}
    return {
        "rows": reference.rows,
        "accuracy": reference.accuracy,
        "confidence": reference.confidence,
        "months": found,
        "reviewed": {
            "texts": REVIEWED,
            "labels": SWAPPED,
            "as they are": [_reviewed(served, one, draw) for one in months.values()],
            "swapped": [_reviewed(served, one, draw) for one in swapped.values()],
        },
        "swapped": [
            _figures(one, estimate(reference, one.counted(reference), unfamiliar=one.unfamiliar))
            for one in swapped.values()
        ],
    }


def measure_foreign(options: Namespace) -> dict[str, Any]:
    """A model of other texts (the news of 2004), on the same months."""
    served = Served(options.model, options.work)
    return {
        "accuracy": served.reference.accuracy,
        "months": [
            # Even if it is not shown: what would it have been?
            _figures(one, estimate(served.reference, one.counted(served.reference)))
            | {
                "reason": estimate(
                    served.reference, one.counted(served.reference), (), one.unfamiliar
                ).reason
            }
            for one in by_month(served, options).values()
        ],
    }


def by_month(served: Served, options: Namespace) -> dict[str, Answers]:
    events = [one for one in dated_events(options.events) if one.date >= FIRST_MONTH]
    right = [served.labels.index(LABEL_OF[one.category]) for one in events]
    answers = served.answer([one.text for one in events], right)
    months = np.array([one.date[:7] for one in events])
    return {str(month): answers[months == month] for month in np.unique(months)}


def _figures(answers: Answers, said: Estimate) -> dict[str, Any]:
    return {
        "texts": len(answers),
        "accuracy": float(answers.is_right.mean()),
        "unfamiliar": answers.unfamiliar / len(answers),
        "value": said.value,
        "low": said.low,
        "high": said.high,
        "reason": said.reason,
    }


def _swapped(answers: Answers, one: int, other: int) -> Answers:
    """As if from now on people meant the other of two labels."""
    right = answers.right.copy()
    right[answers.right == one], right[answers.right == other] = other, one
    return Answers(answers.scores, answers.familiarity, answers.num_tokens, right)


def _reviewed(served: Served, answers: Answers, draw: np.random.Generator) -> dict[str, float]:
    """Errors of the estimate with reviewed texts, and of their mean alone."""
    reference, truth = served.reference, answers.is_right.mean()
    errors, plain, held, width = [], [], [], []
    for _ in range(_DRAWS):
        which = draw.choice(len(answers), min(REVIEWED, len(answers)), replace=False)
        said = estimate(reference, answers.counted(reference), answers.reviewed(reference, which))
        errors.append(said.value - truth)
        plain.append(answers.is_right[which].mean() - truth)
        held.append(said.low <= truth <= said.high)
        width.append((said.high - said.low) / 2)
    means = {"error": np.abs(errors), "plain": np.abs(plain), "held": held, "width": width}
    return {name: float(np.mean(values)) for name, values in means.items()}


def methods(served: Served, held_out: Answers, stream: Answers) -> dict[str, float]:
    """What others estimate; they may look at each text, of which we only have counts."""
    reference = served.reference
    accuracy = float(held_out.is_right.mean())
    sure, usual = stream.confidence, held_out.confidence
    cells = stream.cells(reference)
    right = {cell: one.right / one.rows for cell, one in reference.cells.items()}
    seen = [right[cell] for cell in cells.tolist() if cell in right]
    counts = np.bincount(stream.label, minlength=len(served.labels))
    shares = label_shares(reference, dict(enumerate(counts.tolist())))
    confusion = reference.confusion
    recall = np.diag(confusion) / confusion.sum(axis=1)
    weights = _odds(held_out, stream)
    factor = _recalibrated(held_out, weights)
    return {
        "mean confidence": float(sure.mean()),
        "difference of confidences (DoC)": accuracy + float(sure.mean() - usual.mean()),
        "thresholded confidence (ATC)": float((sure >= np.quantile(usual, 1 - accuracy)).mean()),
        "cells without a prior": float(np.mean(seen)),
        "label shift (BBSE)": float(np.dot(shares, recall)) if shares else accuracy,
        "importance weights": float(np.average(held_out.is_right, weights=weights)),
        "calibration again, weighted (PAPE)": float(
            SINGLE_LABEL.answers(stream.scores * factor).max(axis=1).mean()
        ),
        "accuracy of the held-out rows": accuracy,
    }


def _odds(held_out: Answers, stream: Answers) -> Floats:
    """How much more often such texts come in the stream than among the held-out rows, by their scores and lengths."""
    features = np.concatenate(
        [np.c_[one.scores, np.log(one.num_tokens)] for one in (held_out, stream)]
    )
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    is_stream = np.repeat([0, 1], [len(held_out), len(stream)])
    odds = (
        LogisticRegression(C=0.1, max_iter=300).fit(features, is_stream).decision_function(features)
    )
    weights = np.exp(np.clip(odds[: len(held_out)], -5, 5))
    return np.minimum(weights / weights.mean(), _MOST_WEIGHT)


def _recalibrated(held_out: Answers, weights: Floats) -> float:
    """The factor of the scores at which the weighted rows are most likely."""
    factors = np.exp(np.linspace(-1, 1, 81))

    def loss(factor: float) -> float:
        of_right = SINGLE_LABEL.answers(held_out.scores * factor)[
            np.arange(len(held_out)), held_out.right
        ]
        return float(-np.average(np.log(of_right + 1e-12), weights=weights))

    return float(min(factors, key=loss))
