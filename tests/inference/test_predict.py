from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.problem_types import THRESHOLDS_KEY
from inference.engines.model_loader import ModelLoader
from inference.predict import main
from tests.inference.conftest import THRESHOLDS, TINY, MakeFolder
from tests.processes import REPOSITORY, PythonProcess, run_python


def _run(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-m", "inference.predict", *arguments], stdin=stdin, **environment)


def _assert_refused(run: subprocess.CompletedProcess[str], message: str) -> None:
    assert run.returncode == 2
    assert run.stdout == ""
    line = run.stderr
    assert line.startswith("error: ")
    assert message in line
    assert line.count("\n") == 1


def test_one_text_is_answered_with_its_label_and_a_bar_for_each(
    model_folder: Path, texts: list[str], labels: list[str]
) -> None:
    expected = ModelLoader(model_folder).predict(texts[0])
    run = _run(texts[0], "--model", str(model_folder))
    lines = run.stdout.splitlines()
    assert run.returncode == 0
    assert run.stderr == ""
    assert lines[0] == f"{expected['label']}  {expected['confidence']:.1%}"
    assert {line.split()[0] for line in lines[2:]} == set(labels)
    assert all(line.endswith("%") for line in lines[2:])
    assert "█" in lines[2]


def test_json_carries_the_whole_answer_and_the_model_comes_from_the_environment(
    checkpoint: Path, texts: list[str]
) -> None:
    run = _run(texts[0], "--json", MODEL_CHECKPOINT=str(checkpoint))
    assert json.loads(run.stdout) == ModelLoader(checkpoint).predict(texts[0])


def test_a_file_is_answered_line_by_line_without_its_blank_lines(
    model_folder: Path, tmp_path: Path, texts: list[str]
) -> None:
    file = tmp_path / "news.txt"
    file.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    run = _run("--file", str(file), "--model", str(model_folder))
    rows = [line.split("\t") for line in run.stdout.splitlines()]
    expected = ModelLoader(model_folder).predict_batch(texts)
    assert [row[0] for row in rows] == [one["label"] for one in expected]
    assert [float(row[1]) for row in rows] == pytest.approx([one["confidence"] for one in expected], abs=1e-4)
    assert [row[2] for row in rows] == [" ".join(text.split()) for text in texts]


@pytest.mark.slow
def test_input_and_terminal_need_not_be_utf8(model_folder: Path, labels: list[str]) -> None:
    news = b"Goal!\tby \xff\nOil\n" * 300
    run = _run("--file", "-", "--json", "--model", str(model_folder), stdin=news, PYTHONIOENCODING="ascii")
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0
    assert len(answers) == 600
    assert answers[0]["text"] == "Goal! by ?"
    assert set(answers[0]["probabilities"]) == set(labels)


def test_a_reader_may_stop_early(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "news.txt"
    file.write_text("Oil prices rise\n" * 5000, encoding="utf-8")
    pipe, errors = tmp_path / "pipe", tmp_path / "errors"
    os.mkfifo(pipe)
    command = ["-m", "inference.predict", "--file", str(file), "--model", str(model_folder)]
    process = PythonProcess(command, os.environ, REPOSITORY, [pipe, errors])
    with pipe.open("rb") as reader:
        line = reader.readline()
    assert line.endswith(b"\n")
    assert process.wait(60) == 0
    assert errors.read_bytes() == b""


@pytest.mark.parametrize(("closed", "exit_code"), [("0", 2), ("1", 0), ("2", 0)])
def test_a_closed_stream_is_no_crash(model_folder: Path, closed: str, exit_code: int) -> None:
    shell = f'exec "$0" -m inference.predict --file "$1" --model "$2" {closed}>&-'
    arguments = [sys.executable, "-" if closed == "0" else "README.md", str(model_folder)]
    run = subprocess.run(["/bin/sh", "-c", shell, *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == exit_code
    assert "Traceback" not in run.stderr
    assert ("has no text to classify" in run.stderr) == (closed == "0")


def test_a_missing_model_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    _assert_refused(_run("News", "--model", str(tmp_path / "none")), "no such model")


def test_a_missing_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    _assert_refused(_run("--file", str(tmp_path / "none.txt")), "none.txt: No such file or directory")


def test_a_blank_text_is_one_line_and_exit_code_2() -> None:
    _assert_refused(_run("  "), "the text is blank")


def test_a_file_without_text_is_one_line_and_exit_code_2() -> None:
    _assert_refused(_run("--file", "-", stdin=b"\n \n"), "--file -: has no text")


def test_a_bad_setting_is_one_line_and_exit_code_2() -> None:
    _assert_refused(_run("News", MAX_TEXT_CHARS="many"), "MAX_TEXT_CHARS: ")


@pytest.mark.parametrize("arguments", [[], ["News", "--file", "-"], ["News", "--colour"]])
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments: list[str]) -> None:
    _assert_refused(_run(*arguments), "--help")


HOSTILE = "Sports\x1b[2J\r\n\u202eb"


@pytest.mark.parametrize("thresholds", [None, THRESHOLDS])
def test_labels_and_texts_cannot_command_the_terminal_and_json_keeps_them(
    make_folder: MakeFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    texts: list[str],
    thresholds: list[float] | None,
) -> None:
    labels = ["World", HOSTILE, "Business", "Sci/Tech"]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(f"{text} \x1b[2J \u202e می\u200cخواهم" for text in texts), encoding="utf-8")
    answers = {"problem_type": "multi_label_classification", THRESHOLDS_KEY: thresholds} if thresholds else {}
    model = ("--model", str(make_folder("DistilBert", labels=labels, **TINY, **answers)))

    main([texts[0], *model])
    main(["--file", str(file), *model])
    printed = capsys.readouterr().out
    main([texts[0], "--json", *model])
    answer = json.loads(capsys.readouterr().out)

    assert re.sub("[\n\t\u200c]", "", printed).isprintable()
    assert r"Sports\x1b[2J\r\n\u202eb" in printed
    assert r" \x1b[2J \u202e می" + "\u200cخواهم\n" in printed
    assert HOSTILE in answer["probabilities"]
