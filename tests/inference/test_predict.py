from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from common.errors import UserError
from common.problem_types import THRESHOLDS_KEY
from common.text import PAIR_KEY, texts_in
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


def test_several_texts_are_answered_on_a_line_each(model_folder: Path, texts: list[str]) -> None:
    expected = ModelLoader(model_folder).predict_batch(texts[:2])
    run = _run(*texts[:2], "--model", str(model_folder))
    assert [line.split("\t") for line in run.stdout.splitlines()] == [
        [answer["label"], f"{answer['confidence']:.4f}", text] for answer, text in zip(expected, texts, strict=False)
    ]


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
def test_the_terminal_need_not_be_utf8(model_folder: Path, labels: list[str]) -> None:
    news = "Goal!\tby \u00ff\nOil\n".encode() * 300
    # A start of its own: Python reads this variable before the processes of `_run` are forked.
    command = [sys.executable, "-m", "inference.predict", "--file", "-", "--json", "--model", model_folder]
    run = subprocess.run(command, input=news, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    answers = [json.loads(line) for line in run.stdout.decode("ascii").splitlines()]
    assert run.returncode == 0
    assert len(answers) == 600
    assert answers[0]["text"] == "Goal! by ?"
    assert set(answers[0]["probabilities"]) == set(labels)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """Models of which every byte of a text changes the answer, for single texts and for pairs."""

    def make(pairs: bool) -> Path:
        folder = tmp_path_factory.mktemp("bytes") / "model"
        special = ["[PAD]", "[CLS]", "[SEP]"]
        vocabulary = {token: i for i, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.add_special_tokens(special)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
        torch.manual_seed(0)
        sizes = {"n_layers": 1, "dim": 32, "hidden_dim": 64, "n_heads": 2, "max_position_embeddings": 128}
        settings = DistilBertConfig(vocab_size=len(vocabulary), initializer_range=0.5, num_labels=4, **sizes)
        DistilBertForSequenceClassification(settings).save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings_of_tokenizer = {"model_max_length": 128, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings_of_tokenizer))
        if pairs:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {PAIR_KEY: 2}))
        return folder

    return cache(make)


FORMS: dict[str, Callable[[str], bytes]] = {
    "LF": str.encode,
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "lone CR": lambda text: text.replace("\n", "\r").encode(),
    "no end of the last line": lambda text: text.removesuffix("\n").encode(),
    "empty lines": lambda text: text.replace("\n", "\n \r\n\n").encode(),
    "a byte order mark": lambda text: text.encode("utf-8-sig"),
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16, big first": lambda text: b"\xfe\xff" + text.replace("\n", "\r\n").encode("utf-16-be"),
}


@pytest.mark.parametrize("pairs", [False, True], ids=["single", "pairs"])
@pytest.mark.parametrize("form", FORMS)
def test_a_line_of_a_file_is_answered_as_its_text_alone(
    byte_level: Callable[[bool], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    form: str,
    pairs: bool,
) -> None:
    folder = byte_level(pairs)
    texts: list[Any] = ["Shares fell", "Zwölf  Ölpreise\u2028steigen", " goal\x85"]
    texts = [(text, f"{text} again") for text in texts] if pairs else texts
    data = FORMS[form]("".join("\t".join(texts_in(text)) + "\n" for text in texts))
    expected = ModelLoader(folder).predict_batch(texts)

    file = tmp_path / "texts"
    file.write_bytes(data)
    main(["--file", str(file), "--model", str(folder), "--json"])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    main(["--file", "-", "--model", str(folder), "--json"])

    lines = capsys.readouterr().out.splitlines()
    found = [json.loads(line)["probabilities"] for line in lines]
    assert found == [one["probabilities"] for one in expected] * 2


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ("Öl\ncaf\xe9\n".encode("latin-1"), "line 1: not UTF-8 text"),
        (b"oil\n\ncaf\xe9\n", "line 3: not UTF-8 text"),
        ("oil prices\n".encode("utf-16-le"), "it looks like UTF-16"),
        (b"\xff\xfeo\x00i", "UTF-16 text that is damaged"),
        ("\u200b\ufeff\n".encode(), "has no text to classify"),
    ],
)
def test_a_file_that_is_no_text_is_refused_before_any_answer(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, what: str
) -> None:
    file = tmp_path / "texts"
    file.write_bytes(data)
    with pytest.raises(UserError, match=rf"--file {file}[ :].*{what}"):
        main(["--file", str(file), "--model", str(model_folder)])
    assert capsys.readouterr().out == ""


def test_lines_of_which_nothing_remains_are_left_out_and_counted(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts"
    file.write_text("Goal!\n\n\u200b\u200d\nOil\n&lt;p&gt;\n", encoding="utf-8")
    main(["--file", str(file), "--model", str(model_folder)])
    printed = capsys.readouterr()
    assert [line.split("\t")[2] for line in printed.out.splitlines()] == ["Goal!", "Oil"]
    assert printed.err == f"--file {file} line 3: is blank to the model and was left out, and 1 more\n"


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


@pytest.mark.parametrize(
    ("closed", "exit_code"), [("0", 2), *(pytest.param(number, 0, marks=pytest.mark.slow) for number in "12")]
)
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


@pytest.mark.parametrize("text", ["\u200b\u200d\ufeff", "\x00", "&lt;p&gt;"])
def test_a_text_of_which_nothing_remains_is_refused(model_folder: Path, text: str) -> None:
    with pytest.raises(UserError, match="text is blank: there is nothing to classify"):
        main([text, "--model", str(model_folder)])


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
