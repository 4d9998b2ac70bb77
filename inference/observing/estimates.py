"""How accurate a model is on texts that nobody has labelled, from counts alone.

The texts of a stream are counted in cells: the label that was answered and a tenth of the
confidences. If answers of the same cell are right as often in the stream as in the reference, the
accuracy of the stream is

    sum over cells c of  n_c a_c / n,    a_c = (right_c + 20 conf_c) / (rows_c + 20)

with right_c of rows_c rows of the reference, and conf_c the mean confidence of the stream's texts
in the cell. Few rows are thus pulled towards what calibration says. It sees that texts have become
harder, or that other labels have become frequent. It cannot see that the same texts have other
labels now (concept drift): for that somebody has to look at some texts. Rows that were drawn
uniformly and reviewed correct it by their mean error (prediction-powered inference, Angelopoulos et
al., arXiv 2301.09633), whatever the reason of that error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inference.observing.reference import Floats, Reference

FEWEST_TEXTS = 50
FEWEST_REVIEWED = 50
MOST_UNFAMILIAR = 0.1
_MOST_UNKNOWN = 0.5
_FEWEST_ROWS_OF_CELL = 5
_PRIOR = 20.0
# How much of the way from the reference's accuracy to the estimate is doubted (standard deviation).
_MISTRUST = 0.25
_DEVIATIONS = 1.645  # of the normal distribution, for 90%
# A confusion that is closer to losing a label than this says nothing of its share.
_LEAST_SINGULAR = 0.1

# Of a text that was reviewed: its cell, its confidence, whether the answer is right, and for how
# many texts it stands (1, if all had the same chance to be drawn).
Reviewed = tuple[int, float, bool, float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The accuracy of a stream, with an interval that holds it in 9 of 10 cases.

    Without a value, ``reason`` is one line that says why it cannot be known.
    """

    texts: int
    value: float | None = None
    low: float | None = None
    high: float | None = None
    reviewed: int = 0  # the texts that corrected it
    reason: str = ""


def estimate(
    reference: Reference | None,
    cells: Mapping[int, tuple[int, float]],
    reviewed: Sequence[Reviewed] = (),
    unfamiliar: int = 0,
) -> Estimate:
    """Estimate the accuracy of the texts that are counted in ``cells``.

    Args:
        cells: by `Reference.cell`, how many texts there are, and the sum of their confidences.
        reviewed: texts of the stream that were drawn uniformly, or carry the weights that make up
            for it; fewer than 50 are not used.
        unfamiliar: how many of the texts have a familiarity below 0.01.
    """
    texts = sum(n for n, _ in cells.values())
    if reference is None:
        what = "the model has no reference to compare with: export it again, with labelled rows"
        return Estimate(texts, reason=what)
    if texts < FEWEST_TEXTS:
        return Estimate(
            texts, reason=f"{texts} texts are too few, at least {FEWEST_TEXTS} are needed"
        )
    known = {c: _Known.of(reference, c, total / n) for c, (n, total) in cells.items() if n}
    value = sum(cells[c][0] * one.accuracy for c, one in known.items()) / texts
    if len(reviewed) >= FEWEST_REVIEWED:
        return _corrected(reference, known, value, texts, reviewed)
    if reason := _why_not(reference, cells, texts, unfamiliar):
        return Estimate(texts, reason=reason)
    # Two draws of chance: which of the stream's answers are right, and which of the reference's
    # were. The first one shrinks with the texts, the second one does not.
    variance = (_MISTRUST * (value - reference.accuracy)) ** 2
    for c, one in known.items():
        n = cells[c][0]
        variance += one.variance * (n / texts**2 + (n / texts) ** 2 / (one.rows + _PRIOR))
    return _around(value, math.sqrt(variance), texts)


@dataclass(frozen=True, slots=True)
class _Known:
    """What the reference says of one cell."""

    rows: int
    accuracy: float

    @classmethod
    def of(cls, reference: Reference, cell: int, confidence: float) -> _Known:
        """``confidence``: the mean of the texts that are asked about."""
        found = reference.cells.get(cell)
        rows, right = (found.rows, found.right) if found else (0, 0)
        return cls(rows, (right + _PRIOR * confidence) / (rows + _PRIOR))

    @property
    def variance(self) -> float:
        return self.accuracy * (1 - self.accuracy)


def _why_not(
    reference: Reference, cells: Mapping[int, tuple[int, float]], texts: int, unfamiliar: int
) -> str:
    more = "; review at least 50 texts that are drawn at random, or export again with such rows"
    if unfamiliar > MOST_UNFAMILIAR * texts:
        return f"{unfamiliar / texts:.0%} of the texts are unlike the training texts{more}"
    strange = sum(
        n
        for c, (n, _) in cells.items()
        if c not in reference.cells or reference.cells[c].rows < _FEWEST_ROWS_OF_CELL
    )
    if strange > _MOST_UNKNOWN * texts:
        return f"{strange / texts:.0%} of the answers are of a kind that the reference lacks{more}"
    return ""


def _corrected(
    reference: Reference,
    known: dict[int, _Known],
    value: float,
    texts: int,
    reviewed: Sequence[Reviewed],
) -> Estimate:
    """The estimate and its mean error on the reviewed texts."""
    expected = np.array(
        [(known.get(c) or _Known.of(reference, c, conf)).accuracy for c, conf, _, _ in reviewed]
    )
    right = np.array([is_right for _, _, is_right, _ in reviewed], dtype=np.float64)
    weights = np.array([weight for *_, weight in reviewed], dtype=np.float64)
    weights /= weights.sum()
    errors = right - expected
    mean = float(weights @ errors)
    # The few reviewed texts may happen to hold no mistake, and would then seem to be no sample at
    # all: their spread is never taken to be less than what their confidence says.
    spread = max(
        float(weights @ (errors - mean) ** 2), float(weights @ (expected * (1 - expected)))
    )
    # A text that stands for itself only adds no doubt: if all were reviewed, nothing is left to
    # chance.
    doubt = float(weights @ np.maximum(0.0, weights - 1 / texts))
    return _around(value + mean, math.sqrt(spread * doubt), texts, len(reviewed))


def _around(value: float, deviation: float, texts: int, reviewed: int = 0) -> Estimate:
    # Answers are right one by one, so the accuracy moves in steps of 1 / texts: half of one more.
    half_width = _DEVIATIONS * deviation + 0.5 / texts
    low, high = value - half_width, value + half_width
    return Estimate(texts, *(min(1.0, max(0.0, one)) for one in (value, low, high)), reviewed)


def label_shares(reference: Reference | None, answered: Mapping[int, int]) -> list[float] | None:
    """The share of each label among what is right in a stream; None if it cannot be known.

    A model that answers Sports for 5% of all texts on Business also does so in the stream, so the
    answers are taken back through the reference's confusion (black box shift estimation, Lipton et
    al., arXiv 1802.03916): with C[i, j] the share of the texts of label j that are answered i, and
    m the shares of the answers, C q = m.

    ``answered``: by label, how many texts of the stream were answered with it.
    """
    texts = sum(answered.values())
    if reference is None or reference.confusion is None or texts < FEWEST_TEXTS:
        return None
    by_right = reference.confusion.sum(axis=1, keepdims=True)
    if not by_right.all():
        return None
    confused = (reference.confusion / by_right).T
    if np.linalg.svd(confused, compute_uv=False)[-1] < _LEAST_SINGULAR:
        return None
    shares = np.array([answered.get(i, 0) / texts for i in range(len(confused))])
    return _on_simplex(np.linalg.solve(confused, shares)).tolist()


def _on_simplex(values: Floats) -> Floats:
    """The nearest shares that are not negative and add up to 1: all are lowered by the same, and
    cut off at 0 (Duchi et al., 2008).
    """
    falling = np.sort(values)[::-1]
    over = (np.cumsum(falling) - 1) / np.arange(1, len(values) + 1)
    lowered = over[np.flatnonzero(falling > over)[-1]]
    return np.maximum(values - lowered, 0.0)
