"""The data report finds what was planted, says nothing else, and names the rows as they are in the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.config import FAULTS, TrainConfig
from training.data.report import (
    in_words,
    label_figures,
    length_figures,
    lines_of,
    measure_files,
    script_figures,
)

LONG = "number {} of a series of reports from the harbour of a town where ships and {} come and go every single day"


def silent(line: str) -> None: ...


def rows_of(count: int, first: int = 0) -> list[tuple[str, str]]:
    return [
        (LONG.format(f"{i} {i * 7} {i * 11}", f"boats {i} {i * 3} {i * 5} things"), "ab"[i % 2])
        for i in range(first, first + count)
    ]


def write_csv(path: Path, rows: list[tuple[str, ...]], header: str = "text,label") -> None:
    path.write_text(f"{header}\n" + "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows))


def write_jsonl(path: Path, rows: list[tuple[str, ...]], header: str = "text,label") -> None:
    path.write_text("".join(json.dumps(dict(zip(header.split(","), row, strict=True))) + "\n" for row in rows))


def write_parquet(path: Path, rows: list[tuple[str, ...]], header: str = "text,label") -> None:
    import pyarrow
    import pyarrow.parquet

    columns = dict(zip(header.split(","), map(list, zip(*rows, strict=True)), strict=True))
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def measure(place: Path, **fields: Any) -> dict[str, Any]:
    return measure_files(TrainConfig(dataset=str(place), model="tiny", **fields), silent)


def named(figures: dict[str, Any], fault: str) -> list[tuple[str, str, bool]]:
    short = [(Path(one["row"]).name, Path(one["other_row"]).name, one["near"]) for one in figures[fault]["rows"]]
    assert figures[fault]["count"] == len(short)
    return short


@pytest.mark.parametrize(
    ("suffix", "write", "place"),
    [
        ("csv", write_csv, "line {}"),
        ("jsonl", write_jsonl, "line {}"),
        ("parquet", write_parquet, "row {}"),
    ],
)
def test_planted_faults_are_found_and_named_as_they_are_in_the_files(
    tmp_path: Path, suffix: str, write: Callable[..., None], place: str
) -> None:
    train, test = rows_of(20), rows_of(6, first=100)
    train += [(train[3][0].upper(), train[3][1]), (f"{train[4][0]} again", train[4][1])]
    train += [(train[5][0].replace(" ", "  "), "a"), (f"so {train[7][0]}", "a")]
    test += [(train[8][0], train[8][1]), (f"{train[9][0]} too", train[9][1])]
    write(tmp_path / f"train.{suffix}", train)
    write(tmp_path / f"test.{suffix}", test)

    figures = measure(tmp_path)

    first = 2 if suffix == "csv" else 1  # after the header

    def where(split: str, index: int) -> str:
        return f"{split}.{suffix} {place.format(index + first)}"

    own = [(20, 3, False), (21, 4, True), (22, 5, False), (23, 7, True)]
    assert named(figures, "duplicates") == [(where("train", a), where("train", b), near) for a, b, near in own]
    assert named(figures, "conflicts") == [(where("train", a), where("train", b), near) for a, b, near in own[2:]]
    leaking = [(6, 8, False), (7, 9, True)]
    assert named(figures, "leakage") == [(where("test", a), where("train", b), near) for a, b, near in leaking]
    assert [figures["conflicts"]["rows"][0][label] for label in ("label", "other_label")] == ["a", "b"]


def test_a_line_of_a_file_counts_rows_that_were_left_out(tmp_path: Path) -> None:
    rows = rows_of(12)
    write_csv(tmp_path / "rows.csv", [rows[0], ("", "a"), *rows[1:], rows[0]])

    figures = measure(tmp_path / "rows.csv", bad_rows="skip")

    assert named(figures, "duplicates") == [("rows.csv line 15", "rows.csv line 2", False)]
    assert any("left out" in note for note in figures["notes"])


def test_of_a_single_file_the_rows_that_a_run_sets_aside_to_test_on_can_leak(tmp_path: Path) -> None:
    rows = rows_of(50)
    write_csv(tmp_path / "rows.csv", [*rows, *rows])

    figures = measure(tmp_path / "rows.csv")

    assert figures["duplicates"]["count"] == 50
    assert figures["rows"] == {"training": 100, "set-aside test": 10}
    assert figures["leakage"]["splits"]["set-aside test"]["of"] == 10
    assert figures["leakage"]["count"] > 5
    assert in_words(figures)["Rows"] == "100 training; a run sets 10 of them aside to test on"


def test_clean_rows_have_no_faults(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", rows_of(40))
    write_csv(tmp_path / "validation.csv", rows_of(4, first=200))
    write_csv(tmp_path / "test.csv", rows_of(4, first=300))

    figures = measure(tmp_path)

    assert [figures[fault]["count"] for fault in FAULTS] == [0, 0, 0]
    assert figures["leakage"]["splits"] == {"test": {"count": 0, "of": 4}, "validation": {"count": 0, "of": 4}}
    assert lines_of(figures, TrainConfig()) == []


def test_pairs_are_near_only_if_both_texts_are(tmp_path: Path) -> None:
    (paragraph, _), (other, _) = rows_of(2)
    rows = [(f"question {i} {i * 3} about it", paragraph, "ab"[i % 2]) for i in range(20)]
    rows += [
        (rows[3][0].upper(), paragraph, rows[3][2]),
        (other, paragraph, "a"),
        (f"{other} now", paragraph + "!", "b"),
    ]
    rows += [(paragraph, other, "a")]
    write_csv(tmp_path / "train.csv", rows, "text,text_pair,label")
    write_csv(tmp_path / "test.csv", [("no question", paragraph, "a")], "text,text_pair,label")

    figures = measure(tmp_path, task="pair")

    assert named(figures, "duplicates") == [
        ("train.csv line 22", "train.csv line 5", False),
        ("train.csv line 24", "train.csv line 23", True),
    ]
    assert named(figures, "conflicts") == [("train.csv line 24", "train.csv line 23", True)]
    assert named(figures, "leakage") == []
    assert "two texts" in figures["learning_curve"]["skipped"]


def test_labels_of_one_text_conflict_if_any_of_them_differs(tmp_path: Path) -> None:
    rows = [(text, ["a", "b"] if label == "a" else ["b"]) for text, label in rows_of(20)]
    rows += [(rows[0][0], ["b", "a"]), (rows[2][0], ["b"]), (rows[4][0], [])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": a, "label": b}) + "\n" for a, b in rows))

    figures = measure(tmp_path / "rows.jsonl", task="multi_label")

    assert named(figures, "conflicts") == [
        ("rows.jsonl line 22", "rows.jsonl line 3", False),
        ("rows.jsonl line 23", "rows.jsonl line 5", False),
    ]
    assert [one["label"] for one in figures["conflicts"]["rows"]] == ["b", "none"]
    assert figures["labels"]["counts"] == {"a": 11, "b": 22}
    assert figures["labels"]["without"] == 1


def test_numbers_of_one_text_conflict_if_they_are_far_apart(tmp_path: Path) -> None:
    rows = [(text, str(i % 5)) for i, (text, _) in enumerate(rows_of(40))]
    rows += [(rows[0][0], "0.2"), (rows[1][0], "4.5"), (rows[0][0], "3")]
    write_csv(tmp_path / "rows.csv", rows)

    figures = measure(tmp_path / "rows.csv", task="regression")

    assert [row for row, *_ in named(figures, "conflicts")] == ["rows.csv line 43", "rows.csv line 44"]
    assert figures["duplicates"]["count"] == 3
    assert in_words(figures)["Labels"].startswith("numbers from 0 to 4.5, median 2")


def test_a_third_label_of_a_text_conflicts_although_an_earlier_row_agrees(tmp_path: Path) -> None:
    text, near = "nothing to see here", LONG.format("zero", "cars")
    rows = [
        *rows_of(20),
        (text, "a"),
        (text, "b"),
        (text.title(), "a"),
        (near, "a"),
        (f"{near} ", "a"),
        (f"the {near}", "b"),
    ]
    write_csv(tmp_path / "rows.csv", rows)

    figures = measure(tmp_path / "rows.csv")

    assert [row for row, *_ in named(figures, "conflicts")] == [f"rows.csv line {line}" for line in (23, 24, 27)]


def test_texts_without_labels_are_compared_but_nothing_is_said_about_labels(tmp_path: Path) -> None:
    texts = [text for text, _ in rows_of(30)]
    (tmp_path / "texts.txt").write_text("\n".join([*texts, texts[4].upper()]) + "\n")

    figures = measure(tmp_path / "texts.txt", task="masked_lm")

    assert named(figures, "duplicates") == [("texts.txt line 31", "texts.txt line 5", False)]
    assert not {"conflicts", "labels", "learning_curve"} & figures.keys()


def test_scripts_are_told_apart_by_most_letters_of_a_text() -> None:
    texts = [
        "plain",
        "Привет, мир",
        "東京は今日も晴れです",
        "北京今天天气很好",
        "123 !?",
        "naïve café",
        "ÜBER",
        ("ok", "да да да"),
    ]

    assert script_figures(texts) == {
        "Latin": 3,
        "Cyrillic": 2,
        "Japanese": 1,
        "Chinese characters": 1,
        "no letters": 1,
    }


def test_lengths_are_those_before_the_cut() -> None:
    figures = length_figures([np.array([3, 5, 5]), np.arange(1, 98)], max_length=90)

    assert (figures["texts"], figures["longest"], figures["cut"], figures["median"], figures["p95"]) == (
        100,
        97,
        7,
        47,
        92,
    )


def test_rare_labels_are_named_and_a_dominant_one_too() -> None:
    targets = np.array([0] * 95 + [1] * 3 + [2] * 2)
    figures = {"rows": {"training": 100}, "labels": label_figures(targets, ["usual", "rare", "rarer"])}

    assert lines_of(figures, TrainConfig()) == [
        "Fewer than 10 training rows for 2 of 3 labels: rarer (2), rare (3)",
        "95.0% of the training rows have the label usual, so a model that always answers it looks good already",
    ]
    assert in_words(figures)["Labels"] == (
        "3; the largest is usual with 95 rows (95.0%), the smallest rarer with 2; "
        "fewer than 10 for 2: rarer (2), rare (3)"
    )
