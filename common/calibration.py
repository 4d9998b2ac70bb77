"""Probabilities that mean what they say, sets that hold the right label as often as promised, and
thresholds below which a model had better not answer.

All of it is fitted on held-out rows with the scores of the artefact that is served, kept as plain
numbers in the artefact's manifest, and applied by every face from there. The promises hold for
texts like those rows, drawn from where they were drawn; no promise survives a change of the texts.

- Temperature scaling: Guo et al., arXiv 1706.04599.
- Sets by split conformal prediction, in which a label's score is its probability: Sadinle et al.,
  arXiv 1609.00451; several labels by conformal risk control: Angelopoulos et al., arXiv 2208.02814.
- Thresholds by Learn-then-Test: Angelopoulos et al., arXiv 2110.01052; of a cascade by the same
  test, of how often two models disagree.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.escaping import some_of
from common.familiarity import Familiarity
from common.problem_types import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ProblemType

Floats = NDArray[np.float64]

# The probability, over the held-out rows that are drawn, with which a bound on errors holds.
CONFIDENCE = 0.95
# Fewer rows say next to nothing: at 90% coverage, 100 rows still leave three points either way.
FEWEST_ROWS = 100
COVERAGES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999)
MAX_ERRORS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2)
# Thresholds are tried from the strictest on, 1 - 0.0001, to the loosest, 1 - 0.75. They are fixed
# beforehand: thresholds taken from the rows themselves would be tested on what chose them.
_THRESHOLDS = 1 - np.geomspace(1e-4, 0.75, 200)
# By what factor each stricter threshold of a cascade passes on more texts than the one before; and
# the share from which the first one begins, since less than this is hardly noticed.
_STRICTER = 1.5
_LEAST_PASSED_ON = 0.05
# No probability reaches it.
NEVER_SURE = 1.01
_FOLDS = 10
_MOST_ROWS_NEEDED = 10**7  # more is no advice
_BINS = 15
# Two numbers per label are fitted only where every one of them has about this many rows to go by.
_ROWS_PER_LABEL = 100
_MOST_LABELS_SCALED = 50
# A label is rare if it has less than half of what it had if all were equally frequent.
_RARE = 0.5


class CalibrationError(ValueError):
    """What was asked for cannot be promised; the message says why, and what would help."""


# ------------------------------------------------------------------------------------------- fit


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an export is asked to certify.

    ``max_errors``: by the name of the operating point, the largest share of wrong answers among
    those given. ``precisions``: by label, the least share of right ones among the answers with it.
    ``costs``: what an answer costs, (right label, label answered), with ``max_cost``, the largest
    mean cost of the answers given.
    """

    max_errors: Mapping[str, float] = field(default_factory=dict)
    precisions: Mapping[str, float] = field(default_factory=dict)
    costs: Sequence[Sequence[float]] = ()
    max_cost: float = 0.0


def fit(
    kind: ProblemType,
    scores: NDArray[np.float32],
    targets: Sequence[Any],
    labels: Sequence[str],
    bounds: Bounds = Bounds(),
) -> dict[str, Any]:
    """Fit a calibration, as the manifest keeps it.

    Args:
        scores: of the artefact that is to be served, (rows, labels), on rows that neither trained
            it nor chose among its versions.
        targets: what is right for each row: the class id, the ids of the labels, or the number.

    Raises:
        CalibrationError: there are too few rows, or no threshold holds for one of the bounds.
    """
    _refuse_unusable(scores)
    if kind is REGRESSION and bounds != Bounds():
        what = "max_error, precision and costs are for labels"
        raise CalibrationError(f"{what}; this model answers with a number")
    if kind is not SINGLE_LABEL and (bounds.max_errors or bounds.costs):
        what = "max_error and costs are for models that give one label"
        raise CalibrationError(f"{what}; this one answers {kind.name}")
    fitted = _FITTED[kind.name](scores.astype(np.float64), targets, labels, bounds)
    return {"rows": len(scores), "confidence": CONFIDENCE, **fitted}


def fit_answers(
    probabilities: Floats, targets: Sequence[int], labels: Sequence[str]
) -> dict[str, Any]:
    """Fit what can be promised of one-label answers that are calibrated already, such as those of
    two models that answer as one: as `fit`, without any scale, offset or temperature.

    Args:
        probabilities: as they are answered, (rows, labels).
        targets: the class id that is right for each row.

    Raises:
        CalibrationError: there are too few rows.
    """
    _refuse_unusable(probabilities)
    right = np.asarray(targets)
    error = round(_one_label_error(probabilities, right), 6)
    return {
        "rows": len(right),
        "confidence": CONFIDENCE,
        "calibration_error": {"after": error, "bins": _BINS},
        **_promises(probabilities, right, labels, Bounds()),
    }


def _refuse_unusable(scores: NDArray[Any]) -> None:
    if len(scores) < FEWEST_ROWS:
        what = f"{len(scores)} rows are too few to calibrate on, at least {FEWEST_ROWS} are needed"
        raise CalibrationError(what)
    if broken := int((~np.isfinite(scores)).any(axis=1).sum()):
        what = f"{broken} of {len(scores)} rows are answered with scores that are no finite numbers"
        raise CalibrationError(f"{what}; such a model cannot be calibrated")


def _fit_one_label(
    scores: Floats, targets: Sequence[int], labels: Sequence[str], bounds: Bounds
) -> dict[str, Any]:
    right = np.asarray(targets)
    factor = _temperature(scores, right)
    scale, offset = np.full(len(labels), factor), np.zeros(len(labels))
    found: dict[str, Any] = {"method": "temperature", "temperature": 1 / factor}
    # Figures come from folds: each row is judged by a fit that has not seen it.
    folds = [np.arange(len(right)) % _FOLDS != i for i in range(_FOLDS)]
    factors = [_temperature(scores[kept], right[kept]) for kept in folds]
    judged = _out_of_fold(scores, [(one, offset) for one in factors])
    if len(right) >= _ROWS_PER_LABEL * len(labels) and len(labels) <= _MOST_LABELS_SCALED:
        fits = [
            _vector(scores[kept], right[kept], one)
            for kept, one in zip(folds, factors, strict=True)
        ]
        by_label = _out_of_fold(scores, fits)
        gain = np.log(_at(by_label, right)) - np.log(_at(judged, right))
        # More numbers have to earn their keep, beyond what chance would give them.
        if gain.mean() > 2 * gain.std() / math.sqrt(len(gain)):
            (scale, offset), judged = _vector(scores, right, factor), by_label
            found = {
                "method": "vector",
                "scale": scale.tolist(),
                "offset": offset.tolist(),
                # Unlike a temperature, it may change which label is the most probable.
                "accuracy": {
                    "before": round(float((scores.argmax(axis=1) == right).mean()), 6),
                    "after": round(float((judged.argmax(axis=1) == right).mean()), 6),
                },
            }
    raw = SINGLE_LABEL.answers(scores)
    probabilities = SINGLE_LABEL.answers(scores * scale + offset)
    return {
        **found,
        "calibration_error": _before_after(_one_label_error, raw, judged, right),
        **_promises(probabilities, right, labels, bounds),
    }


def _promises(
    probabilities: Floats, right: NDArray[np.int64], labels: Sequence[str], bounds: Bounds
) -> dict[str, Any]:
    missing = [name for i, name in enumerate(labels) if not (right == i).any()]
    return {
        **({"labels_without_rows": missing} if missing else {}),
        "coverage": _coverages(probabilities, right, labels),
        "operating_points": _points(probabilities, right, labels, bounds),
    }


def _fit_several_labels(
    scores: Floats, targets: Sequence[Sequence[int]], labels: Sequence[str], bounds: Bounds
) -> dict[str, Any]:
    applies = np.zeros(scores.shape, dtype=bool)
    for row, ids in enumerate(targets):
        applies[row, list(ids)] = True
    scale, offset = _platt(scores, applies)
    folds = np.arange(len(scores)) % _FOLDS
    judged = np.empty_like(scores)
    for i in range(_FOLDS):
        a, b = _platt(scores[folds != i], applies[folds != i])
        judged[folds == i] = MULTI_LABEL.answers(scores[folds == i] * a + b)
    probabilities = MULTI_LABEL.answers(scores * scale + offset)
    missing = [name for i, name in enumerate(labels) if not applies[:, i].any()]
    return {
        "method": "per label",
        "scale": scale.tolist(),
        "offset": offset.tolist(),
        **({"labels_without_rows": missing} if missing else {}),
        "calibration_error": _before_after(
            _several_labels_error, MULTI_LABEL.answers(scores), judged, applies
        ),
        "coverage": [
            {"coverage": level, "threshold": found}
            for level in COVERAGES
            if (found := _missed_labels_threshold(probabilities, applies, level)) is not None
        ],
        "operating_points": _label_precisions(probabilities, applies, labels, bounds),
    }


def _fit_number(
    scores: Floats, targets: Sequence[float], labels: Sequence[str], bounds: Bounds
) -> dict[str, Any]:
    residuals = np.abs(scores[:, 0] - np.asarray(targets, dtype=np.float64))
    levels = ((level, _conformal_rank(len(residuals), level)) for level in COVERAGES)
    # The k-th smallest of n residuals: the next one is among those k with probability k / (n + 1).
    return {
        "method": "intervals",
        "coverage": [
            {"coverage": level, "half_width": float(np.sort(residuals)[rank - 1])}
            for level, rank in levels
            if rank <= len(residuals)
        ],
        "operating_points": {},
    }


_FITTED = {
    SINGLE_LABEL.name: _fit_one_label,
    MULTI_LABEL.name: _fit_several_labels,
    REGRESSION.name: _fit_number,
}


def _temperature(scores: Floats, right: NDArray[np.int64]) -> float:
    """The factor (one over the temperature) at which the rows are most likely."""
    # A label per row: numpy adds rows of many numbers faster than many rows of a few.
    shifted = np.ascontiguousarray((scores - scores.max(axis=1, keepdims=True)).T)
    of_target = (_softened(right, scores.shape[1]).T * shifted).sum(axis=0)

    def slope(log_factor: float) -> float:
        # Of the mean negative log likelihood, in the factor: what is expected of the right score
        # less what it is. The loss is convex in the factor, so the slope crosses 0 once.
        weights = np.exp(shifted * math.exp(log_factor))
        return float(((weights * shifted).sum(0) / weights.sum(0) - of_target).mean())

    low, high = -4.0, 4.0
    for _ in range(40):  # to a relative precision of 1e-11
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return math.exp((low + high) / 2)


def _softened(right: NDArray[np.int64], num_labels: int) -> Floats:
    """The labels that are right, (rows, labels), as if one more row had had another: rows that are
    all answered right are no proof that no answer is ever wrong.
    """
    doubt = 1 / (len(right) + 2)
    target = np.full((len(right), num_labels), doubt / max(1, num_labels - 1))
    target[np.arange(len(right)), right] = 1 - doubt
    return target


def _vector(scores: Floats, right: NDArray[np.int64], factor: float) -> tuple[Floats, Floats]:
    """A factor and an offset for each label (vector scaling), by Newton's method from the one
    ``factor`` of `_temperature` on.
    """
    k = scores.shape[1]
    softened = _softened(right, k)
    # A weak pull towards the temperature decides what the rows leave open, such as the sum of the
    # offsets, which no probability depends on.
    target = np.concatenate([np.full(k, factor), np.zeros(k)])
    found, factors = target.copy(), np.hstack([scores, np.ones_like(scores)])  # (rows, 2 labels)
    for _ in range(20):
        p = SINGLE_LABEL.answers(scores * found[:k] + found[k:])
        miss = p - softened
        gradient = (factors * np.tile(miss, 2)).sum(axis=0) + (found - target)
        # Second derivatives: diag(p) - p p' between labels, times the two factors.
        weighted = factors * np.tile(p, 2)
        hessian = np.eye(2 * k) - weighted.T @ weighted
        for i in range(k):
            pair = [i, k + i]
            hessian[np.ix_(pair, pair)] += weighted[:, pair].T @ factors[:, pair]
        step = np.linalg.solve(hessian, gradient)
        found -= step / max(1.0, float(np.abs(step).max()))  # no leap beyond 1
        if np.abs(step).max() < 1e-8:
            break
    # A label whose scores say the opposite of what is right would turn around; it is left flat.
    return np.maximum(found[:k], 1e-3), found[k:]


def _platt(scores: Floats, applies: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """A factor and an offset for each label (Platt scaling); a label with few rows, on either side,
    is pulled towards its score as it is.
    """
    factor, offset = np.ones(scores.shape[1]), np.zeros(scores.shape[1])
    with_label, without = applies.sum(axis=0), (~applies).sum(axis=0)
    # As Platt has it: rows that are all told apart are no proof that all others will be.
    target = np.where(applies, (with_label + 1) / (with_label + 2), 1 / (without + 2))
    for _ in range(30):  # Newton's method, for all labels at once
        p = MULTI_LABEL.answers(scores * factor + offset)
        miss, weight = p - target, p * (1 - p)
        g_a, g_b = (miss * scores).sum(0) + (factor - 1), miss.sum(0) + offset
        h_aa, h_ab, h_bb = (
            (weight * scores**2).sum(0) + 1,
            (weight * scores).sum(0),
            weight.sum(0) + 1,
        )
        det = h_aa * h_bb - h_ab**2
        step_a, step_b = (h_bb * g_a - h_ab * g_b) / det, (h_aa * g_b - h_ab * g_a) / det
        limit = np.maximum(1.0, np.maximum(np.abs(step_a), np.abs(step_b)))
        factor, offset = factor - step_a / limit, offset - step_b / limit
        if max(np.abs(step_a).max(), np.abs(step_b).max()) < 1e-8:
            break
    return np.maximum(factor, 1e-3), offset  # as above


def _out_of_fold(scores: Floats, fits: Sequence[tuple[Any, Floats]]) -> Floats:
    judged = np.empty_like(scores)
    for i, (scale, offset) in enumerate(fits):
        judged[i::_FOLDS] = SINGLE_LABEL.answers(scores[i::_FOLDS] * scale + offset)
    return judged


def calibration_error(confidence: Floats, correct: NDArray[np.bool_]) -> float:
    """How far confidence is from accuracy, on average, over 15 bins of equally many answers."""
    order = np.argsort(confidence, kind="stable")
    gaps = (
        abs(float(confidence[part].sum() - correct[part].sum()))
        for part in np.array_split(order, _BINS)
    )
    return sum(gaps) / len(order)


def _one_label_error(probabilities: Floats, right: NDArray[np.int64]) -> float:
    return calibration_error(probabilities.max(axis=1), probabilities.argmax(axis=1) == right)


def _several_labels_error(probabilities: Floats, applies: NDArray[np.bool_]) -> float:
    return calibration_error(probabilities.ravel(), applies.ravel())


def _before_after(error: Any, raw: Floats, judged: Floats, right: Any) -> dict[str, Any]:
    return {
        "before": round(error(raw, right), 6),
        "after": round(error(judged, right), 6),
        "bins": _BINS,
        "folds": _FOLDS,
    }


def _at(values: Floats, right: NDArray[np.int64]) -> Floats:
    return values[np.arange(len(right)), right]


def _conformal_rank(count: int, coverage: float) -> int:
    # Rounded first, or 0.95 x 20 would be 19.000000000000004.
    return math.ceil(round((count + 1) * coverage, 9))


def _coverages(
    probabilities: Floats, right: NDArray[np.int64], labels: Sequence[str]
) -> list[dict[str, Any]]:
    """For each coverage, the least probability with which a label is in the set."""
    counts = np.bincount(right, minlength=len(labels))
    is_rare = counts < _RARE * len(right) / len(labels)
    of_right = _at(probabilities, right)
    found: list[dict[str, Any]] = []
    for level in COVERAGES:
        # A rare label gets a threshold of its own if it has the rows: in one for all, the frequent
        # labels would keep the promise, and the rare one might nearly always be missed.
        is_own = is_rare & (np.array([_conformal_rank(n, level) for n in counts]) <= counts)
        together = _set_threshold(of_right[~is_own[right]], level)
        if together is None:
            continue
        own = {
            labels[i]: _set_threshold(of_right[right == i], level) for i in np.flatnonzero(is_own)
        }
        thresholds = [own.get(label, together) for label in labels]
        sizes = np.maximum(1, (probabilities >= thresholds).sum(axis=1))
        too_few = [labels[i] for i in np.flatnonzero(is_rare & ~is_own & (counts > 0))]
        found.append(
            {
                "coverage": level,
                "threshold": together,
                "mean_size": round(float(sizes.mean()), 4),
                **({"own_thresholds": own} if own else {}),
                **({"too_few_rows": too_few} if too_few else {}),
            }
        )
    return found


def _set_threshold(of_right: Floats, coverage: float) -> float | None:
    """The k-th largest probability of the right label, k = (n + 1) x coverage: the right label of
    the next text reaches it with that probability.
    """
    rank = _conformal_rank(len(of_right), coverage)
    return float(np.sort(of_right)[len(of_right) - rank]) if rank <= len(of_right) else None


def _missed_labels_threshold(
    probabilities: Floats, applies: NDArray[np.bool_], coverage: float
) -> float | None:
    """The largest threshold at which, on average over texts, at most 1 - coverage of a text's
    labels are missed.
    """
    n, most = len(applies), 1 - coverage
    # The share of a row's labels that one missed label is, sorted by the probability at which it is
    # missed: the running sum is the loss of all rows together.
    of_labels = probabilities[applies]
    weights = np.broadcast_to(1 / np.maximum(1, applies.sum(1))[:, None], applies.shape)[applies]
    order = np.argsort(of_labels)
    lost = np.cumsum(weights[order])  # if the threshold is just above each
    # Conformal risk control: (sum of losses + 1) / (n + 1), the 1 for the text to come.
    allowed = np.searchsorted(lost, most * (n + 1) - 1, side="right")
    if most * (n + 1) < 1:
        return None
    return float(of_labels[order][min(allowed, len(order) - 1)]) if len(order) else 1.0


def _points(
    probabilities: Floats, right: NDArray[np.int64], labels: Sequence[str], bounds: Bounds
) -> dict[str, Any]:
    """The operating points by name: the standard levels, and those that were asked for."""
    answered, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
    wrong = answered != right
    found: dict[str, Any] = {}
    standard = {f"{level:g}": level for level in MAX_ERRORS}
    for name, level in (standard | dict(bounds.max_errors)).items():
        tested = _certify(confidence, wrong, level, 1 - CONFIDENCE)
        if tested.threshold is None and name in bounds.max_errors:
            raise CalibrationError(f"max_error {level:g}: {tested.why_not(len(right))}")
        found[name] = {"max_error": level, **tested.record(len(right))}
    if bounds.precisions:
        found["precision"] = _precisions(confidence, wrong, answered, labels, bounds.precisions)
    if bounds.costs:
        found["costs"] = _within_costs(probabilities, right, bounds)
    return found


@dataclass(frozen=True, slots=True)
class _Tested:
    """What a test of the thresholds found; ``rows_needed`` is an estimate, None if no number of
    rows would do.
    """

    threshold: float | None
    num_answered: int = 0
    num_wrong: int = 0
    rows_needed: int | None = None

    def record(self, num_rows: int) -> dict[str, Any]:
        if self.threshold is None:
            return {"threshold": None, "rows_needed": self.rows_needed}
        return {
            "threshold": self.threshold,
            "answered": round(self.num_answered / num_rows, 4),
            "wrong": self.num_wrong,
        }

    def why_not(self, num_rows: int) -> str:
        what = f"no threshold holds with {CONFIDENCE:.0%} confidence on {num_rows:,} rows"
        if self.rows_needed is None:
            return (
                f"{what}, and more rows would not help: even the surest answers are too often wrong"
            )
        more = max(1, self.rows_needed - num_rows)
        return f"{what}; about {more:,} more rows would be needed"


def _certify(confidence: Floats, wrong: NDArray[np.bool_], most: float, delta: float) -> _Tested:
    """The loosest threshold at which at most ``most`` of the answers are wrong, with probability
    1 - ``delta``.

    From strict to loose, each threshold is tested against "more than ``most`` are wrong", by the
    exact binomial, and the first one that fails ends the search. In this order the tests need no
    correction for their number: to certify a bad threshold, the first bad one has to pass, which
    happens with probability ``delta`` at most.
    """
    order = np.argsort(-confidence, kind="stable")
    sorted_wrong = np.concatenate([[0], np.cumsum(wrong[order])])
    sorted_doubt = np.concatenate([[0.0], np.cumsum(1 - confidence[order])])
    nums = np.searchsorted(-confidence[order], -_THRESHOLDS, side="right")
    # A test of fewer answers than this fails even without an error.
    tested = np.flatnonzero(nums >= math.log(delta) / math.log(1 - most))
    best = _Tested(
        None, rows_needed=_rows_needed(nums, sorted_wrong[nums], most, delta, len(wrong))
    )
    if not len(tested):
        return best
    # Where to begin is free, as long as it depends on the texts and not on what is right for them.
    # The strictest test has few answers, and one unlucky error ends it; so the search begins where,
    # by the probabilities themselves, a test is most likely to pass.
    answers = nums[tested]
    chance = (most - sorted_doubt[answers] / answers) * np.sqrt(answers)
    for i in tested[int(chance.argmax()) :]:
        num, errors = int(nums[i]), int(sorted_wrong[nums[i]])
        if binomial_tail(errors, num, most) > delta:
            break
        best = _Tested(float(_THRESHOLDS[i]), num, errors)
    return best


def _rows_needed(
    nums: NDArray[np.int64], errors: NDArray[np.int64], most: float, delta: float, num_rows: int
) -> int | None:
    """About how many rows would certify the most promising threshold, if it went on as so far."""
    tried = nums > 0
    nums, rates = nums[tried], errors[tried] / nums[tried]
    promising = rates < most
    if not promising.any():
        return None
    # How many answers it takes to tell this rate of errors from ``most`` (normal approximation),
    # and never fewer than a test without any error needs.
    z = NormalDist().inv_cdf(1 - delta)
    answers = z**2 * most * (1 - most) / (most - rates[promising]) ** 2
    answers = np.maximum(answers, math.log(delta) / math.log(1 - most))
    rows = math.ceil(float((answers * num_rows / nums[promising]).min()))
    # If it seems that there are enough already, the search has ended early by bad luck.
    return max(rows, math.ceil(1.5 * num_rows)) if rows <= _MOST_ROWS_NEEDED else None


@dataclass(frozen=True, slots=True)
class Agreement:
    """When a small model may answer in place of a big one.

    Attributes:
        threshold: the least confidence with which it answers.
        stricter: the thresholds after it, ascending; with the last one it never answers.
        num_passed_on: how many of the texts the big model answers.
        num_disagreed: how many of the others it would have answered otherwise.
    """

    threshold: float
    stricter: tuple[float, ...]
    num_passed_on: int
    num_disagreed: int


def certify_agreement(
    confidence: Floats, differs: NDArray[np.bool_], most: float, least_answered: float
) -> Agreement:
    """The least confidence from which on a small model may answer in place of a big one, so that at
    most ``most`` of all texts get another label than the big one gives, with probability
    `CONFIDENCE` over the draw of the texts.

    Args:
        confidence: of the small model for each text, (texts,); 0 for a text that it must pass on.
        differs: whether the big one gives another label, (texts,).
        most: the largest share of all texts, answered by the small model or not.
        least_answered: the share of texts, below 1, that the small model has to answer to be of
            any use.

    Raises:
        CalibrationError: there are too few texts, or it may answer fewer than ``least_answered``.
    """
    count, delta = len(confidence), 1 - CONFIDENCE
    refuse_too_few(count, most)
    # A text goes wrong if the small model answers it and the big one would differ. How many of all
    # texts do so is binomial; `allowed` is the largest number that rules out more than `most`.
    tails = range(math.ceil(most * count) + 1)
    allowed = bisect_right(tails, delta, key=lambda k: binomial_tail(k, count, most)) - 1
    order = np.argsort(-confidence, kind="stable")
    surest, num_wrong = confidence[order], np.cumsum(differs[order])
    # From strict to loose, the count only grows, so the first test that fails is followed by no
    # other that passes. That is also why a threshold may be taken from the texts themselves, unlike
    # in `_certify`: let t be the loosest threshold that keeps the bound. Anything looser can only
    # be chosen if the count at t passes its test too, and t does not depend on the texts.
    # Texts that are equally sure are answered together: only the last of them is a place to stop.
    is_last = np.diff(surest, append=-1.0) < 0
    stops = np.flatnonzero(is_last & (num_wrong <= allowed) & (surest > 0))
    num_answered = int(stops[-1]) + 1 if len(stops) else 0
    if num_answered < max(1, least_answered * count):
        raise CalibrationError(_why_too_few_answered(num_wrong, most, num_answered, least_answered))
    threshold = float(surest[num_answered - 1])
    num_disagreed = int(num_wrong[num_answered - 1])
    stricter = _stricter(surest[::-1], threshold)
    return Agreement(threshold, stricter, count - num_answered, num_disagreed)


def refuse_too_few(count: int, most: float) -> None:
    """Refuse what `certify_agreement` would refuse however often the two models agree.

    Raises:
        CalibrationError: so few texts prove no such bound.
    """
    needed = math.ceil(math.log(1 - CONFIDENCE) / math.log1p(-most))
    if count < needed:
        raise CalibrationError(
            f"{count:,} texts are too few: even if the models always agreed, a bound of "
            f"{100 * most:g}% takes {needed:,} texts, which is {needed - count:,} more"
        )


def _why_too_few_answered(
    num_wrong: NDArray[np.int64], most: float, num_answered: int, least_answered: float
) -> str:
    count = len(num_wrong)
    what = (
        f"the small model may answer only {num_answered / count:.1%} of these {count:,} texts, and "
        f"below {least_answered:.1%} both together are slower than the big model alone"
    )
    # If it answered just enough to be of use, so many would differ.
    at_least = num_wrong[[max(1, math.ceil(least_answered * count)) - 1]]
    needed = _rows_needed(np.array([count]), at_least, most, 1 - CONFIDENCE, count)
    if needed is None:
        return f"{what}; more texts would not help, only a larger bound or a better small model"
    return f"{what}; about {max(1, needed - count):,} more texts would be needed"


def _stricter(ascending: Floats, threshold: float) -> tuple[float, ...]:
    """Thresholds above this one, each passing on more texts by the factor `_STRICTER`."""
    count = len(ascending)
    passed_on = max(int((ascending < threshold).sum()), math.ceil(_LEAST_PASSED_ON * count))
    found = []
    while (passed_on := math.ceil(_STRICTER * passed_on)) < count:
        found.append(float(ascending[passed_on]))
    return (*sorted({one for one in found if one > threshold}), NEVER_SURE)


def binomial_tail(errors: int, count: int, rate: float) -> float:
    """P(at most ``errors`` of ``count`` are wrong) if each is wrong with probability ``rate``."""
    if errors >= count:
        return 1.0
    i = np.arange(1, errors + 1, dtype=np.float64)
    # Each term is the one before times (count - i + 1) / i x odds; in logarithms, as they underflow.
    ratios = np.log(count - i + 1) - np.log(i) + math.log(rate) - math.log1p(-rate)
    terms = count * math.log1p(-rate) + np.concatenate([[0.0], np.cumsum(ratios)])
    peak = float(terms.max())
    return min(1.0, math.exp(peak) * float(np.exp(terms - peak).sum()))


def _precisions(
    confidence: Floats,
    wrong: NDArray[np.bool_],
    answered: NDArray[np.int64],
    labels: Sequence[str],
    wanted: Mapping[str, float],
) -> dict[str, Any]:
    thresholds, shares = {}, {}
    for label, precision in wanted.items():
        is_it = answered == list(labels).index(label)
        # Several labels, several chances to be wrong: each gets its share of them (Bonferroni).
        delta = (1 - CONFIDENCE) / len(wanted)
        tested = _certify(confidence[is_it], wrong[is_it], 1 - precision, delta)
        if tested.threshold is None:
            what = f"precision {label}={precision:g}: no row was answered with {label}"
            if is_it.any():
                what = f"precision {label}={precision:g}: {tested.why_not(int(is_it.sum()))}"
                what += f" that are answered with {label}"
            raise CalibrationError(what)
        thresholds[label] = tested.threshold
        shares[label] = round(tested.num_answered / int(is_it.sum()), 4)
    is_given = confidence >= np.array([thresholds.get(name, 0.0) for name in labels])[answered]
    return {
        "precision": dict(wanted),
        "thresholds": thresholds,
        "answered_of_label": shares,
        "answered": round(float(is_given.mean()), 4),
    }


def _label_precisions(
    probabilities: Floats, applies: NDArray[np.bool_], labels: Sequence[str], bounds: Bounds
) -> dict[str, Any]:
    """Like `_precisions`, where each label is given or not by its own probability."""
    if not bounds.precisions:
        return {}
    thresholds = {}
    for label, precision in bounds.precisions.items():
        i = list(labels).index(label)
        delta = (1 - CONFIDENCE) / len(bounds.precisions)
        tested = _certify(probabilities[:, i], ~applies[:, i], 1 - precision, delta)
        if tested.threshold is None:
            raise CalibrationError(
                f"precision {label}={precision:g}: {tested.why_not(len(applies))}"
            )
        thresholds[label] = tested.threshold
    return {"precision": {"precision": dict(bounds.precisions), "thresholds": thresholds}}


def _within_costs(
    probabilities: Floats, right: NDArray[np.int64], bounds: Bounds
) -> dict[str, Any]:
    """The largest expected cost up to which to answer, so that the mean cost stays within bounds.

    The answer is the label whose expected cost is lowest. Costs are no yes or no, so the test is
    the Hoeffding-Bentkus bound instead of the binomial (arXiv 2101.02703, section 3).
    """
    costs = np.asarray(bounds.costs, dtype=np.float64)
    largest, most = float(costs.max()), bounds.max_cost
    expected = probabilities @ costs
    answered, least = expected.argmin(axis=1), expected.min(axis=1)
    order = np.argsort(least, kind="stable")
    paid = np.concatenate([[0.0], np.cumsum(costs[right, answered][order])])
    hoped = np.concatenate([[0.0], np.cumsum(least[order])])
    # From almost free to twice the bound: to answer where more is expected would be a gamble.
    limits = np.linspace(0, 2 * most, 201)[1:]
    nums = np.searchsorted(least[order], limits, side="right")
    tested = np.flatnonzero((1 - most / largest) ** nums <= 1 - CONFIDENCE)
    best: dict[str, Any] | None = None
    if len(tested):  # begins where a test is most likely to pass, as in `_certify`
        chance = (most - hoped[nums[tested]] / nums[tested]) * np.sqrt(nums[tested])
        tested = tested[int(chance.argmax()) :]
    for i in tested:
        num, mean = int(nums[i]), float(paid[nums[i]] / nums[i])
        if _hoeffding_bentkus(mean / largest, num, most / largest) > 1 - CONFIDENCE:
            break
        best = {
            "threshold": float(limits[i]),
            "answered": round(num / len(right), 4),
            "mean_cost": round(mean, 6),
        }
    if best is None:
        what = f"max_cost {most:g}: no threshold holds with {CONFIDENCE:.0%} confidence on"
        raise CalibrationError(f"{what} {len(right):,} rows; give more rows, or allow more")
    return {"max_cost": most, "costs": costs.tolist(), **best}


def _hoeffding_bentkus(mean: float, count: int, most: float) -> float:
    if mean >= most:
        return 1.0
    divergence = (1 - mean) * math.log((1 - mean) / (1 - most))
    if mean:
        divergence += mean * math.log(mean / most)
    bentkus = math.e * binomial_tail(math.ceil(count * mean), count, most)
    return min(math.exp(-count * divergence), bentkus)


# ----------------------------------------------------------------------------------------- apply


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """When to answer; ``thresholds`` has the least probability of each label. With ``costs`` the
    one threshold is the largest expected cost.
    """

    name: str
    thresholds: tuple[float, ...]
    costs: tuple[tuple[float, ...], ...] = ()

    def choose(self, probabilities: Sequence[float]) -> tuple[int, bool]:
        """The label to answer with, and whether it is sure enough."""
        if self.costs:
            expected = [
                sum(p * row[label] for p, row in zip(probabilities, self.costs, strict=True))
                for label in range(len(probabilities))
            ]
            best = expected.index(min(expected))
            return best, expected[best] <= self.thresholds[0]
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        return best, probabilities[best] >= self.thresholds[best]


@dataclass(frozen=True, slots=True)
class SetRule:
    """How to turn an answer into a set (or an interval) of this coverage."""

    coverage: float
    thresholds: tuple[float, ...] = ()
    half_width: float = 0.0

    def members(self, probabilities: Sequence[float]) -> list[int]:
        """The labels of the set, the most probable first."""
        order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
        return [i for i in order if probabilities[i] >= self.thresholds[i]]


class Calibration:
    """A fitted calibration, as it is read from a manifest.

    Attributes:
        record: what the manifest has.
        scale, offset: of each label's score, (labels,).
        familiarity: compares texts with those that the model was trained on; None where there were
            too few of them.
    """

    def __init__(
        self,
        record: Mapping[str, Any],
        labels: Sequence[str],
        familiarity: Familiarity | None = None,
    ) -> None:
        """Raises:
        KeyError, TypeError, ValueError: the record is not one that `fit` has written for these
            labels.
        """
        self.record = record
        self.familiarity = familiarity
        self._labels = list(labels)
        same = [1 / record.get("temperature", 1.0)] * len(labels)
        self.scale = np.asarray(record.get("scale", same), dtype=np.float64)
        self.offset = np.asarray(record.get("offset", [0.0] * len(labels)), dtype=np.float64)
        if not self.scale.shape == self.offset.shape == (len(labels),):
            raise ValueError("scale and offset must have a number for each label")
        if not (np.isfinite(self.scale) & np.isfinite(self.offset) & (self.scale > 0)).all():
            raise ValueError("scale and offset must be finite, and scale greater than 0")
        self._sets = [
            SetRule(
                float(one["coverage"]),
                self._by_label(one.get("own_thresholds", {}), one.get("threshold", 0.0)),
                float(one.get("half_width", 0.0)),
            )
            for one in record["coverage"]
        ]
        points = record["operating_points"]
        self._points = {
            name: self._read_point(name, one)
            for name, one in points.items()
            if one.get("threshold", 0) is not None
        }
        # The bounds that hold, the loosest first, as requests ask for them by their share.
        levels = [(one["max_error"], name) for name, one in points.items() if "max_error" in one]
        self._levels = sorted(levels, reverse=True)

    def _by_label(self, own: Mapping[str, float], other: float) -> tuple[float, ...]:
        return tuple(float(own.get(label, other)) for label in self._labels)

    def _read_point(self, name: str, found: Mapping[str, Any]) -> OperatingPoint:
        if costs := found.get("costs"):
            return OperatingPoint(name, (found["threshold"],), tuple(map(tuple, costs)))
        own = found.get("thresholds", {})
        return OperatingPoint(name, self._by_label(own, found.get("threshold", 0.0)))

    def scores(self, scores: NDArray[np.float32]) -> Floats:
        """The scores whose probabilities are calibrated, (texts, labels)."""
        return scores * self.scale + self.offset

    @property
    def names(self) -> list[str]:
        """The operating points that hold."""
        return list(self._points)

    def set_rule(self, coverage: float) -> SetRule:
        """The least coverage that was fitted and is at least this one.

        Raises:
            CalibrationError: it needs more rows than there were.
        """
        rule = next((one for one in self._sets if one.coverage >= coverage - 1e-9), None)
        if rule is not None:
            return rule
        rows, needed = self.record["rows"], math.ceil(round(coverage / (1 - coverage), 6))
        most = f"the most is {self._sets[-1].coverage:g}" if self._sets else "none can be given"
        what = (
            f"coverage {coverage:g} cannot be promised: the model was calibrated on {rows:,} rows"
        )
        more = f", {needed:,} would be needed" if needed > rows else ""
        raise CalibrationError(f"{what}{more}; {most}")

    def point(self, wanted: float | str) -> OperatingPoint:
        """An operating point by its name, or the loosest one that allows at most so many errors.

        Raises:
            CalibrationError: there is none.
        """
        if isinstance(wanted, str):
            if wanted not in self._points:
                what = f"there is no operating point {wanted[:60]!r}; this model has"
                raise CalibrationError(f"{what} {some_of(self.names) if self._points else 'none'}")
            return self._points[wanted]
        for level, name in self._levels:
            if level <= wanted + 1e-9 and name in self._points:
                return self._points[name]
        raise CalibrationError(self._why_not(wanted))

    def _why_not(self, wanted: float) -> str:
        if not self._levels:
            return "max_error cannot be promised: this model has no such bounds"
        what = f"max_error {wanted:g} cannot be promised with {CONFIDENCE:.0%} confidence on the "
        what += f"{self.record['rows']:,} rows that the model was calibrated on"
        loosest = next((name for level, name in self._levels if level <= wanted + 1e-9), None)
        if loosest and (needed := self.record["operating_points"][loosest]["rows_needed"]):
            what += f", about {needed:,} would be needed"
        held = [level for level, name in self._levels if name in self._points]
        return f"{what}; the least is {held[-1]:g}" if held else what
