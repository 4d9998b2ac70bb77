"""The benchmark of cascades judges by texts that the certificate has not seen, and by exact chance."""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cascading import audit, page, promise, speed
from benchmarks.cascading.scores import Both, both_models, scored
from benchmarks.harness import ROOT
from common.errors import UserError
from tests.benchmarks.test_pages import table_rows
from tests.inference.cascades import make_cascade

NEWS = ROOT / "checkpoints" / "news"
TEXTS = ["Oil prices rise again on Wall Street.", "The home side won the cup final.", "Goal!"]


def some_answers(num: int, doubt: float = 0.2) -> Both:
    """Of two models that differ only where the small one is unsure."""
    draw = np.random.default_rng(0)
    confidence, big = draw.random(num), draw.integers(4, size=num)
    differs = draw.random(num) < np.where(confidence < doubt, 0.5, 0.0)
    return Both(confidence, np.where(differs, (big + 1) % 4, big), big)


def both_with(rate: float, num: int = 10_000) -> Both:
    """Of a small model that is always sure, and differs from the big one so often."""
    differs = np.arange(num) < rate * num
    return Both(np.ones(num), differs.astype(np.int64), np.zeros(num, dtype=np.int64))


def test_other_labels_are_those_that_the_small_model_answers_and_the_big_one_would_not() -> None:
    both = Both(np.array([0.9, 0.9, 0.5, 0.5]), np.array([0, 1, 0, 1]), np.array([0, 0, 0, 0]))
    right = np.array([0, 1, 0, 0])

    found = promise.judge(both, right, np.array([1, 2, 3]), threshold=0.8, bound=0.3)

    assert found["easy"] == found["other"] == pytest.approx(1 / 3)
    assert found["accuracy"] == 1.0
    assert (found["more"], found["beyond"], found["broken"]) == (True, False, False)


def test_the_promise_is_kept_for_texts_of_the_same_kind_and_a_looser_one_answers_more() -> None:
    both = some_answers(4000)

    found = promise.measure_splits(both, both.big, 20)

    answered = [one["easy"] for one in found["bounds"]]
    assert answered == sorted(answered)
    assert 0.78 < answered[1] < 0.84  # all that it is sure of, and hardly more
    assert all(one["beyond"] <= 0.1 and one["without"] == 0 for one in found["bounds"])


def test_too_few_texts_certify_nothing_and_break_no_promise() -> None:
    both = some_answers(400)
    found = promise.measure_splits(both, both.big, 5)
    assert found["bounds"][0] == {"bound": 0.0025, "without": 1.0}
    with pytest.raises(UserError, match=r"no threshold keeps 0\.5% on these 400 rows"):
        promise.measure_shift({promise.ROWS: (both, both.big)}, 1)


def test_a_certificate_of_other_texts_is_broken_and_one_of_the_same_texts_is_not() -> None:
    rows, others = some_answers(4000), some_answers(4000, doubt=0.4)
    sets = {promise.ROWS: (rows, rows.big), "titles": (others, others.big), "all events": (others, others.big)}

    found = promise.measure_shift(sets, num_series=20)

    usual, foreign = found["sets"][promise.ROWS], found["sets"]["titles"]
    assert usual["other"] < 0.005 < 0.05 < foreign["other"]
    assert foreign["certified_again"]["other"] < 0.01
    assert (usual["audit"]["alarms"], foreign["audit"]["alarms"]) == (0.0, 1.0)
    text = page.render({"shift": {"facts": {}, **found}})
    assert [row[1] for row in table_rows(text)] == ["4,000"] * 3
    assert "over 50,000" in text


def test_the_audit_alarms_at_most_as_often_as_it_promises_if_the_promise_just_holds() -> None:
    found = audit.simulate(both_with(0.005), 0.5, 0.005, 20)
    assert found["alarms"] <= 0.2  # 1 in 20 expected at most, 5 in one of 400 such tests
    assert found["median"] is None


def test_the_more_often_the_models_differ_the_sooner_the_audit_alarms() -> None:
    slow, fast = (audit.simulate(both_with(rate), 0.5, 0.005, 20) for rate in (0.03, 0.2))
    assert fast["alarms"] == 1.0
    assert fast["median"] < fast["p90"]
    assert slow["median"] > 2 * fast["median"]


def test_a_truncated_text_is_passed_on_however_sure_the_small_model_is(tmp_path: Path) -> None:
    options = Namespace(small=NEWS, big=[NEWS], cache=tmp_path)
    both = both_models(options, [TEXTS[1], TEXTS[1] * 60])
    assert both.is_easy(0.01).tolist() == [True, False]
    assert not both.differs.any()


def test_answers_are_computed_once(tmp_path: Path) -> None:
    artefact = shutil.copytree(NEWS, tmp_path / "artefact")
    first, is_cut = scored(artefact, TEXTS, tmp_path / "cache")
    (artefact / "model_int8.safetensors").unlink()

    again, _ = scored(artefact, TEXTS, tmp_path / "cache")

    np.testing.assert_array_equal(first, again)
    assert not is_cut.any()


def test_texts_are_divided_by_the_rule_that_the_server_has(tmp_path: Path) -> None:
    values, _ = scored(NEWS, TEXTS, tmp_path)
    folder = make_cascade(NEWS, NEWS, tmp_path / "cascade", float(np.median(values.max(axis=1))))

    kinds = speed._by_kind(Namespace(small=NEWS, cache=tmp_path), folder, TEXTS)

    assert (len(kinds["easy"]), len(kinds["hard"])) == (2, 1)
    with pytest.raises(UserError, match="news: is not a cascade"):
        speed._by_kind(Namespace(small=NEWS, cache=tmp_path), NEWS, TEXTS)


@pytest.mark.parametrize("measure", [speed.measure_bulk, speed.measure_serving])
def test_a_cascade_that_is_not_there_ends_in_one_line(measure: Callable[[Namespace], object], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cascade: does not exist; write it with `python -m inference\.cascade"):
        next(iter(measure(Namespace(big=[tmp_path]))))


def test_the_page_compares_both_within_a_round() -> None:
    def load(figure: float, refused: float = 0.0) -> dict[str, float]:
        return {"texts_per_second": figure, "p50_ms": figure, "p99_ms": figure, "others": 0.02, "refused": refused}

    def one_round(big: float, cascade: float) -> dict[str, Any]:
        loads = {"big": load(big, refused=0.25), "cascade": load(cascade)}
        return {model: dict.fromkeys(speed.LOADS, one) for model, one in loads.items()}

    rows = [
        {name: {"rows_per_second": value} for name, value in zip(("big", "small", "cascade"), values, strict=True)}
        for values in ((10, 100, 30), (20, 100, 40))
    ]
    named = {"name": "minilm_widened", "blocks": 7, "other": 0.004, "passed_on": 0.18}
    results = {
        "bulk": {"facts": {}, "rows": 50, "cases": [named | {"rounds": rows}]},
        "serving": {"facts": {}, "seconds": 1, "cases": [named | {"rounds": [one_round(10, 30), one_round(20, 40)]}]},
    }

    text = page.render(results)

    bulk, alone, both = table_rows(text)
    assert bulk[1:] == ["15 (10 to 20)", "100 (100 to 100)", "35 (30 to 40)", "2.50 (2.00 to 3.00)", "0.40"]
    assert (alone[:3], both[:3]) == (
        ["minilm_widened, alone", "15", "1.00 (1.00 to 1.00)"],
        ["minilm_widened, cascade", "35", "2.50 (2.00 to 3.00)"],
    )
    assert "25.0% at most were refused" in " ".join(text.split())
    assert "gives MiniLM's answers" in text


@pytest.mark.slow
def test_the_benchmark_measures_files_and_requests(tmp_path: Path) -> None:
    big = shutil.copytree(NEWS, tmp_path / "news")
    make_cascade(NEWS, NEWS, big / "cascade", 0.9)
    output = tmp_path / "page.md"
    words = f"--big {big} --dataset {ROOT}/common/sample_news --cache {tmp_path} --output {output} --parts bulk serving"
    words += " --rounds 2 --bulk_rows 100 --seconds 0.5"

    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cascade", *words.split()], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    rows = table_rows(output.read_text())
    assert rows[0][-1] == "0.00"  # both models are the same here
    assert [row[0] for row in rows[1:]] == ["news, alone", "news, cascade"]
