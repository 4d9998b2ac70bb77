from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from training.dataset import AG_NEWS_LABELS, NewsData, default_cleaning, load_news, split_rows
from training.errors import UserError

TEXTS = [f"Report number {i} on something that happened" for i in range(20)]


def write_ag(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)


def ag_folder(folder: Path, train: list[list[str]], test: list[list[str]] | None = None) -> Path:
    write_ag(folder / "train.csv", train)
    if test:
        write_ag(folder / "test.csv", test)
    return folder


def texts_and_names(data: NewsData) -> list[tuple[str, str]]:
    return [
        (text, data.label_names[label])
        for rows in (data.train, data.test)
        for text, label in zip(rows.texts, rows.labels, strict=True)
    ]


def test_ag_news_layout_joins_title_and_description(tmp_path: Path) -> None:
    folder = ag_folder(
        tmp_path,
        [["3", "Oil, again", 'Prices "soar"\nin Asia'], ["1", "Talks", "Ministers meet"]],
        [["1", "Cease-fire", "holds"], ["3", "", "Only a description"]],
    )

    data = load_news(str(folder))

    assert data.label_names == ["World", "Business"]
    assert data.train.texts == ['Oil, again Prices "soar"\nin Asia', "Talks Ministers meet"]
    assert data.test.texts == ["Cease-fire holds", "Only a description"]
    assert texts_and_names(data)[0][1] == "Business"


def test_ag_news_labels_keep_their_order_whatever_comes_first(tmp_path: Path) -> None:
    folder = ag_folder(tmp_path, [[str(i % 4 + 1), "title", f"text {i}"] for i in (3, 2, 1, 0)], [["4", "a", "b"]])

    data = load_news(str(folder))

    assert data.label_names == AG_NEWS_LABELS
    assert data.train.labels.tolist() == [3, 2, 1, 0]
    assert data.train.labels.dtype == np.int64
    assert data.test.labels.tolist() == [3]
    assert data.notes == []


def test_classes_txt_names_the_labels(tmp_path: Path) -> None:
    folder = ag_folder(tmp_path, [["1", "a", "b"], ["2", "c", "d"], ["3", "e", "f"]], [["3", "g", "h"]])
    (folder / "classes.txt").write_text("calm\nmixed\r\nstormy\n\n")

    data = load_news(str(folder))

    assert data.label_names == ["calm", "mixed", "stormy"]
    assert texts_and_names(data)[-1] == ("g h", "stormy")


def test_csv_with_a_header_takes_text_and_label_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("\ufeffid,Label,source,Text\n7,ham,web,Hello there\n8,spam,web,Buy now\n", encoding="utf-8")
    (tmp_path / "test.csv").write_text("text,label\nBuy,spam\n")

    data = load_news(str(tmp_path))

    assert texts_and_names(data) == [("Hello there", "ham"), ("Buy now", "spam"), ("Buy", "spam")]


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_json_lines_with_names_or_numbers(tmp_path: Path, suffix: str) -> None:
    rows = [{"text": "eins", "label": 10}, {"text": "zwei", "label": 9}, {"text": "drei", "label": 10, "more": 1}]
    (tmp_path / f"train.{suffix}").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / f"test.{suffix}").write_text(json.dumps(rows[0]))

    data = load_news(str(tmp_path))

    assert data.label_names == ["9", "10"]
    assert data.train.labels.tolist() == [1, 0, 1]
    assert data.test.texts == ["eins"]


def test_parquet(tmp_path: Path) -> None:
    for split, texts in (("train", TEXTS), ("test", TEXTS[:3])):
        labels = ["even" if i % 2 == 0 else "odd" for i in range(len(texts))]
        table = pyarrow.table({"text": texts, "label": labels, "id": list(range(len(texts)))})
        pyarrow.parquet.write_table(table, tmp_path / f"{split}.parquet")

    data = load_news(str(tmp_path))

    assert data.label_names == ["even", "odd"]
    assert (len(data.train), len(data.test)) == (20, 3)
    assert texts_and_names(data)[1] == (TEXTS[1], "odd")


def saved_dataset(labels: list[int], names: list[str]) -> datasets.Dataset:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({"text": TEXTS[: len(labels)], "label": labels}, features=features)


def test_a_folder_saved_by_datasets_keeps_its_class_names(tmp_path: Path) -> None:
    names = ["zebra", "ant", "never seen"]
    splits = {"train": saved_dataset([0, 1, 1, 0], names), "test": saved_dataset([1, 0], names)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")

    data = load_news(str(tmp_path / "saved"))

    assert data.label_names == names
    assert data.train.labels.tolist() == [0, 1, 1, 0]
    assert data.test.labels.tolist() == [1, 0]


def test_a_single_split_saved_by_datasets_gets_a_test_set(tmp_path: Path) -> None:
    saved_dataset([0, 1] * 10, ["zebra", "ant"]).save_to_disk(tmp_path / "saved")

    data = load_news(str(tmp_path / "saved"))

    assert (len(data.train), len(data.test)) == (18, 2)


def test_unlabelled_rows_of_a_saved_dataset_are_named(tmp_path: Path) -> None:
    splits = {"train": saved_dataset([0, 1], ["a", "b"]), "test": saved_dataset([-1, -1], ["a", "b"])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")

    with pytest.raises(UserError, match=r"test row 0: label -1 is out of range"):
        load_news(str(tmp_path / "saved"))


def test_rows_of_a_saved_dataset_without_a_label_are_named(tmp_path: Path) -> None:
    saved = datasets.DatasetDict({"train": saved_dataset([0, 1, None, 1], ["a", "b"])})  # type: ignore[list-item]
    saved.save_to_disk(tmp_path / "saved")

    with pytest.raises(UserError, match=r"train row 2: label None"):
        load_news(str(tmp_path / "saved"))


def single_file(path: Path, labels: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps({"text": t, "label": y}) for t, y in zip(TEXTS, labels, strict=True)))
    return path


def test_a_single_file_gives_a_stratified_part_for_the_test_and_says_so(tmp_path: Path) -> None:
    path = single_file(tmp_path / "news.jsonl", ["a", "b"] * 10)

    data = load_news(str(path), seed=5)

    assert sorted(data.train.texts + data.test.texts) == sorted(TEXTS)
    assert sorted(data.test.labels.tolist()) == [0, 1]
    assert data.notes == ["no test rows in the data: 2 of the 20 rows were set aside as the test set"]
    assert texts_and_names(data) == texts_and_names(load_news(str(path), seed=5))
    assert any(load_news(str(path), seed=seed).test.texts != data.test.texts for seed in range(6, 9))


def test_the_sample_is_read_by_name() -> None:
    data = load_news("sample")

    assert data.name == "sample"
    assert data.label_names == AG_NEWS_LABELS
    assert data.notes == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.csv", '"1","a","b"\n"5","c","d"\n', r"train.csv line 2: label 5 is out of range 1 to 4"),
        ("train.csv", '"1","a","b"\n"0","c","d"\n', r"train.csv line 2: label 0 is out of range 1 to 4"),
        (
            "train.csv",
            '"1","a\nb","c"\n"x","c","d"\n',
            r"train.csv line 3: label 'x' is no number; use AG News' layout",
        ),
        ("train.csv", '"1","a","b"\n"2"\n', r"train.csv line 2: one field"),
        ("train.csv", '"1","a","b"\n"2"," ",""\n', r"train.csv line 2: the text is empty"),
        ("train.csv", '"1","a","b"\n"2","c"d","e"\n', r"train.csv line 2: not valid CSV"),
        ("train.csv", "text,label\nhello,a\nhello\n", r"train.csv line 3: 1 fields, but the header"),
        ("train.csv", "text,label\nhello,a\nhello,\n", r"train.csv line 3: label '' must be a name"),
        ("train.csv", "text,label\nhello,a\nworld,a\n", r"all training rows have the label 'a'; two labels are needed"),
        ("train.csv", "text,label\n", r"train.csv: holds no rows"),
        ("train.csv", "", r"train.csv: holds no rows"),
        ("train.jsonl", '{"text": "a", "label": 1}\n{"text": "b"\n', r"train.jsonl line 2: not valid JSON"),
        ("train.jsonl", '{"text": "a", "label": 1}\n[1]\n', r"train.jsonl line 2: must be an object with text and"),
        ("train.jsonl", '\n{"text": "a"}\n', r"train.jsonl line 2: must be an object with text and label"),
        ("train.jsonl", '{"text": 5, "label": 1}\n', r"train.jsonl line 1: the text is no text"),
        ("train.jsonl", '{"text": "a", "label": true}\n', r"train.jsonl line 1: label True must be a name or a whole"),
        ("train.jsonl", '{"text": "a", "label": 1.5}\n', r"train.jsonl line 1: label 1.5 must be a name or a whole"),
        ("train.jsonl", '{"text": "a", "label": -1}\n', r"train.jsonl line 1: label -1 is out of range"),
        ("train.parquet", "no parquet at all", r"train.parquet: no Parquet file with text and label"),
        ("other.csv", "text,label\n", r"the folder holds no train.csv, train.jsonl or train.parquet"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_and_line(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)

    with pytest.raises(UserError, match=message):
        load_news(str(tmp_path))


def test_a_test_label_that_training_does_not_have_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\nhello,a\nworld,b\n")
    (tmp_path / "test.csv").write_text("text,label\nhello,a\nworld,c\n")

    with pytest.raises(UserError, match=r"test.csv line 3: label 'c' is none of the training labels a, b"):
        load_news(str(tmp_path))


def test_text_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_bytes("text,label\nhello,a\ncafé,b\n".encode("latin-1"))

    with pytest.raises(UserError, match=r"train.csv line 3: not UTF-8 text"):
        load_news(str(tmp_path))


def test_parquet_without_the_columns_is_named(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"title": ["a"]}), tmp_path / "train.parquet")

    with pytest.raises(UserError, match=r"train.parquet: no Parquet file with text and label"):
        load_news(str(tmp_path))


def test_a_file_of_another_kind_and_a_name_of_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "news.xml").write_text("<news/>")

    with pytest.raises(UserError, match=r"news.xml: must end in .csv, .jsonl, .json, .parquet"):
        load_news(str(tmp_path / "news.xml"))
    with pytest.raises(UserError, match=r"--dataset ag_mews: no such dataset; use ag_news, sample"):
        load_news("ag_mews")
    with pytest.raises(UserError, match=r"no such dataset; use ag_news, sample"):
        load_news(str(tmp_path / "gone"))


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5])
def test_split_rows_is_complete_disjoint_and_stratified(fraction: float) -> None:
    labels = np.random.default_rng(0).choice(4, size=1000, p=[0.5, 0.3, 0.15, 0.05])

    train, validation = split_rows(labels, fraction, seed=42)

    assert np.sort(np.concatenate([train, validation])).tolist() == list(range(1000))
    assert (np.diff(train) > 0).all()
    assert (np.diff(validation) > 0).all()
    for label in range(4):
        assert (labels[validation] == label).sum() == round((labels == label).sum() * fraction)


def test_split_rows_is_a_function_of_the_seed() -> None:
    labels = np.arange(100) % 4

    first, again, other = (split_rows(labels, 0.2, seed)[1].tolist() for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_split_rows_keeps_a_row_of_every_label_for_training() -> None:
    train, validation = split_rows(np.array([0, 0, 1, 2, 2, 2]), 0.9, seed=0)

    labels = np.array([0, 0, 1, 2, 2, 2])
    assert set(labels[train].tolist()) == {0, 1, 2}
    assert set(labels[validation].tolist()) == {0, 2}


@pytest.mark.parametrize(
    ("file", "content", "labels", "cleaning"),
    [
        ("train.csv", '"3","Oil &amp; gas","prices\\\\rise"\n', ["oil", "gas", "coal"], "news"),
        ("train.csv", "text,label\nreturn <b>x</b>,code\n", ["code", "prose"], "none"),
        ("train.jsonl", '{"text": "x", "label": "code"}\n', ["code", "prose"], "none"),
        ("train.parquet", "", ["World", "Sports", "Business", "Sci/Tech"], "news"),
        ("train.csv", "", ["code", "prose"], "none"),
    ],
)
def test_texts_of_ag_news_are_cleaned_as_news_and_those_of_others_are_not(
    tmp_path: Path, file: str, content: str, labels: list[str], cleaning: str
) -> None:
    (tmp_path / file).write_text(content)
    assert default_cleaning(str(tmp_path), labels) == default_cleaning(str(tmp_path / file), labels) == cleaning


@pytest.mark.parametrize(
    ("name", "cleaning"),
    [("sample", "news"), ("ag_news", "news"), ("fancyzhx/ag_news", "news"), ("someone/tickets", "none")],
)
def test_a_name_decides_how_its_texts_are_cleaned(name: str, cleaning: str) -> None:
    assert default_cleaning(name, ["a", "b"]) == cleaning
