from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference.model_loader import ModelLoader
from tests.inference.conftest import LABELS, REPOSITORY, TEXTS


def _run(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "inference.predict", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        input=stdin,
        capture_output=True,
        timeout=60,
    )


def _assert_refused(run: subprocess.CompletedProcess[bytes], message: str) -> None:
    assert run.returncode == 2
    assert run.stdout == b""
    line = run.stderr.decode()
    assert line.startswith("predict: ")
    assert message in line
    assert line.count("\n") == 1


def test_one_text_is_answered_with_its_label_and_a_bar_for_each(model_folder: Path) -> None:
    expected = ModelLoader(model_folder).predict(TEXTS[0])
    run = _run(TEXTS[0], "--model", str(model_folder))
    lines = run.stdout.decode().splitlines()
    assert run.returncode == 0
    assert run.stderr == b""
    assert lines[0] == f"{expected['label']}  {expected['confidence']:.1%}"
    assert {line.split()[0] for line in lines[2:]} == set(LABELS)
    assert all(line.endswith("%") for line in lines[2:])
    assert "█" in lines[2]


def test_json_carries_the_whole_answer_and_the_model_comes_from_the_environment(checkpoint: Path) -> None:
    run = _run(TEXTS[0], "--json", MODEL_CHECKPOINT=str(checkpoint))
    assert json.loads(run.stdout) == ModelLoader(checkpoint).predict(TEXTS[0])


def test_a_file_is_answered_line_by_line_without_its_blank_lines(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "news.txt"
    file.write_text("\n\n".join(TEXTS) + "\n", encoding="utf-8")
    run = _run("--file", str(file), "--model", str(model_folder))
    rows = [line.split("\t") for line in run.stdout.decode().splitlines()]
    expected = ModelLoader(model_folder).predict_batch(TEXTS)
    assert [row[0] for row in rows] == [one["label"] for one in expected]
    assert [float(row[1]) for row in rows] == pytest.approx([one["confidence"] for one in expected], abs=1e-4)
    assert [row[2] for row in rows] == [" ".join(text.split()) for text in TEXTS]


def test_standard_input_is_read_even_where_it_is_not_utf8(model_folder: Path) -> None:
    run = _run("--file", "-", "--json", "--model", str(model_folder), stdin=b"Goal!\tby \xff\nOil\n" * 300)
    answers = [json.loads(line) for line in run.stdout.decode().splitlines()]
    assert len(answers) == 600
    assert answers[0]["text"] == "Goal! by \ufffd"
    assert set(answers[0]["probabilities"]) == set(LABELS)


def test_a_terminal_without_block_characters_is_no_error(model_folder: Path) -> None:
    run = _run(TEXTS[0], "--model", str(model_folder), PYTHONIOENCODING="ascii")
    assert run.returncode == 0
    assert b"?" in run.stdout


def test_a_reader_that_stops_early_is_no_error(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "news.txt"
    file.write_text("Oil prices rise\n" * 5000, encoding="utf-8")
    command = f"{sys.executable} -m inference.predict --file {file} --model {model_folder} | head -n 1"
    run = subprocess.run(command, shell=True, cwd=REPOSITORY, capture_output=True, timeout=60)
    assert run.stdout.count(b"\n") == 1
    assert run.stderr == b""


def test_a_missing_model_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    _assert_refused(_run("News", "--model", str(tmp_path / "none")), "no such model")


def test_a_missing_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    _assert_refused(_run("--file", str(tmp_path / "none.txt")), "none.txt: No such file or directory")


def test_a_blank_text_is_one_line_and_exit_code_2() -> None:
    _assert_refused(_run("  "), "the text is blank")


def test_a_file_without_text_is_one_line_and_exit_code_2() -> None:
    _assert_refused(_run("--file", "-", stdin=b"\n \n"), "-: holds no text")


def test_a_bad_setting_is_one_line_and_exit_code_2() -> None:
    _assert_refused(_run("News", MAX_TEXT_CHARS="many"), "MAX_TEXT_CHARS: ")


@pytest.mark.parametrize("arguments", [[], ["News", "--file", "-"], ["News", "--colour"]])
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments: list[str]) -> None:
    _assert_refused(_run(*arguments), "--help")
