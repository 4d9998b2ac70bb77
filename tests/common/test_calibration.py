"""What a calibration promises, on rows whose truth is known because it is drawn here."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from common.calibration import (
    Bounds,
    Calibration,
    CalibrationError,
    binomial_tail,
    calibration_error,
    certify_agreement,
    fit,
    fit_answers,
)
from common.errors import share_or_name
from common.problem_types import MULTI_LABEL, REGRESSION, SINGLE_LABEL

LABELS = ["a", "b", "c"]


def drawn(
    count: int, seed: int = 0, temperature: float = 2.0, priors: tuple[float, ...] = (1, 1, 1)
) -> tuple[NDArray[np.float32], list[int]]:
    """Scores of a model that is too sure by ``temperature``, and the labels that are right."""
    rng = np.random.default_rng(seed)
    honest = 2.5 * rng.normal(size=(count, 3)) + np.log(priors)
    right = (SINGLE_LABEL.answers(honest).cumsum(axis=1) < rng.random((count, 1))).sum(axis=1)
    return (temperature * honest).astype(np.float32), right.tolist()


def several(count: int, seed: int = 0) -> tuple[NDArray[np.float32], list[tuple[int, ...]]]:
    rng = np.random.default_rng(seed)
    honest = 2 * rng.normal(size=(count, 3)) - 1
    applies = rng.random((count, 3)) < MULTI_LABEL.answers(honest)
    return (3 * honest + 1).astype(np.float32), [tuple(np.flatnonzero(row).tolist()) for row in applies]


def test_the_temperature_that_the_rows_were_drawn_with_is_found() -> None:
    scores, right = drawn(20_000)
    record = fit(SINGLE_LABEL, scores, right, LABELS)
    assert record["method"] == "temperature"
    assert record["temperature"] == pytest.approx(2.0, rel=0.05)
    assert record["calibration_error"]["after"] < 0.01 < record["calibration_error"]["before"]


def test_labels_whose_scores_are_shifted_get_numbers_of_their_own() -> None:
    scores, right = drawn(20_000)
    shift = np.array([1.5, 0, -1], dtype=np.float32)
    record = fit(SINGLE_LABEL, scores + shift, right, LABELS)
    assert record["method"] == "vector"
    assert record["accuracy"]["after"] > record["accuracy"]["before"]
    calibrated = Calibration(record, LABELS).scores(scores + shift)
    found = SINGLE_LABEL.answers(calibrated)
    np.testing.assert_allclose(found, SINGLE_LABEL.answers(scores / 2), atol=0.03)


def test_a_temperature_never_changes_the_label() -> None:
    scores, right = drawn(300)
    calibration = Calibration(fit(SINGLE_LABEL, scores, right, LABELS), LABELS)
    assert (calibration.scores(scores).argmax(axis=1) == scores.argmax(axis=1)).all()


@pytest.mark.parametrize("coverage", [0.8, 0.95, 0.99])
def test_sets_hold_the_right_label_as_often_as_asked_over_many_draws_of_the_rows(coverage: float) -> None:
    held = []
    for seed in range(40):
        scores, right = drawn(1000, seed)
        calibration = Calibration(fit(SINGLE_LABEL, scores[:500], right[:500], LABELS), LABELS)
        rule = calibration.set_rule(coverage)
        for row, label in zip(SINGLE_LABEL.answers(calibration.scores(scores[500:])), right[500:], strict=True):
            held.append(label in rule.members(row.tolist()))
    # 20,000 answers: the standard deviation of their mean, over draws of rows too, is below 0.4%.
    assert np.mean(held) == pytest.approx(coverage, abs=0.012)


def test_a_rare_label_is_covered_on_its_own_where_it_has_the_rows() -> None:
    priors = (20, 20, 0.3)
    scores, right = drawn(20_000, priors=priors)
    record = fit(SINGLE_LABEL, scores[:10_000], right[:10_000], LABELS)
    (entry,) = (one for one in record["coverage"] if one["coverage"] == 0.9)
    assert list(entry["own_thresholds"]) == ["c"]
    calibration = Calibration(record, LABELS)
    probabilities = SINGLE_LABEL.answers(calibration.scores(scores[10_000:]))
    of_rare = [
        2 in calibration.set_rule(0.9).members(row.tolist())
        for row, label in zip(probabilities, right[10_000:], strict=True)
        if label == 2
    ]
    assert len(of_rare) > 100
    assert np.mean(of_rare) > 0.8


def test_a_rare_label_with_too_few_rows_is_named() -> None:
    scores, right = drawn(300, priors=(20, 20, 0.5))
    assert 0 < right.count(2) < 19
    record = fit(SINGLE_LABEL, scores, right, LABELS)
    assert [one["too_few_rows"] for one in record["coverage"] if one["coverage"] == 0.95] == [["c"]]


def test_a_bound_on_errors_is_broken_in_at_most_one_draw_in_twenty() -> None:
    scores, right = drawn(30_000, seed=99, temperature=1.0)
    probabilities = SINGLE_LABEL.answers(scores)
    wrong = probabilities.argmax(axis=1) != np.array(right)
    broken = 0
    for seed in range(100):
        few, labels = drawn(600, seed, temperature=1.0)
        record = fit(SINGLE_LABEL, few, labels, LABELS)
        calibration = Calibration(record, LABELS)
        if "0.05" not in calibration.names:
            continue
        factor = 1 / record["temperature"]
        confidence = SINGLE_LABEL.answers(scores * factor).max(axis=1)
        answered = confidence >= calibration.point(0.05).thresholds[0]
        broken += wrong[answered].mean() > 0.05
    # If one draw in twenty may break it, more than 10 of 100 do so once in a hundred times.
    assert broken <= 10


def test_a_bound_that_no_threshold_keeps_is_refused_with_the_rows_that_it_takes() -> None:
    scores, right = drawn(200)
    with pytest.raises(CalibrationError, match=r"max_error 0.001: .* on 200 rows; about [\d,]+ more rows"):
        fit(SINGLE_LABEL, scores, right, LABELS, Bounds({"careful": 0.001}))


def test_rows_without_any_good_answer_are_told_that_more_would_not_help() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(500, 3)).astype(np.float32)
    with pytest.raises(CalibrationError, match="more rows would not help"):
        fit(SINGLE_LABEL, scores, rng.integers(0, 3, 500).tolist(), LABELS, Bounds({"careful": 0.05}))


def test_too_few_rows_are_refused() -> None:
    scores, right = drawn(99)
    with pytest.raises(CalibrationError, match="99 rows are too few to calibrate on, at least 100"):
        fit(SINGLE_LABEL, scores, right, LABELS)


def test_a_label_gets_the_precision_that_it_is_asked_for_and_others_answer_as_before() -> None:
    scores, right = drawn(4000)
    calibration = Calibration(fit(SINGLE_LABEL, scores, right, LABELS, Bounds(precisions={"b": 0.95})), LABELS)
    point = calibration.point("precision")
    test_scores, test_right = drawn(20_000, seed=7)
    rows = SINGLE_LABEL.answers(calibration.scores(test_scores)).tolist()
    chosen = [point.choose(row) for row in rows]
    hits = [label == 1 for (found, is_sure), label in zip(chosen, test_right, strict=True) if is_sure and found == 1]
    assert np.mean(hits) >= 0.945
    assert all(is_sure for found, is_sure in chosen if found != 1)


def test_with_costs_the_cheapest_label_is_answered_and_the_mean_cost_stays_within_bounds() -> None:
    costs = [[0, 1, 10], [1, 0, 1], [1, 1, 0]]
    scores, right = drawn(4000)
    calibration = Calibration(fit(SINGLE_LABEL, scores, right, LABELS, Bounds(costs=costs, max_cost=0.3)), LABELS)
    point = calibration.point("costs")
    # Between a and c, c is answered only if a is very unlikely, as that mistake costs ten times.
    assert point.choose([0.3, 0.0, 0.7])[0] == 0
    test_scores, test_right = drawn(20_000, seed=7)
    rows = SINGLE_LABEL.answers(calibration.scores(test_scores)).tolist()
    paid = [
        costs[label][found]
        for (found, is_sure), label in zip(map(point.choose, rows), test_right, strict=True)
        if is_sure
    ]
    assert len(paid) > 5000
    assert np.mean(paid) <= 0.3


def test_several_labels_are_calibrated_one_by_one_and_few_of_a_text_are_missed() -> None:
    scores, right = several(3000)
    record = fit(MULTI_LABEL, scores, right, LABELS)
    assert record["calibration_error"]["after"] < 0.02 < record["calibration_error"]["before"]
    calibration = Calibration(record, LABELS)
    test_scores, test_right = several(20_000, seed=5)
    rule = calibration.set_rule(0.9)
    missed = []
    for row, labels in zip(MULTI_LABEL.answers(calibration.scores(test_scores)).tolist(), test_right, strict=True):
        kept = rule.members(row)
        missed.append(sum(label not in kept for label in labels) / max(1, len(labels)))
    assert np.mean(missed) == pytest.approx(0.1, abs=0.01)


def test_several_labels_have_no_bound_on_errors_but_precisions() -> None:
    scores, right = several(3000)
    with pytest.raises(CalibrationError, match="for models that give one label"):
        fit(MULTI_LABEL, scores, right, LABELS, Bounds({"careful": 0.02}))
    calibration = Calibration(fit(MULTI_LABEL, scores, right, LABELS, Bounds(precisions={"a": 0.9})), LABELS)
    assert calibration.point("precision").thresholds[0] > 0.5
    with pytest.raises(CalibrationError, match="has no such bounds"):
        calibration.point(0.02)


def test_intervals_hold_the_right_number_as_often_as_asked() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(10_000, 1)).astype(np.float32)
    right = scores[:, 0] + rng.normal(size=10_000)
    calibration = Calibration(fit(REGRESSION, scores[:2000], right[:2000].tolist(), ["n"]), ["n"])
    width = calibration.set_rule(0.9).half_width
    assert np.mean(np.abs(scores[2000:, 0] - right[2000:]) <= width) == pytest.approx(0.9, abs=0.02)
    assert (calibration.scores(scores) == scores).all()


def test_a_coverage_between_two_that_were_fitted_takes_the_next_higher_one() -> None:
    scores, right = drawn(1000)
    calibration = Calibration(fit(SINGLE_LABEL, scores, right, LABELS), LABELS)
    assert calibration.set_rule(0.93).coverage == 0.95
    assert calibration.set_rule(0.95).coverage == 0.95
    with pytest.raises(CalibrationError, match=r"coverage 0.9999 .* 1,000 rows, 9,999 would be needed; the most is"):
        calibration.set_rule(0.9999)


def test_an_allowed_error_between_two_that_hold_takes_the_next_lower_one() -> None:
    scores, right = drawn(5000, temperature=1.0)
    calibration = Calibration(fit(SINGLE_LABEL, scores, right, LABELS), LABELS)
    assert calibration.point(0.07).name == "0.05"
    assert calibration.point(1.0).name == "0.2"
    with pytest.raises(CalibrationError, match=r"max_error 0.0001 cannot be promised .* the least is"):
        calibration.point(0.0001)
    with pytest.raises(CalibrationError, match="no operating point 'careful'"):
        calibration.point("careful")


def test_a_calibration_for_other_labels_is_refused() -> None:
    scores, right = drawn(1000)
    shifted = scores + np.array([2, 0, 0], dtype=np.float32)
    record = fit(SINGLE_LABEL, shifted, right, LABELS) | {"scale": [1.0, 1.0]}
    with pytest.raises(ValueError, match="a number for each label"):
        Calibration(record, LABELS)


def test_the_binomial_tail_is_that_of_all_outcomes_counted() -> None:
    flips = list(itertools.product([0, 1], repeat=10))
    for errors in range(11):
        counted = sum(0.3 ** sum(one) * 0.7 ** (10 - sum(one)) for one in flips if sum(one) <= errors)
        assert binomial_tail(errors, 10, 0.3) == pytest.approx(counted)
    # 149 answers without an error are the fewest that show, with 95% confidence, at most 2%.
    assert binomial_tail(0, 149, 0.02) < 0.05 < binomial_tail(0, 148, 0.02)


def test_calibration_error_of_a_case_worked_by_hand() -> None:
    confidence = np.repeat([0.6, 0.9], 15 * 10)
    correct = np.tile([True, False], 15 * 10)
    # Half of the answers are right in every bin: 0.1 too much for the first half, 0.4 for the rest.
    assert calibration_error(confidence, correct) == pytest.approx((0.1 + 0.4) / 2)


@pytest.mark.parametrize(("given", "expected"), [("2%", 0.02), ("0.02", 0.02), (" 100% ", 1.0), ("careful", "careful")])
def test_a_share_is_told_from_a_name(given: str, expected: float | str) -> None:
    assert share_or_name(given) == expected


@pytest.mark.parametrize("given", ["", "0", "-2%", "101%", "inf"])
def test_what_is_no_share_between_0_and_1_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="must"):
        share_or_name(given)


def test_a_bound_for_a_model_that_answers_with_a_number_is_refused() -> None:
    scores = np.zeros((200, 1), dtype=np.float32)
    with pytest.raises(CalibrationError, match="this model answers with a number"):
        fit(REGRESSION, scores, [0.0] * 200, ["n"], Bounds(precisions={"n": 0.9}))


def test_scores_that_are_no_numbers_are_refused() -> None:
    scores, right = drawn(200)
    scores[7, 1] = np.nan
    with pytest.raises(CalibrationError, match="1 of 200 rows are answered with scores that are no finite numbers"):
        fit(SINGLE_LABEL, scores, right, LABELS)


def disagreeing(count: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """How sure a small model is, uniformly from 0 to 1, and whether a big one differs: with probability 0.3 x (1 -
    confidence), so that of all texts 0.15 x (1 - threshold)^2 get another label.
    """
    rng = np.random.default_rng(seed)
    confidence = rng.random(count)
    return confidence, rng.random(count) < 0.3 * (1 - confidence)


def test_two_models_disagree_more_often_than_promised_in_at_most_one_draw_in_twenty() -> None:
    thresholds = np.array([certify_agreement(*disagreeing(600, seed), 0.02, 0).threshold for seed in range(500)])
    broken = int((0.15 * (1 - thresholds) ** 2 > 0.02).sum())
    # If one draw in twenty may break it, more than 37 of 500 do so once in a hundred times.
    assert 0 < broken <= 37
    assert 0.65 < np.median(thresholds) < 0.75  # the bound is reached at 0.635, so little is given away


def test_the_certified_threshold_is_the_loosest_whose_test_and_all_stricter_ones_pass() -> None:
    confidence, differs = disagreeing(500, seed=3)
    confidence = confidence.round(2)  # so that several texts are equally sure
    for most in (0.01, 0.03, 0.1):
        found = certify_agreement(confidence, differs, most, 0)
        tests = [(t, int((differs & (confidence >= t)).sum())) for t in np.unique(confidence)[::-1]]
        tails = [binomial_tail(count, 500, most) for _, count in tests]
        loosest, count = tests[next(i for i, tail in enumerate(tails) if tail > 0.05) - 1]
        assert (found.threshold, found.num_disagreed) == (loosest, count)
        assert found.num_passed_on == int((confidence < loosest).sum())


def test_a_text_that_must_be_passed_on_is_never_answered_by_the_small_model() -> None:
    confidence = np.array([0.0] * 300 + [0.9] * 300)
    found = certify_agreement(confidence, np.zeros(600, dtype=bool), 0.02, 0)
    assert (found.threshold, found.num_passed_on) == (0.9, 300)


def test_each_stricter_threshold_passes_on_half_as_many_texts_again_and_the_last_one_all() -> None:
    confidence, differs = disagreeing(4000, seed=1)
    found = certify_agreement(confidence, differs, 0.02, 0)
    passed_on = [int((confidence < t).sum()) for t in (found.threshold, *found.stricter)]
    *shown, last = itertools.pairwise(passed_on)
    assert [after / before for before, after in shown] == pytest.approx([1.5] * len(shown), rel=0.01)
    assert 1 < last[1] / last[0] <= 1.5
    assert passed_on[-1] == 4000
    assert found.stricter[-1] > 1


def test_too_few_texts_for_a_bound_are_told_how_many_it_takes() -> None:
    agreeing = np.zeros(597, dtype=bool)
    with pytest.raises(CalibrationError, match=r"597 texts are too few: .* takes 598 texts, which is 1 more"):
        certify_agreement(np.full(597, 0.9), agreeing, 0.005, 0)
    assert certify_agreement(np.full(598, 0.9), np.zeros(598, dtype=bool), 0.005, 0).num_passed_on == 0


def test_a_small_model_that_may_answer_too_little_to_be_of_use_is_refused() -> None:
    confidence, differs = disagreeing(600, seed=0)
    answered = 1 - certify_agreement(confidence, differs, 0.02, 0).num_passed_on / 600
    # At 0.3 the true share is 0.15 x 0.3^2 = 1.35%, less than 2%, so more texts would prove it.
    what = rf"only {answered:.1%} of these 600 texts, and below 30.0% .* about [\d,]+ more texts would be needed"
    with pytest.raises(CalibrationError, match=what):
        certify_agreement(confidence, differs, 0.02, 0.3)
    with pytest.raises(CalibrationError, match="more texts would not help"):
        certify_agreement(confidence, differs, 0.02, 0.9)


def test_answers_that_are_calibrated_already_are_only_promised_something() -> None:
    scores, right = drawn(2000)
    whole = fit(SINGLE_LABEL, scores, right, LABELS)
    probabilities = SINGLE_LABEL.answers(Calibration(whole, LABELS).scores(scores))
    record = fit_answers(probabilities, right, LABELS)
    assert (record["coverage"], record["operating_points"]) == (whole["coverage"], whole["operating_points"])
    assert not {"temperature", "scale", "offset"} & record.keys()
    with pytest.raises(CalibrationError, match="99 rows are too few"):
        fit_answers(probabilities[:99], right[:99], LABELS)
