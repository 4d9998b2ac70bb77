"""When a new model is promoted, held or rejected; expected numbers are computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from loop.comparison import HOLD, PROMOTE, REJECT, Answers, Comparison, chance_of, compare, losers

CALIBRATED = 0.9
LABELS = ["calm", "storm"]


def judged(
    both: int, lost: int, gained: int, neither: int = 0, doubts: tuple[str, ...] = (), sure: float = CALIBRATED
) -> Comparison:
    """Rows by who is right, in any order; half of each kind has the first label."""
    counts = [both, lost, gained, neither]
    order = np.random.default_rng(0).permutation(sum(counts))
    old = np.repeat([True, True, False, False], counts)[order]
    new = np.repeat([True, False, True, False], counts)[order]
    targets = np.concatenate([np.arange(count) % 2 for count in counts])[order]
    before = Answers(old, np.full(len(old), CALIBRATED))
    return compare(before, Answers(new, np.full(len(old), sure)), targets.tolist(), LABELS, doubts)


def test_the_chance_of_few_gained_rows_is_that_of_few_heads() -> None:
    # 1 + 20 + 190 + 1,140 + 4,845 + 15,504 of 2^20 throws have at most 5 heads.
    assert chance_of(5, 15) == pytest.approx(21_700 / 2**20)
    assert chance_of(0, 5) == pytest.approx(1 / 32)
    assert chance_of(0, 0) == 1


def test_holm_stops_at_the_first_chance_that_is_too_large() -> None:
    # Of four, 5% is divided by 4, 3, 2 and 1: 0.005 and 0.01 pass, 0.03 does not, and ends it.
    assert losers([0.01, 0.04, 0.03, 0.005]) == {0, 3}
    assert losers([0.02, 0.02, 0.02]) == set()
    assert losers([]) == set()


@pytest.mark.parametrize(
    ("gained", "lost", "rows", "low"),
    [
        # No row differs, and still a difference of z^2 / (n + z^2) is possible.
        (0, 0, 900, -2.705543 / 902.705543),
        # All of 5 rows that differ are gained: of such rows at least 0.05^(1/5) would be.
        (5, 0, 100, (2 * 0.05 ** (1 / 5) - 1) * 5 / 100),
    ],
)
def test_the_lower_bound_is_the_lesser_of_the_exact_and_the_score_bound(
    gained: int, lost: int, rows: int, low: float
) -> None:
    found = judged(rows - gained - lost, lost, gained)

    assert found.low <= low + 1e-6
    if not gained:
        assert found.low == pytest.approx(low, abs=1e-6)
        assert found.high == pytest.approx(-low, abs=1e-6)


def test_the_bounds_of_many_rows_are_those_of_the_normal_distribution() -> None:
    found = judged(95_000, 2_000, 3_000)

    difference, deviation = 0.01, math.sqrt((0.05 - 0.01**2) / 100_000)
    assert found.difference == pytest.approx(difference)
    assert found.low == pytest.approx(difference - 1.644854 * deviation, abs=3e-5)
    assert found.high == pytest.approx(difference + 1.644854 * deviation, abs=3e-5)


def test_a_model_that_is_worse_beyond_chance_is_rejected() -> None:
    found = judged(2_900, 100, 50)

    assert found.verdict == REJECT
    assert "1.64 points less accurate, which is not by chance" in found.reasons[0]


def test_a_model_that_is_better_beyond_chance_is_promoted_and_called_better() -> None:
    found = judged(2_900, 20, 80, sure=CALIBRATED + 0.02)

    assert (found.verdict, found.is_better) == (PROMOTE, True)


def test_equal_models_are_promoted_with_enough_rows_and_not_called_better() -> None:
    found = judged(5_000, 0, 0)

    assert (found.verdict, found.is_better) == (PROMOTE, False)
    assert found.reasons == ["no worse: +0.00 points"]


def test_too_few_rows_hold_a_model_and_the_verdict_says_how_many_would_decide() -> None:
    found = judged(480, 10, 10)

    assert found.verdict == HOLD
    # ((1.645 + 0.842) / 0.003)^2 x 4% of rows that differ
    assert found.rows_needed == pytest.approx(2.486475**2 * 0.04 / 0.003**2, abs=1)
    assert judged(60, 0, 0).verdict == HOLD


def test_a_better_mean_promotes_no_model_that_ruins_a_class() -> None:
    targets = [0] * 2_000 + [1] * 200
    old, new = np.ones(2_200, bool), np.ones(2_200, bool)
    old[:120], new[2_000:2_030] = False, False
    sure = np.full(2_200, CALIBRATED)

    found = compare(Answers(old, sure), Answers(new, sure), targets, LABELS)

    assert found.is_better is False
    assert found.difference > 0.04
    assert found.verdict == REJECT
    assert found.reasons == ["storm: recall falls from 100.0% to 85.0%"]


def test_a_small_fall_of_a_class_is_no_reason_to_reject() -> None:
    targets = [0] * 20_000 + [1] * 10_000
    old, new = np.ones(30_000, bool), np.ones(30_000, bool)
    old[:400], new[20_000:20_100] = False, False
    sure = np.full(30_000, CALIBRATED)

    [_, storm] = compare(Answers(old, sure), Answers(new, sure), targets, LABELS).classes

    assert storm.p < 1e-6
    assert not storm.loses


def test_many_rows_that_become_wrong_hold_a_model_that_is_no_worse() -> None:
    found = judged(9_400, 300, 300)

    assert found.verdict == HOLD
    assert "300 rows (3.0%) become wrong and only 300 right" in found.reasons[-1]
    assert judged(9_300, 200, 500, sure=CALIBRATED + 0.03).verdict == PROMOTE  # fewer than half of what it gains


def test_a_calibration_that_is_worse_beyond_chance_holds_a_model() -> None:
    # Right for 90%: sure of 90% before, and of 97% after.
    found = judged(4_500, 0, 0, neither=500, sure=0.97)

    assert found.verdict == HOLD
    [reason] = found.reasons
    assert reason.startswith("its calibration error is ")
    assert found.rows_needed is None  # more rows would not change it
    assert judged(4_500, 0, 0, neither=500, sure=0.905).verdict == PROMOTE


def test_a_doubt_holds_a_model_and_is_one_of_the_reasons() -> None:
    assert judged(5_000, 0, 0, doubts=("it is 3.0 times as slow",)).reasons == ["it is 3.0 times as slow"]
    assert judged(2_900, 100, 50, doubts=("it is 3.0 times as slow",)).verdict == REJECT


def test_a_verdict_is_the_same_each_time() -> None:
    assert judged(480, 10, 10) == replace(judged(480, 10, 10))
