"""The benchmark of calibrated answers judges by rows that the calibration has not seen, and by exact chance."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness import ROOT
from benchmarks.honest import cost, foreign, page, promises, shift, texts
from common.errors import UserError
from inference.engines.selection import load_model

LABELS = ["World", "Sports", "Business"]


def scores_and_labels(num: int, seed: int = 0) -> tuple[promises.Scores, promises.Ids]:
    """Scores that mean what they say: each label is drawn with the probability that they give it."""
    draw = np.random.default_rng(seed)
    scores = (3 * draw.normal(size=(num, len(LABELS)))).astype(np.float32)
    noise = draw.gumbel(size=scores.shape)
    return scores, (scores + noise).argmax(axis=1)


def test_the_band_of_coverage_is_that_of_conformal_prediction() -> None:
    draw = np.random.default_rng(0)
    fitted, judged = np.sort(draw.random((4000, 99))), draw.random((4000, 50))
    held = (judged <= fitted[:, [89]]).mean(axis=1)  # rank (99 + 1) x 0.9

    low, high = promises.coverage_band(99, 50, 0.9)

    outside = float(((held < low) | (held > high)).mean())
    assert 0.02 < outside < 0.06  # 5%, less what the steps of 1 in 50 leave inside
    assert low < 0.9 < high


def test_chance_allows_as_many_errors_as_the_binomial_has_in_19_of_20_cases() -> None:
    # P(at most 4 of 100 at 2%) = 0.949, P(at most 5) = 0.985
    assert promises.most_errors(100, 0.02) == 5
    assert promises.most_errors(1000, 0.05) == 62
    assert promises.most_errors(0, 0.05) == 0


def test_only_rows_that_the_fit_has_not_seen_judge_it() -> None:
    scores, right = scores_and_labels(1200)
    right[:800] = scores[:800].argmax(axis=1)
    right[800:] = scores[800:].argmin(axis=1)

    rows = promises.Rows(scores, right, LABELS, np.arange(800))
    found = rows.errors(0.05)

    assert found is not None
    assert (found["wrong"], found["more"], found["beyond_chance"]) == (1.0, True, True)
    assert rows.coverage(0.9)["held"] < 0.1
    assert rows.coverage(0.9)["below"]


def test_promises_to_rows_of_the_same_kind_are_kept_and_few_rows_promise_little() -> None:
    scores, right = scores_and_labels(3000)

    many, few = (promises.measure(scores, right, LABELS, size, 6) for size in (1500, 100))

    assert abs(many["coverage"][1]["held"] - 0.95) < 0.02
    assert many["errors"][2]["more_in_all"] == 0
    assert (many["rows"], many["judged"], few["judged"]) == (1500, 1500, 2900)
    assert few["errors"][0]["without"] == 1  # of 100 rows no threshold can promise 1%
    assert "wrong" not in few["errors"][0]


def test_bins_hold_equally_many_answers_from_the_least_sure_on() -> None:
    confidence = np.linspace(0.4, 1, 150)
    found = shift.bins(confidence, confidence > 0.7)
    assert len(found) == 15
    assert found[0] == [pytest.approx(confidence[:10].mean(), abs=1e-4), 0.0]
    assert found[-1][1] == 1.0


def test_foreign_texts_are_counted_at_the_false_alarms_of_usual_ones() -> None:
    usual = np.arange(100.0)
    figures = foreign.figures(usual, np.array([200.0, 97.5, -1.0, -2.0]))
    assert figures == {"auroc": pytest.approx((100 + 98) / 400), "0.05": 0.5, "0.01": 0.25}


def test_every_kind_counts_the_same_in_the_mean() -> None:
    found = {kind: {"auroc": 1.0, "0.05": 0.0, "0.01": 1.0} for kind in texts.POOLED}
    found[texts.POOLED[0]]["auroc"] = 0.0
    more = found | {"other domains": {"auroc": 0.0, "0.05": 1.0, "0.01": 0.0}}
    assert foreign.pooled(more) == {"auroc": 0.75, "0.05": 0.0, "0.01": 1.0}


def test_foreign_texts_are_the_same_every_time(tmp_path: Path) -> None:
    (tmp_path / "deu_Latn.tsv").write_text('category\ttext\nsport\tEin "Satz.\n')
    events = tmp_path / "events.csv"
    events.write_text("date,category,text\n2011-02-03,arts,A film opens\n2012-01-01,law,A trial begins\n")
    options = Namespace(events=events, languages=tmp_path, domains=[])

    first, again = (texts.foreign_texts(options, ["some words here"]) for _ in range(2))

    assert first == again
    assert first["topics without a label"] == {"arts": ["A film opens"]}
    assert first["other languages"] == {"deu_Latn": ['Ein "Satz.']}
    assert {word for one in first["nonsense"]["random words of the rows"] for word in one.split()} == {
        "some",
        "words",
        "here",
    }
    assert all(3 <= len(piece.splitlines()) + 2 <= 14 for piece in first["code"]["Python's standard library"])
    assert texts.read_events(events)[1] == texts.Event("2012-01-01", "law", "A trial begins")


def test_data_that_is_not_there_ends_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"events\.csv: No such file") as refused:
        texts.read_events(tmp_path / "events.csv")
    assert refused.value.code == "benchmark-input"
    options = Namespace(events=tmp_path / "events.csv", languages=tmp_path / "none", domains=[])
    options.events.write_text("date,category,text\n2011-02-03,arts,A film opens\n")
    with pytest.raises(UserError, match=r"none: holds no \*\.tsv"):
        texts.foreign_texts(options, [])


def test_without_its_calibration_an_artefact_still_loads_and_promises_nothing(tmp_path: Path) -> None:
    folder = cost.without_calibration(ROOT / "checkpoints" / "news", tmp_path / "plain")
    assert load_model(folder).calibration is None


def test_a_body_asks_for_all_that_the_page_says() -> None:
    server = cost.BODIES[cost.ALL]
    assert server.body(["a"], False) == {"text": "a", "coverage": 0.95, "max_error": 0.02, "familiarity": True}
    assert cost.BODIES[cost.PLAIN].body(["a", "b"], True) == {"texts": ["a", "b"]}


def test_the_page_says_so_if_an_encoder_finds_more_and_is_silent_without_one() -> None:
    ours = {"pooled": {"0.05": 0.8}, "microseconds": 8.0}
    better, worse = ({"pooled": {"0.05": found}, "microseconds": 8000.0} for found in (0.9, 0.7))
    last, third = foreign.ENCODERS

    assert page.against_encoder({foreign.OURS: ours}) == ""
    assert page.against_encoder({foreign.OURS: ours, last: worse}) == ""
    told = " ".join(page.against_encoder({foreign.OURS: ours, last: worse, third: better}).split())
    assert f"By *{third}*, 90.0% of the foreign texts are found at 5% false alarms instead of 80.0%" in told
    assert "at about 1,000 times the cost" in told
