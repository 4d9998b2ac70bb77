"""What an export finds out about an artefact's probabilities, and what it refuses to promise."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.calibration import Calibration
from common.errors import ModelLoadError, run_command
from common.model_folder import read_manifest
from common.problem_types import SINGLE_LABEL
from common.rows import read_labelled_rows
from common.seen_texts import SeenTexts
from inference import export
from inference.engines.base import scores_of
from inference.engines.model_loader import ModelLoader
from inference.engines.selection import load_model
from inference.exporting.calibrating import Answered, fitted_factors
from inference.observing.reference import Reference
from tests.inference.conftest import LABELS

WORDS = ["oil", "prices", "rise", "stocks", "fall", "cup", "final", "goal", "chip", "speed", "peace", "talks", "games"]


@pytest.fixture(scope="module")
def rows(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 600 rows that the tiny model answers right four times in five, of which 20 are there twice, and
    1,200 others to train on.
    """
    rng = random.Random(1)
    texts = list({" ".join(rng.choices(WORDS, k=rng.randint(3, 20))): None for _ in range(1900)})[:1780]
    answers = ModelLoader(model_folder, "torch").predict_batch(texts)
    found = [
        {"text": text, "label": answer["label"] if rng.random() < 0.8 else rng.choice(LABELS)}
        for text, answer in zip(texts, answers, strict=True)
    ]
    folder = tmp_path_factory.mktemp("rows")
    held_out = [*found[:580], *({**row, "text": row["text"].upper()} for row in found[:20])]
    for name, part in (("test", held_out), ("train", found[580:])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    return folder


def run(*arguments: str | Path) -> None:
    export.main([*map(str, arguments), "--max_drop", "100"])


def refused(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit):
        run_command(lambda: run(*arguments))


@pytest.fixture(scope="module")
def calibrated(model_folder: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(model_folder, tmp_path_factory.mktemp("calibrated") / "tiny"))
    run(folder, "--engine", "native", "--rows", rows, "--max_error", "careful=30%", "--fold", folder.parent / "folded")
    return folder


def record_of(folder: Path) -> dict[str, Any]:
    return read_manifest(folder / "native").calibration


def lines_of(rows: Path, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (rows / f"{split}.jsonl").read_text().splitlines()]


def test_an_export_calibrates_what_will_be_served(calibrated: Path, rows: Path) -> None:
    record, model = record_of(calibrated), ModelLoader(calibrated)
    assert (record["dataset"], record["rows"]) == (f"{rows.name}/test.jsonl", 580)
    assert record["left_out"] == {"repeated": 20}
    assert len(record["rows_sha256"]) == 64
    assert {"before", "after"} < record["calibration_error"].keys()
    texts = [row["text"] for row in lines_of(rows, "test")[:50]]
    raw = scores_of(model.engine, [one.ids for one in model.tokenizer.encode(texts)])
    expected = SINGLE_LABEL.answers(Calibration(record, LABELS).scores(raw))
    found = [list(answer["probabilities"].values()) for answer in model.predict_batch(texts)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert np.abs(found - SINGLE_LABEL.answers(raw)).max() > 0.01


def test_what_was_asked_for_has_its_name_and_the_share_that_is_answered(calibrated: Path) -> None:
    point = record_of(calibrated)["operating_points"]["careful"]
    assert point["max_error"] == 0.3
    assert 0 < point["answered"] <= 1


def test_an_export_with_training_texts_knows_what_is_familiar(calibrated: Path) -> None:
    known = ModelLoader(calibrated).answering.calibration
    assert known is not None
    assert known.familiarity is not None
    assert record_of(calibrated)["familiarity"]["texts"] == 1200


def reference_of(artefact: Path) -> Reference:
    found = Reference.of(json.loads((artefact / "manifest.json").read_text()))
    assert found is not None
    return found


def test_an_export_keeps_what_the_artefact_answers_to_the_same_rows(calibrated: Path, rows: Path) -> None:
    reference, model = reference_of(calibrated / "native"), ModelLoader(calibrated)
    different = lines_of(rows, "test")[:580]  # the others are there twice
    texts = [row["text"] for row in different]
    answers = model.predict_batch(texts)
    right = [answer["label"] == row["label"] for answer, row in zip(answers, different, strict=True)]
    assert (reference.rows, reference.unfamiliar_rows) == (580, 580)
    assert reference.accuracy == pytest.approx(np.mean(right))
    assert reference.confidence == pytest.approx(np.mean([answer["confidence"] for answer in answers]))
    cells = [reference.cell(LABELS.index(answer["label"]), answer["confidence"]) for answer in answers]
    assert {cell: cells.count(cell) for cell in cells} == {cell: one.rows for cell, one in reference.cells.items()}
    least, lengths = reference.tails["long"][-1], [one.num_tokens for one in model.tokenizer.encode(texts)]
    assert least is not None
    assert 0 < sum(length >= least for length in lengths) <= 580 / 5


@pytest.mark.parametrize(("kind", "label"), [("multi_label_folder", "World"), ("regression_folder", 1200)])
def test_only_a_model_that_gives_one_label_has_a_reference(
    kind: str, label: str | int, rows: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "model"))
    labelled = [{"text": row["text"], "label": label} for row in lines_of(rows, "test")[:150]]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    run(folder, "--engine", "native", "--rows", tmp_path / "rows.jsonl")
    manifest = read_manifest(folder / "native")
    assert (manifest.calibration["rows"], manifest.reference) == (150, {})


def test_familiarity_is_compared_with_rows_that_its_table_has_not_read(
    calibrated: Path, rows: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(calibrated / "native", tmp_path / "native"))
    texts = [f"{one['text']} {two['text']}" for one in lines_of(rows, "test") for two in lines_of(rows, "train")[:4]]
    labelled = [{"text": text, "label": LABELS[i % len(LABELS)]} for i, text in enumerate(dict.fromkeys(texts))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    run(folder, "--rows", tmp_path / "rows.jsonl")
    reference = reference_of(folder)
    # A single file has no training texts, so the table has read every other row.
    assert reference.rows > 2000
    assert reference.unfamiliar_rows == reference.rows // 2


def test_transformers_pipeline_answers_with_the_calibrated_probabilities_of_the_folded_model(
    calibrated: Path, rows: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    labelled = read_labelled_rows(rows, LABELS)
    model = load_model(calibrated, "torch")
    raw = scores_of(model.engine, [one.ids for one in model.tokenizer.encode(labelled.texts)])
    scale, offset = fitted_factors(Answered(model.saved, model.engine, model.tokenizer, labelled, raw))
    expected = SINGLE_LABEL.answers(raw * scale + offset)
    pipeline = transformers.pipeline("text-classification", model=str(calibrated.parent / "folded"), top_k=None)
    for answer, probabilities in zip(pipeline(labelled.texts[:20]), expected, strict=False):
        found = {one["label"]: one["score"] for one in answer}
        np.testing.assert_allclose([found[label] for label in LABELS], probabilities, atol=1e-5)


def test_rows_that_the_model_was_trained_on_are_left_out(
    calibrated: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(calibrated, tmp_path / "tiny"))
    SeenTexts.of([row["text"] for row in lines_of(rows, "test")[:100]]).write(folder)
    run(folder / "native", "--rows", rows)
    assert record_of(folder)["rows"] == 480
    assert record_of(folder)["left_out"] == {"repeated": 0, "seen_in_training": 120}
    assert "480 rows" in (said := capsys.readouterr().out)
    assert "120 seen in training" in said
    before = (folder / "native" / "manifest.json").read_bytes()
    SeenTexts.of([row["text"] for row in lines_of(rows, "test")]).write(folder)
    refused(folder / "native", "--rows", rows)
    (line,) = capsys.readouterr().err.splitlines()
    assert "600 rows of" in line
    assert "were seen in training, and the other 0 are too few" in line
    assert (folder / "native" / "manifest.json").read_bytes() == before


def test_the_artefact_of_a_single_file_finds_what_its_model_has_seen(
    calibrated: Path, rows: Path, tmp_path: Path
) -> None:
    artefact = Path(shutil.copytree(calibrated / "native", tmp_path / "tiny.native"))
    (tmp_path / "tiny").mkdir()  # where training wrote tiny.pt from
    SeenTexts.of([row["text"] for row in lines_of(rows, "test")[:100]]).write(tmp_path / "tiny")
    run(artefact, "--rows", rows)
    assert read_manifest(artefact).calibration["left_out"]["seen_in_training"] == 120


def test_in_a_single_file_the_rows_that_were_seen_are_the_training_texts(
    calibrated: Path, rows: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(calibrated, tmp_path / "tiny"))
    both = [*lines_of(rows, "test"), *lines_of(rows, "train")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, both)))
    SeenTexts.of([row["text"] for row in lines_of(rows, "train")]).write(folder)
    run(folder / "native", "--rows", tmp_path / "rows.jsonl")
    assert record_of(folder)["rows"] == 580
    assert record_of(folder)["familiarity"]["texts"] == 1200


def test_who_does_not_know_what_the_model_has_seen_is_told(
    calibrated: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(calibrated / "native", tmp_path / "native"))
    run(folder, "--rows", rows)
    assert "does not say which texts it has seen in training" in capsys.readouterr().out


def test_calibrating_again_changes_nothing_but_the_calibration(calibrated: Path, rows: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(calibrated / "native", tmp_path / "native"))
    (tmp_path / "other.jsonl").write_text((rows / "train.jsonl").read_text())
    SeenTexts.of(["peace talks"]).write(folder)  # must not become a part of what images and the hub get
    run(folder, "--rows", tmp_path / "other.jsonl", "--precision", "World=60%")
    before, after = read_manifest(calibrated / "native"), read_manifest(folder)
    assert after.calibration["rows"] == 1200
    assert "precision" in after.calibration["operating_points"]
    assert "careful" not in after.calibration["operating_points"]
    # 1,200 rows of a single file have no training texts beside them, and half of them are too few.
    assert "familiarity" not in after.calibration
    assert not (folder / "familiarity.bin").exists()
    assert SeenTexts.read(folder) is not None
    reference = reference_of(folder)
    assert (reference.rows, "unfamiliar" in reference.tails) == (1200, False)
    assert after.files.keys() == before.files.keys() - {"familiarity.bin"}
    assert (after.source, after.probes, after.accuracy) == (before.source, before.probes, before.accuracy)


def test_a_bound_that_cannot_be_promised_writes_nothing(
    folder_copy: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(folder_copy, "--engine", "native", "--rows", rows, "--max_error", "1%")
    line = capsys.readouterr().err.splitlines()[-1]
    assert "max_error 0.01: no threshold holds with 95% confidence on 580 rows" in line
    assert "nothing was written" in line
    assert not (folder_copy / "native").exists()


def test_too_few_rows_are_no_reason_to_refuse_an_export_without_bounds(
    folder_copy: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder_copy, "--engine", "native", "--rows", rows, "--limit", "50")
    assert "Not calibrated: 50 rows are too few to calibrate on" in capsys.readouterr().out
    assert record_of(folder_copy) == {}
    assert ModelLoader(folder_copy).answering.calibration is None


def test_a_bound_is_not_certified_on_the_sample_news_of_other_models(
    folder_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(folder_copy, "--engine", "native", "--max_error", "50%")
    assert "these rows are not the model's own data" in capsys.readouterr().err.splitlines()[-1]
    assert not (folder_copy / "native").exists()


def test_a_label_without_rows_is_named(
    calibrated: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(calibrated / "native", tmp_path / "native"))
    kept = [row for row in lines_of(rows, "train") if row["label"] != "Sports"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, kept)))
    run(folder, "--rows", tmp_path / "rows.jsonl")
    assert "No row has Sports" in capsys.readouterr().out


def test_an_artefact_from_before_answers_as_it_did(calibrated: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(calibrated / "native", tmp_path / "native"))
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["calibration"], manifest["reference"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    model, text = ModelLoader(folder), "oil prices rise"
    raw = scores_of(model.engine, [one.ids for one in model.tokenizer.encode([text])])
    found = list(model.predict(text)["probabilities"].values())
    np.testing.assert_array_equal(found, SINGLE_LABEL.answers(raw)[0])


@pytest.mark.parametrize(
    "damage",
    [
        {"temperature": "warm"},
        {"temperature": 0.0},
        {"coverage": None},
        {"operating_points": None},
        {"familiarity": {"bits": 3}},
    ],
    ids=str,
)
def test_a_damaged_calibration_is_refused_in_one_line(calibrated: Path, tmp_path: Path, damage: dict[str, Any]) -> None:
    folder = Path(shutil.copytree(calibrated / "native", tmp_path / "native"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["calibration"] |= damage
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelLoadError, match="its calibration is damaged"):
        ModelLoader(folder)


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ("", "must name each of the labels"),
        (",World,Sports\nWorld,0,1\nSports,1,0\n", "must name each of the labels"),
        (
            ",World,Sports,Business,Sci/Tech\nWorld,0,1,1\nSports,1,0,1,1\nBusiness,1,1,0,1\nSci/Tech,1,1,1,0\n",
            "missing",
        ),
        (
            ",World,Sports,Business,Sci/Tech\nWorld,0,1,1,x\nSports,1,0,1,1\nBusiness,1,1,0,1\nSci/Tech,1,1,1,0\n",
            "number",
        ),
        (
            ",World,Sports,Business,Sci/Tech\nWorld,0,0,0,0\nSports,0,0,0,0\nBusiness,0,0,0,0\nSci/Tech,0,0,0,0\n",
            "greater",
        ),
    ],
)
def test_a_bad_table_of_costs_is_one_line(
    calibrated: Path, tmp_path: Path, rows: Path, table: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "costs.csv").write_text(table)
    refused(calibrated / "native", "--rows", rows, "--costs", tmp_path / "costs.csv", "--max_cost", "0.5")
    (line,) = capsys.readouterr().err.splitlines()
    assert what in line
    assert "costs.csv" in line


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--max_error", "often"], "must be a share between 0 and 1"),
        (["--max_error", "careful=200%"], "must be a share between 0 and 1"),
        (["--precision", "Weather=90%"], "'Weather' is not one of the model's labels"),
        (["--precision", "World=all"], "must be a share between 0 and 1"),
        (["--precision", "World=60%", "--precision", "World=98%"], "World has a bound already"),
        (["--precision", "int4"], "must be int8, fp32 or LABEL=SHARE"),
        (["--max_cost", "1"], "--costs and --max_cost go together"),
        (["--fold", "elsewhere"], "--fold needs the model it was made from"),
        (["--engine", "onnx"], "--engine needs the model it was made from"),
        (["--max_error", "0.5=30%"], "is taken, or reads as a share"),
        (["--max_error", "precision=30%"], "is taken, or reads as a share"),
    ],
)
def test_a_bad_bound_is_one_line(
    calibrated: Path, rows: Path, arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(calibrated / "native", "--rows", rows, *arguments)
    assert what in capsys.readouterr().err.splitlines()[-1]


def test_costs_choose_what_is_answered(calibrated: Path, rows: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(calibrated / "native", tmp_path / "native"))
    table = ["," + ",".join(LABELS)]
    table += [",".join([right, *("0" if label == right else "1" for label in LABELS)]) for right in LABELS]
    (tmp_path / "costs.csv").write_text("\n".join(table))
    run(folder, "--rows", rows / "train.jsonl", "--costs", tmp_path / "costs.csv", "--max_cost", "0.4")
    calibration = Calibration(read_manifest(folder).calibration, LABELS)
    assert calibration.point("costs").costs[0] == (0.0, 1.0, 1.0, 1.0)
