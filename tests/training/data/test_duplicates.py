"""Texts that occur more than once are found, counted, and left out if that is asked for."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import UserError
from training.config import TrainConfig
from training.data.dataset import Rows, TextData
from training.data.duplicates import LEAST_SIMILARITY, Repeats
from training.data.prepare import prepare_data
from training.distributed.ranks import Ranks

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")


def data_of(train: list[str], test: list[str], labels: list[int] | None = None) -> TextData:
    rows = Rows(train, np.array(labels or [0] * len(train)))
    return TextData("texts", ["calm", "storm"], rows, Rows(test, np.zeros(len(test), dtype=np.int64)))


def triples(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    words += [""] * (3 - len(words)) if words else []
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def are_near(one: str, other: str) -> bool:
    ours, theirs = triples(one), triples(other)
    return one == other or bool(ours and theirs and len(ours & theirs) >= LEAST_SIMILARITY * len(ours | theirs))


def similar_texts(count: int) -> list[str]:
    """Texts of few different words, many of them made from another by a change or two."""
    draw = random.Random(7)
    words = [f"word{i}" for i in range(40)]
    texts: list[str] = []
    for _ in range(count):
        chosen = draw.choices(words, k=draw.randrange(30))
        if texts and draw.random() < 0.6:
            chosen = draw.choice(texts).split()
            for _ in range(draw.randrange(3)):
                if chosen:
                    chosen[draw.randrange(len(chosen))] = draw.choice(words)
        texts.append(" ".join(chosen))
    return texts


def test_exactly_the_near_duplicates_are_found() -> None:
    texts = similar_texts(600)
    data = data_of(texts[:400], texts[400:])
    repeats = Repeats(data, near=True)
    train, test = repeats.rows["train"], repeats.rows["test"]

    within, across = repeats.partners(train), repeats.partners(test, train)

    expected = [any(are_near(texts[row], texts[before]) for before in range(row)) for row in range(400)]
    assert 50 < sum(expected) < 380
    assert (within >= 0).tolist() == expected
    assert (across >= 0).tolist() == [any(are_near(text, texts[row]) for row in range(400)) for text in texts[400:]]
    for rows, partners in ((train, within), (test, across)):
        for row, partner in zip(rows[partners >= 0], partners[partners >= 0], strict=True):
            assert partner < min(row, 400)
            assert are_near(texts[row], texts[partner])


def test_texts_differ_only_in_case_punctuation_or_a_few_words_to_be_near() -> None:
    text = "The quick brown fox jumps over the lazy dog and then sleeps for a whole day in the warm sun"
    train = [
        text,
        text.upper() + "!",
        text.replace("warm", "hot"),
        "Another text",
        "",
        "???",
        "???",
        "東京は今日も晴れです",
    ]
    test = ["東京は今日も晴れです。", "another", "The quick brown fox", "!"]
    repeats = Repeats(data_of(train, test), near=True)

    assert repeats.partners(repeats.rows["train"]).tolist() == [-1, 0, 1, -1, -1, -1, 5, -1]
    assert repeats.partners(repeats.rows["test"], repeats.rows["train"]).tolist() == [7, -1, -1, -1]
    assert Repeats(data_of(train, test), near=False).partners(np.arange(8)).tolist() == [-1] * 6 + [5, -1]


def test_a_thousand_texts_from_one_template_are_all_found() -> None:
    template = "Dear customer, your order {} has left. " + " ".join(f"word{i}" for i in range(30))
    repeats = Repeats(data_of([template.format(i) for i in range(1000)], ["no order"]), near=True)

    assert repeats.partners(repeats.rows["train"]).tolist() == [-1, *range(999)]


def write(folder: Path, split: str, rows: list[tuple[str, str]]) -> None:
    (folder / f"{split}.tsv").write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))


@pytest.fixture
def repeated(tmp_path: Path) -> Path:
    """40 training rows of which 8 repeat an earlier one (2 with another label), and 4 a test row."""
    rows = [(f"report number {i} on something that happened far away", "ab"[i % 2]) for i in range(28)]
    again = [rows[0], (rows[1][0], "a"), rows[2], rows[2], rows[3], rows[4], (rows[5][0], "a"), rows[6]]
    test = [(f"test number {i} on something", "ab"[i % 2]) for i in range(6)]
    write(tmp_path, "train", [*rows, *again, *test[:4]])
    write(tmp_path, "test", test)
    return tmp_path


def prepare(folder: Path, **fields: object) -> tuple[list[str], list[str], list[str]]:
    """The training and the validation texts, and what was said."""
    said: list[str] = []
    config = TrainConfig(dataset=str(folder), model="tiny", max_length=16, cache_dir=folder / "cache", **fields)
    data = prepare_data(config, ALONE, said.append)
    assert data.texts is not None
    return *(list(data.texts.train.take(rows).texts) for rows in (data.train_index, data.validation_index)), said


def test_repeated_training_rows_and_other_labels_are_reported_with_the_command_that_shows_them(repeated: Path) -> None:
    train, _, said = prepare(repeated, validation_fraction=0)

    assert len(train) == 40
    assert said[-3:] == [
        "8 of 40 training rows repeat the text of an earlier one",
        "4 of 6 test rows repeat the text of a training row, so their scores are too good",
        "2 of 46 labelled rows repeat an earlier text, but with another label; to see which: python -m "
        f"training.data_report {repeated} --max_length 16 --model tiny",
    ]


@pytest.mark.parametrize("fields", [{}, {"max_train_rows": 20}, {"validation_fraction": 0}], ids=str)
def test_dropping_leaves_the_first_of_each_text_and_none_of_the_test(repeated: Path, fields: dict[str, object]) -> None:
    train, validation, said = prepare(repeated, duplicates="drop", **fields)

    everyone = [*train, *validation]
    assert len(set(everyone)) == len(everyone) == fields.get("max_train_rows", 28)
    assert all(text.startswith("report number") for text in everyone)
    line = (
        "12 of 40 training rows are left out: 4 repeat the text of a test or validation row, 8 that of an earlier "
        "training row; 2 have another label than an earlier row with this text"
    )
    assert line in said


def test_near_duplicates_are_dropped_if_that_is_asked_for(repeated: Path) -> None:
    long = "a much longer text of many words, so that one word more or less makes no difference to what it says here"
    write(repeated, "validation", [(long, "a"), ("short", "b")])
    with (repeated / "train.tsv").open("a") as file:
        file.write(f"{long.upper()} now\ta\n")

    exact, _, _ = prepare(repeated, duplicates="drop")
    near, _, said = prepare(repeated, duplicates="drop_near")

    assert (len(exact), len(near)) == (29, 28)
    assert "13 of 41 training rows are left out: 5 repeat or nearly repeat the text of a test or validation" in said[-1]


def test_rows_that_are_all_in_the_test_set_leave_nothing_to_train_on(repeated: Path) -> None:
    write(repeated, "train", [(f"test number {i} on something", "ab"[i % 2]) for i in range(6)])

    with pytest.raises(UserError, match=r"--duplicates drop: leaves no training rows"):
        prepare(repeated, duplicates="drop")


@pytest.mark.slow
def test_two_ranks_drop_the_same_rows_as_one(
    repeated: Path, launch: Callable[..., object], metrics_of: Callable[..., list[dict[str, float]]], tmp_path: Path
) -> None:
    losses = []
    for world_size in (1, 2):
        output = tmp_path / f"on_{world_size}"
        sizes = ("--batch_size", 8 // world_size, "--epochs", 1, "--output_dir", output, "--max_train_rows", 0)
        run = launch(world_size, "--dataset", repeated, "--duplicates", "drop_near", *sizes)
        assert run.process.returncode == 0, run.err
        losses.append([record["loss"] for record in metrics_of(tmp_path / f"on_{world_size}.run")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
