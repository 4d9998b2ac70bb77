"""Sets, abstention and familiarity where no server is: in files, in the terminal and in the library."""

from __future__ import annotations

import csv
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from common.calibration import CalibrationError
from common.errors import UserError
from common.model_folder import MANIFEST_FILE
from inference import export, predict, score
from inference.engines.model_loader import ModelLoader
from tests.inference.conftest import TEXTS
from tests.processes import REPOSITORY, run_python

NEWS = REPOSITORY / "checkpoints" / "news"
FLAGS = ("--coverage", "0.98", "--max_error", "2%", "--familiarity")
ASKED: dict[str, Any] = {"coverage": 0.98, "max_error": "2%", "familiarity": True}
SURE = "The home side won the cup final after extra time and penalties, their first title in ten years."
UNSURE = "Microsoft sues a rival over a patent for its search engine"
FOREIGN = "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; } return sum;"
NEWS_TEXTS = [SURE, UNSURE, FOREIGN, "Shares in oil firms fall as ministers meet to discuss war"]


@pytest.fixture(scope="module")
def calibrated(
    multi_label_folder: Path, regression_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Exported with rows that they mostly answer rightly."""
    generator, words, found = random.Random(0), " ".join(TEXTS).split(), {}
    for folder in (multi_label_folder, regression_folder):
        copy = Path(shutil.copytree(folder, tmp_path_factory.mktemp("calibrated") / folder.name))
        texts = [" ".join(generator.choices(words, k=generator.randint(2, 20))) for _ in range(150)]
        right = [
            one["labels"] if "labels" in one else one["value"] + generator.gauss(0, 5)
            for one in ModelLoader(copy, "torch").predict_batch(texts)
        ]
        rows = copy.parent / "rows.jsonl"
        rows.write_text(
            "".join(json.dumps({"text": text, "label": one}) + "\n" for text, one in zip(texts, right, strict=True))
        )
        export.main([str(copy), "--engine", "native", "--rows", str(rows), "--max_drop", "100"])
        found[folder.name] = copy / "native"
    return found


def scored(model: Path, folder: Path, suffix: str, texts: list[str], *flags: str) -> list[dict[str, Any]]:
    source, out = folder / "in.jsonl", folder / f"out{suffix}"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    score.main([str(source), str(out), "--model", str(model), "--quiet", *flags])
    if suffix == ".parquet":
        return pyarrow.parquet.read_table(out).to_pylist()
    if suffix == ".jsonl":
        return [json.loads(line) for line in out.read_text().splitlines()]
    return list(csv.DictReader(out.open(newline="")))


def manifest_edited(model: Path, folder: Path, **changes: Any) -> Path:
    """A copy of an artefact with another calibration; without any change it has none."""
    copy = Path(shutil.copytree(model, folder / "model"))
    path = copy / MANIFEST_FILE
    content = json.loads(path.read_text())
    content["calibration"] = {**content["calibration"], **changes} if changes else {}
    path.write_text(json.dumps(content))
    return copy


# Files


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_scored_file_has_what_the_library_answers(tmp_path: Path, suffix: str) -> None:
    expected = ModelLoader(NEWS).predict_batch(NEWS_TEXTS, **ASKED)
    rows = scored(NEWS, tmp_path, suffix, NEWS_TEXTS, *FLAGS, "--prefix", "new_")

    names = ["text", *(f"new_{name}" for name in ("label", "confidence", "set", "abstained", "familiarity"))]
    assert [list(row) for row in rows] == [names] * len(rows)
    assert [one["abstained"] for one in expected] == [None, "uncertain", "unfamiliar", "uncertain"]
    for row, one in zip(rows, expected, strict=True):
        labels = row["new_set"] if suffix == ".jsonl" else row["new_set"].split("|")
        assert labels == one["set"]
        assert [row["new_label"] or None, row["new_abstained"] or None] == [one["label"], one["abstained"]]
        assert float(row["new_confidence"]) == round(one["confidence"], 6)
        assert float(row["new_familiarity"]) == round(one["familiarity"], 6)


def test_probabilities_in_a_file_are_calibrated(tmp_path: Path) -> None:
    expected = ModelLoader(NEWS).predict_batch(NEWS_TEXTS)
    uncalibrated = ModelLoader(manifest_edited(NEWS, tmp_path)).predict_batch(NEWS_TEXTS)
    rows = scored(NEWS, tmp_path, ".jsonl", NEWS_TEXTS, "--probabilities")
    for row, one, before in zip(rows, expected, uncalibrated, strict=True):
        assert list(row) == ["text", "label", "confidence", "probabilities"]
        assert row["probabilities"] == pytest.approx(one["probabilities"], abs=1e-6)
        assert row["confidence"] < before["confidence"] - 1e-4


def test_a_file_has_the_label_that_costs_decide(tmp_path: Path) -> None:
    # Business costs nothing, whatever is right, and the other answers cost 1.
    costs = [[float(answered != 2) for answered in range(4)]] * 4
    point = {"max_cost": 0.1, "costs": costs, "threshold": 0.1}
    model = manifest_edited(NEWS, tmp_path, operating_points={"costs": point})
    expected = ModelLoader(model).predict_batch(NEWS_TEXTS, max_error="costs")
    rows = scored(model, tmp_path, ".jsonl", NEWS_TEXTS, "--max_error", "costs", "--probabilities")
    labels = ["Business", "Business", None, "Business"]
    assert [row["label"] for row in rows] == [one["label"] for one in expected] == labels
    assert rows[0]["confidence"] == rows[0]["probabilities"]["Business"] < 0.1


def test_a_bad_row_has_nothing_of_what_is_asked_for(tmp_path: Path) -> None:
    rows = scored(NEWS, tmp_path, ".jsonl", [SURE, "", FOREIGN], *FLAGS, "--bad_rows", "keep")
    assert list(rows[1]) == ["text", "error"]
    assert [row["abstained"] for row in (rows[0], rows[2])] == [None, "unfamiliar"]
    assert rows[2]["label"] is None
    table = scored(NEWS, tmp_path, ".csv", [SURE, "", FOREIGN], *FLAGS, "--bad_rows", "keep")
    assert [table[1][name] for name in ("label", "confidence", "set", "abstained", "familiarity")] == [""] * 5


def test_several_labels_have_their_set_in_one_cell_and_a_list_in_json(
    calibrated: dict[str, Path], tmp_path: Path
) -> None:
    model = calibrated["topics"]
    sets = [one["set"] for one in ModelLoader(model).predict_batch(TEXTS, coverage=0.9)]
    assert {len(one) for one in sets} > {1}
    lines = scored(model, tmp_path, ".jsonl", TEXTS, "--coverage", "0.9")
    assert [row["set"] for row in lines] == sets
    for suffix in (".csv", ".parquet"):
        rows = scored(model, tmp_path, suffix, TEXTS, "--coverage", "0.9")
        assert [row["set"] for row in rows] == ["|".join(one) for one in sets]
        assert [row["labels"] for row in rows] == ["|".join(row["labels"]) for row in lines]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_number_has_its_interval_in_two_columns(calibrated: dict[str, Path], tmp_path: Path, suffix: str) -> None:
    model = calibrated["prices"]
    expected = ModelLoader(model).predict_batch(TEXTS, coverage=0.9)
    rows = scored(model, tmp_path, suffix, TEXTS, "--coverage", "90%")
    for row, one in zip(rows, expected, strict=True):
        found = [float(row[name]) for name in ("interval_low", "value", "interval_high")]
        low, high = one["interval"]
        assert found == pytest.approx([low, one["value"], high], rel=1e-6)
        assert low < one["value"] < high
    with pytest.raises(UserError, match="max_error cannot be promised"):
        scored(model, tmp_path, ".tsv", TEXTS, "--max_error", "2%")


def test_a_column_of_the_input_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text,abstained\noil,no\n")
    command = [str(tmp_path / "in.csv"), str(tmp_path / "out.csv"), "--model", str(NEWS), "--quiet"]
    with pytest.raises(UserError, match="has a column abstained already"):
        score.main([*command, "--max_error", "2%"])
    score.main(command)


def test_a_job_is_not_resumed_with_another_calibration_or_other_flags(tmp_path: Path) -> None:
    scored(NEWS, tmp_path, ".csv", NEWS_TEXTS)
    before = (tmp_path / "out.csv").read_bytes()
    other = manifest_edited(NEWS, tmp_path, temperature=2.0)
    for model, flags, what in (
        (other, (), "calibration was [0-9a-f]{12} and is now [0-9a-f]{12}"),
        (NEWS, ("--coverage", "0.98"), "coverage was None and is now 0.98"),
        (NEWS, ("--max_error", "0.02"), "max_error was None and is now 0.02"),
        (NEWS, ("--familiarity",), "familiarity was None and is now True"),
    ):
        with pytest.raises(UserError, match=what) as refused:
            scored(model, tmp_path, ".csv", NEWS_TEXTS, *flags)
        assert refused.value.code == "score-job-changed"
    assert (tmp_path / "out.csv").read_bytes() == before


def test_a_share_may_be_written_in_two_ways_and_asks_for_the_same(tmp_path: Path) -> None:
    rows = scored(NEWS, tmp_path, ".csv", NEWS_TEXTS, "--max_error", "2%")
    assert scored(NEWS, tmp_path, ".csv", NEWS_TEXTS, "--max_error", "0.02") == rows


def test_the_settings_ask_where_no_flag_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = scored(NEWS, tmp_path, ".jsonl", NEWS_TEXTS, "--coverage", "0.98", "--max_error", "2%")
    monkeypatch.setenv("COVERAGE", "0.98")
    monkeypatch.setenv("MAX_ERROR", "2%")
    assert scored(NEWS, tmp_path, ".jsonl", NEWS_TEXTS) == rows
    with pytest.raises(UserError, match=r"coverage was 0.98 and is now 0.9"):
        scored(NEWS, tmp_path, ".jsonl", NEWS_TEXTS, "--coverage", "0.9")


# Refusals


@pytest.mark.parametrize("flags", [("--coverage", "0.9"), ("--max_error", "careful"), ("--familiarity",)])
def test_a_model_without_calibration_is_refused_in_one_line_before_anything_is_read(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    model = manifest_edited(NEWS, tmp_path)
    bad, out = tmp_path / "bad.csv", tmp_path / "out.csv"
    bad.write_text("neither a header nor,a text\n")
    for command in (
        ["-m", "inference.score", str(bad), str(out), *flags],
        ["-m", "inference.predict", SURE, *flags],
    ):
        done = run_python([*command, "--model", str(model)])
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: this model is not calibrated")
        assert done.stderr.endswith("[no-guarantee]\n")
        assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.csv", "model"]
    with pytest.raises(CalibrationError, match="not calibrated"):
        ModelLoader(model).predict(SURE, coverage=0.9)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--coverage", "1"), "must be greater than 0 and less than 1"),
        (("--coverage", "much"), "must be greater than 0 and less than 1"),
        (("--coverage", "2"), "must be greater than 0, and at most 1"),
        (("--max_error", "0"), "must be greater than 0, and at most 1"),
        (("--max_error", " "), "must not be empty"),
        (("--max_error", "careful"), "there is no operating point 'careful'; this model has 0.01"),
        (("--max_error", "0.01%"), "cannot be promised with 95% confidence"),
        (("--coverage", "99.99%"), "coverage 0.9999 cannot be promised"),
    ],
)
def test_what_cannot_be_promised_is_refused(flags: tuple[str, ...], what: str) -> None:
    with pytest.raises(UserError, match=what):
        predict.main([SURE, "--model", str(NEWS), *flags])


# The terminal and the library


def test_the_terminal_answers_as_the_library_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(NEWS_TEXTS))
    expected = ModelLoader(NEWS).predict_batch(NEWS_TEXTS, **ASKED)
    predict.main(["--file", str(file), "--model", str(NEWS), "--json", *FLAGS])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"text": text, **one} for text, one in zip(NEWS_TEXTS, expected, strict=True)]
    for text, one in zip(NEWS_TEXTS, expected, strict=True):
        predict.main([text, "--model", str(NEWS), "--json", *FLAGS])
        alone = json.loads(capsys.readouterr().out)
        assert {**alone, "familiarity": pytest.approx(alone["familiarity"])} == one


def test_the_terminal_says_why_there_is_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for text in (SURE, UNSURE, FOREIGN):
        predict.main([text, "--model", str(NEWS), *FLAGS])
        shown.append(capsys.readouterr().out.splitlines())
    assert shown[0][0].startswith("Sports  98.")
    assert shown[1][:2] == [
        "not sure: Sci/Tech or Business (at most 2% wrong is asked for)",
        "set with 98% coverage: Sci/Tech, Business",
    ]
    assert shown[2][0] == "unfamiliar: this text is unlike the texts that the model was trained on"
    assert all(one[2].startswith("familiarity: ") and one[4].endswith("%") for one in shown)

    careful = {"careful": {"max_error": 0.02, "threshold": 0.94}}
    model = manifest_edited(NEWS, tmp_path, operating_points=careful)
    predict.main([UNSURE, "--model", str(model), "--max_error", "careful"])
    named = "not sure: Sci/Tech or Business (the operating point careful is asked for)"
    assert capsys.readouterr().out.splitlines()[0] == named
    (tmp_path / "texts.txt").write_text("\n".join((SURE, UNSURE, FOREIGN)))
    predict.main(["--file", str(tmp_path / "texts.txt"), "--model", str(NEWS), *FLAGS])
    cells = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in cells] == ["Sports", "not sure: Sci/Tech or Business", "unfamiliar"]
    assert [row[2] for row in cells][:2] == ["Sports", "Sci/Tech|Business"]
    assert [row[4] for row in cells] == [SURE, UNSURE, FOREIGN]


def test_the_terminal_shows_the_interval_of_a_number(
    calibrated: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ModelLoader(calibrated["prices"]).predict(TEXTS[0], coverage=0.9)
    predict.main([TEXTS[0], "--model", str(calibrated["prices"]), "--coverage", "0.9"])
    low, high = answer["interval"]
    assert capsys.readouterr().out.splitlines() == [
        f"price  {answer['value']:.6g}",
        f"interval with 90% coverage: {low:.6g} to {high:.6g}",
    ]


def test_no_texts_get_no_answers_from_a_calibrated_model() -> None:
    assert ModelLoader(NEWS).predict_batch([]) == []
