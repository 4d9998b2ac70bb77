"""Whether a new model may take the place of an old one, by their answers to the same labelled rows.

Rows that both have right, or both wrong, do not say which model is better. So only the others count
(McNemar's test): rows that only the old model has right are lost, and rows that only the new one
has right are gained. If the models were equally good, each of these rows would be gained or lost
like the throw of a fair coin, so the p-values are binomial and exact.

The lower bound of the difference is the lesser of two. One takes the number of rows that differ as
given (Clopper and Pearson's bound on the share that was gained): it never errs about that share,
but two models that agreed on all of 100 rows would be equal for it. The other is Tango's score
bound, which knows that more rows would find differences, but is an approximation. With both, a model
that is worse by exactly the margin passes in at most 5.0 of 100 comparisons (computed for 100 to
10,000 rows of which 0.4% to 10% differ); the first alone let up to 67 of them pass, Tango's 5.6.

- McNemar, Psychometrika 12 (1947); Tango, Statistics in Medicine 17 (1998); Holm (1979)
- negative flips: Yan et al., arXiv 2011.09161
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from common.calibration import Floats, binomial_tail, calibration_error
from common.text import counted
from common.verdicts import HOLD, PROMOTE, REJECT

# Of the commands that end with a verdict.
EXIT_CODES = {PROMOTE: 0, HOLD: 10, REJECT: 11}

CONFIDENCE = 0.95
_QUANTILE = 1.644854  # of the normal distribution, for one side
# For the number of rows with which four of five comparisons would come to a decision.
_QUANTILE_OF_POWER = 0.841621
# The accuracy may be less by so much, with the confidence above.
MARGIN = 0.003
# So many rows may become wrong that were right: of all rows, or of those that became right. With
# two gained for each one lost, a model that is 2 points better can pass if 5% of the rows differ.
MOST_FLIPS, MOST_FLIPS_PER_GAIN = 0.01, 0.5
# A fall by more than this counts, if it is not by chance.
MOST_RECALL_LOST = 0.02
MOST_CALIBRATION_LOST = 0.01
# With fewer, no class can be judged.
FEWEST_ROWS = 100
_BOOTSTRAPS = 200
_HALVINGS = 60

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one model: whether each row was classified rightly, and how sure it was; (rows,) each."""

    right: Bools
    confidence: Floats


@dataclass(frozen=True, slots=True)
class ClassChange:
    """Recall of one class under both models.

    ``p``: how probable such a fall is by chance, before the correction for several classes.
    """

    label: str
    rows: int
    before: float
    after: float
    p: float
    loses: bool = False


@dataclass(frozen=True, slots=True)
class CalibrationChange:
    """Calibration error of both models; ``loses``: it is too much larger, and not by chance."""

    before: float
    after: float
    loses: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on the same rows, and the verdict.

    ``lost`` and ``gained``: rows that only the old, and only the new model has right. ``low`` and
    ``high``: of the difference in accuracy, new minus old, each with 95% confidence. ``p_better``
    and ``p_worse``: of McNemar's exact test, one-sided. ``rows_needed``: how many rows would
    probably decide, None if the number of rows is not what is missing.
    """

    rows: int
    accuracy_before: float
    accuracy_after: float
    lost: int
    gained: int
    low: float
    high: float
    p_better: float
    p_worse: float
    classes: list[ClassChange]
    calibration: CalibrationChange
    verdict: str = HOLD
    is_better: bool = False
    reasons: list[str] = field(default_factory=list)
    rows_needed: int | None = None

    @property
    def difference(self) -> float:
        return (self.gained - self.lost) / self.rows


def compare(
    before: Answers,
    after: Answers,
    targets: Sequence[int],
    labels: Sequence[str],
    doubts: Sequence[str] = (),
) -> Comparison:
    """Judge the answers of two models to the same rows, which neither was trained on.

    Args:
        targets: the right label of each row, as an index into ``labels``.
        doubts: what else keeps the new model from being promoted, a sentence each.
    """
    lost = int((before.right & ~after.right).sum())
    gained = int((~before.right & after.right).sum())
    rows = len(before.right)
    found = Comparison(
        rows=rows,
        accuracy_before=float(before.right.mean()),
        accuracy_after=float(after.right.mean()),
        lost=lost,
        gained=gained,
        low=_least_difference(gained, lost, rows),
        high=-_least_difference(lost, gained, rows),
        p_better=chance_of(lost, gained),
        p_worse=chance_of(gained, lost),
        classes=_class_changes(before.right, after.right, np.asarray(targets), labels),
        calibration=_calibration_change(before, after),
    )
    return _judged(found, doubts)


def chance_of(fewer: int, more: int) -> float:
    """McNemar's exact test, one-sided: P(at most ``fewer`` heads in ``fewer + more`` throws)."""
    return binomial_tail(fewer, fewer + more, 0.5)


def _least_difference(gained: int, lost: int, rows: int) -> float:
    """The lower bound of the difference in accuracy."""
    differing = gained + lost
    # A share t of the differing rows that is gained is a difference of (2 t - 1) differing / rows.
    of_share = (2 * _least_share(gained, differing) - 1) * differing / rows
    # z falls as the supposed difference grows; the bound is where it is just significant.
    of_score = _largest(
        lambda supposed: _tango(gained, lost, rows, supposed) > _QUANTILE,
        -1.0,
        (gained - lost) / rows,
    )
    return min(of_share, of_score)


def _least_share(count: int, total: int) -> float:
    """The lower bound of a share: that at which so many have a probability of 5%."""
    if not count:
        return 0.0

    # P(at least `count`) with rate t is P(at most `total - count` others) with rate 1 - t.
    def is_improbable(rate: float) -> bool:
        return binomial_tail(total - count, total, 1 - rate) <= 1 - CONFIDENCE

    return _largest(is_improbable, 0.0, count / total)


def _largest(holds: Callable[[float], bool], below: float, above: float) -> float:
    """The largest number for which something holds that holds near ``below``, by bisection."""
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        if holds(middle):
            below = middle
        else:
            above = middle
    return below


def _tango(gained: int, lost: int, rows: int, supposed: float) -> float:
    """The score statistic of a supposed difference, -1 < supposed < 1: roughly normal.

    ``share`` is the most probable share of lost rows, if the difference is as supposed.
    """
    b = (2 * rows - gained + lost) * supposed - gained - lost
    c = -lost * supposed * (1 - supposed)
    share = (math.sqrt(max(b * b - 8 * rows * c, 0.0)) - b) / (4 * rows)
    variance = rows * (2 * share + supposed * (1 - supposed))
    return (gained - lost - rows * supposed) / math.sqrt(max(variance, 1e-12))


def _class_changes(
    before: Bools, after: Bools, of_class: NDArray[np.int64], labels: Sequence[str]
) -> list[ClassChange]:
    """Of each class that has rows."""
    changes = []
    for i, label in enumerate(labels):
        own = of_class == i
        if not own.any():
            continue
        old, new = before[own], after[own]
        p = chance_of(int((~old & new).sum()), int((old & ~new).sum()))
        changes.append(ClassChange(label, len(old), float(old.mean()), float(new.mean()), p))
    losing = losers([change.p for change in changes])
    return [
        replace(one, loses=i in losing and one.before - one.after > MOST_RECALL_LOST)
        for i, one in enumerate(changes)
    ]


def losers(ps: Sequence[float]) -> set[int]:
    """The places of the p-values that are significant together (Holm).

    Of k, the smallest is compared with 5% / k, the next with 5% / (k - 1), and so on until one is
    larger. Without this, one of twenty classes would seem to lose by chance.
    """
    found: set[int] = set()
    for place, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        if ps[i] > (1 - CONFIDENCE) / (len(ps) - place):
            break
        found.add(i)
    return found


def _calibration_change(before: Answers, after: Answers) -> CalibrationChange:
    """The calibration errors on all rows, and if one is much larger, on rows drawn from them again
    and again: both models get the same ones, so what these have of chance cancels.
    """

    def errors(rows: NDArray[np.int64]) -> tuple[float, float]:
        old, new = (
            calibration_error(one.confidence[rows], one.right[rows]) for one in (before, after)
        )
        return old, new

    count = len(before.right)
    old, new = errors(np.arange(count))
    if new - old <= MOST_CALIBRATION_LOST:
        return CalibrationChange(old, new, loses=False)
    draw = np.random.default_rng(0).integers
    drawn = np.array([errors(draw(count, size=count)) for _ in range(_BOOTSTRAPS)])
    low = float(np.quantile(drawn[:, 1] - drawn[:, 0], 1 - CONFIDENCE))
    return CalibrationChange(old, new, loses=low > 0)


def _judged(found: Comparison, doubts: Sequence[str]) -> Comparison:
    """REJECT what is worse beyond chance, PROMOTE what is certainly not, and HOLD the rest."""
    worse = [
        f"{one.label}: recall falls from {one.before:.1%} to {one.after:.1%}"
        for one in found.classes
        if one.loses
    ]
    if found.p_worse <= 1 - CONFIDENCE:
        fall = f"{-100 * found.difference:.2f} points less accurate"
        worse.insert(0, f"{fall}, which is not by chance (p = {found.p_worse:.2g})")
    if worse:
        return replace(found, verdict=REJECT, reasons=worse)
    too_few = _too_few_rows(found)
    reasons = [*too_few, *_too_much_changes(found), *doubts]
    if reasons:
        rows_needed = _rows_needed(found) if too_few else None
        return replace(found, reasons=reasons, rows_needed=rows_needed)
    # Of two sides, so that 2.5% of equal models are called better.
    is_better = found.p_better <= (1 - CONFIDENCE) / 2
    change = f"{100 * found.difference:+.2f} points"
    reason = f"better: {change} (p = {found.p_better:.2g})" if is_better else f"no worse: {change}"
    return replace(found, verdict=PROMOTE, is_better=is_better, reasons=[reason])


def _too_few_rows(found: Comparison) -> list[str]:
    reasons = []
    if found.rows < FEWEST_ROWS:
        reasons.append(f"{counted(found.rows, 'row')} are too few, {FEWEST_ROWS} are needed")
    if found.low <= -MARGIN:
        reasons.append(
            f"it may be {-100 * found.low:.2f} points less accurate; {100 * MARGIN:g} are allowed"
        )
    return reasons


def _too_much_changes(found: Comparison) -> list[str]:
    """What more rows would not change."""
    reasons = []
    if found.lost > max(MOST_FLIPS * found.rows, MOST_FLIPS_PER_GAIN * found.gained):
        reasons.append(
            f"{counted(found.lost, 'row')} ({found.lost / found.rows:.1%}) become wrong and only "
            f"{found.gained:,} right; {MOST_FLIPS:.0%} may, or half as many as become right"
        )
    if found.calibration.loses:
        change = found.calibration.after - found.calibration.before
        reasons.append(f"its calibration error is {100 * change:.1f} points larger")
    return reasons


def _rows_needed(found: Comparison) -> int:
    """With how many rows four of five comparisons would promote or reject, if the others are like
    these: n = ((z of the confidence + z of the power) x standard deviation / distance) squared.
    """
    share, difference = (found.lost + found.gained) / found.rows, found.difference
    variance = max(share - difference**2, 0.5 / found.rows)
    # What it takes to be sure that the difference is above -MARGIN, or that it is below 0.
    distance = max(difference + MARGIN, -difference)
    needed = (_QUANTILE + _QUANTILE_OF_POWER) ** 2 * variance / distance**2
    return max(math.ceil(needed), found.rows + 1, FEWEST_ROWS)
