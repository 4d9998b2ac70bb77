"""Files and the terminal with a cascade: the same answers as from the library, in order."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.model_folder import read_manifest, write_manifest
from inference import predict, score
from inference.engines import native
from inference.engines.model_loader import ModelLoader
from inference.engines.native.library import library_path
from tests.inference.cascades import NEWS, make_artefact, make_cascade, recalibrated
from tests.inference.conftest import TEXTS
from tests.inference.test_score import finished_parts, is_finished, start_scoring
from tests.processes import wait_until

# Only the kernels answer a text to the bit as they do among other texts; NumPy does not.
pytestmark = pytest.mark.skipif(library_path() is None, reason=native.is_supported()[1])
FLAGS = ("--coverage", "0.98", "--max_error", "2%", "--familiarity", "--probabilities")
ASKED: dict[str, Any] = {"coverage": 0.98, "max_error": "2%", "familiarity": True}


@pytest.fixture(scope="module")
def cascade(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that truncates texts, and is sure of about half of the others."""
    folder = tmp_path_factory.mktemp("cascades")
    return make_cascade(NEWS, make_artefact(model_folder, folder / "tiny"), folder / "cascade", 0.5)


@pytest.fixture(scope="module")
def rows() -> list[str]:
    generator, words = random.Random(0), " ".join(TEXTS[:5]).split()
    return [" ".join(generator.choices(words, k=generator.randint(1, 30))) for _ in range(100)]


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def scored(source: Path, model: Path, *flags: str) -> list[dict[str, Any]]:
    out = source.with_name("out.jsonl")
    score.main([str(source), str(out), "--model", str(model), "--part_rows", "16", *flags])
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows_come_in_order_with_the_answers_of_the_library(
    cascade: Path, rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Rows without a text, at the beginning and in the middle of a part, move no answer to another row.
    with_blanks = ["<p>", *rows[:40], "<p>", *rows[40:]]
    found = scored(write(tmp_path / "in.jsonl", with_blanks), cascade, "--probabilities", "--bad_rows", "keep")
    assert [row["text"] for row in found] == with_blanks
    problems = [row["error"].rpartition("row ")[2] for row in found if "error" in row]
    assert problems == ["1: the text is blank", "42: the text is blank"]

    expected, big = (ModelLoader(path).predict_batch(rows) for path in (cascade, NEWS))
    answered = [row for row in found if "error" not in row]
    assert [row["label"] for row in answered] == [one["label"] for one in expected]
    for row, one in zip(answered, expected, strict=True):
        assert row["probabilities"] == {label: round(value, 6) for label, value in one["probabilities"].items()}
    by_big = sum(one == other for one, other in zip(expected, big, strict=True))
    assert 20 < by_big < 80
    assert f"; {by_big} of them ({by_big / 102:.1%}) by the big model; 2 of them could not" in capsys.readouterr().err


def test_promises_in_a_file_are_those_of_the_library(rows: list[str], tmp_path: Path) -> None:
    surer = recalibrated(NEWS, tmp_path / "surer", temperature=1.0)
    cascade = make_cascade(NEWS, surer, tmp_path / "cascade", 0.8)
    texts = [*TEXTS, *rows]
    found = scored(write(tmp_path / "in.jsonl", texts), cascade, *FLAGS)
    expected = ModelLoader(cascade).predict_batch(texts, **ASKED)
    assert {one["abstained"] for one in expected} == {None, "uncertain", "unfamiliar"}
    for row, one in zip(found, expected, strict=True):
        assert (row["label"], row["set"], row["abstained"]) == (one["label"], one["set"], one["abstained"])
        assert row["familiarity"] == round(one["familiarity"], 6)


def test_a_row_that_only_the_big_model_cannot_read_has_no_answer(folder_copy: Path, tmp_path: Path) -> None:
    content = json.loads((folder_copy / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[^a-z ]"}, "content": ""}
    (folder_copy / "tokenizer.json").write_text(json.dumps(content))
    letters = make_artefact(folder_copy, tmp_path / "letters")
    cascade = make_cascade(letters, NEWS, tmp_path / "cascade", 1.0)
    source = write(tmp_path / "in.jsonl", ["oil", "1918", "goal"])
    first, problem, last = scored(source, cascade, "--bad_rows", "keep")
    assert problem["error"].endswith("row 2: the text is blank")
    assert [first["label"], last["label"]] == [
        one["label"] for one in ModelLoader(letters).predict_batch(["oil", "goal"])
    ]
    source.with_name("out.jsonl").unlink()
    with pytest.raises(UserError, match="row 2: the text is blank"):
        scored(source, cascade, "--restart")


def test_a_killed_job_gives_the_same_bytes(cascade: Path, rows: list[str], tmp_path: Path) -> None:
    texts = [f"{text} {number}" for number in range(6) for text in rows]
    source, out = write(tmp_path / "in.jsonl", texts), tmp_path / "out.jsonl"
    process = start_scoring(source, out, cascade, "native")
    wait_until(lambda: len(finished_parts(out)) > 2 or process.poll() is not None)
    process.kill()
    process.wait()
    # A fast machine may have been done before that.
    assert finished_parts(out) or is_finished(out)
    for target in (out, tmp_path / "undisturbed.jsonl"):
        score.main([str(source), str(target), "--model", str(cascade), "--part_rows", "64", "--quiet"])
    assert out.read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()


def test_a_job_is_not_resumed_with_another_threshold(cascade: Path, rows: list[str], tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", rows)
    scored(source, cascade)
    other = Path(shutil.copytree(cascade, tmp_path / "other"))
    manifest = read_manifest(other)
    write_manifest(other, replace(manifest, cascade=manifest.cascade | {"threshold": 0.7}))
    with pytest.raises(UserError, match="revision was"):
        scored(source, other)


def test_the_terminal_shows_the_answers_of_the_library(
    cascade: Path, rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("\n".join([*rows, "<p>"]))
    predict.main(["--file", str(tmp_path / "in.txt"), "--model", str(cascade), "--json"])
    said, answers = capsys.readouterr(), ModelLoader(cascade).predict_batch(rows)
    expected = [{"text": text, **one} for text, one in zip(rows, answers, strict=True)]
    assert [json.loads(line) for line in said.out.splitlines()] == expected
    assert "line 101: is blank to the model and was left out" in said.err
