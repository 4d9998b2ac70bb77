from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from common.errors import UserError
from common.problem_types import MULTI_LABEL, REGRESSION, UnusableRow
from common.rows import Columns
from training.config import Selection, TrainConfig
from training.data.dataset import (
    AG_NEWS_LABELS,
    LoadOptions,
    TextData,
    default_cleaning,
    load_data,
    split_rows,
)
from training.data.source_cache import source_file

TEXTS = [f"Report number {i} on something that happened" for i in range(20)]


def write_ag(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)


def ag_folder(folder: Path, train: list[list[str]], test: list[list[str]] | None = None) -> Path:
    write_ag(folder / "train.csv", train)
    if test:
        write_ag(folder / "test.csv", test)
    return folder


def texts_and_names(data: TextData) -> list[tuple[str, str]]:
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

    data = load_data(str(folder))

    assert data.label_names == ["1", "3"]
    assert data.train.texts == ['Oil, again Prices "soar"\nin Asia', "Talks Ministers meet"]
    assert data.test.texts == ["Cease-fire holds", "Only a description"]
    assert texts_and_names(data)[0][1] == "3"


def test_ag_news_labels_keep_their_order_whatever_comes_first(tmp_path: Path) -> None:
    folder = ag_folder(tmp_path, [[str(i % 4 + 1), "title", f"text {i}"] for i in (3, 2, 1, 0)], [["4", "a", "b"]])

    data = load_data(str(folder))

    assert data.label_names == AG_NEWS_LABELS
    assert data.train.labels.tolist() == [3, 2, 1, 0]
    assert data.train.labels.dtype == np.int64
    assert data.test.labels.tolist() == [3]
    [note] = data.notes
    assert note.startswith("the file train.csv has no header line (like others), so it was read as class, title and")
    assert "named World, Sports, Business, Sci/Tech as in AG News; if that is wrong, give it a header" in note


def test_classes_txt_names_the_labels(tmp_path: Path) -> None:
    folder = ag_folder(tmp_path, [["1", "a", "b"], ["2", "c", "d"], ["3", "e", "f"]], [["3", "g", "h"]])
    (folder / "classes.txt").write_text("calm\nmixed\r\nstormy\n\n")

    data = load_data(str(folder))

    assert data.label_names == ["calm", "mixed", "stormy"]
    assert texts_and_names(data)[-1] == ("g h", "stormy")


def test_classes_txt_counts_for_a_single_file_too_and_may_begin_with_a_mark(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_bytes("\ufeffnegative\r\npositive\r\n".encode())
    rows = "".join(f'"{1 + i % 2}","title {i}","text {i}"\n' for i in range(20))
    (tmp_path / "train.csv").write_text(rows)
    for dataset in (tmp_path, tmp_path / "train.csv"):
        assert load_data(str(dataset)).label_names == ["negative", "positive"]

    (tmp_path / "classes.txt").write_bytes("Économie\nSport\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"classes\.txt: must be UTF-8 text"):
        load_data(str(tmp_path))


def test_half_a_character_in_json_is_replaced_as_no_file_could_hold_it(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"torn {i} \ud83d", "label": "ab"[i % 2]}) for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    assert load_data(str(tmp_path / "rows.jsonl")).train.texts[0] == "torn 0 \ufffd"


def test_a_header_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes("Überschrift,text,label\n".encode("latin-1") + b"x,A text,a\n" * 20)
    with pytest.raises(UserError, match=r"rows\.csv line 1: not UTF-8 text"):
        load_data(str(tmp_path / "rows.csv"))


def test_splits_that_number_their_classes_differently_keep_their_names(tmp_path: Path) -> None:
    def split(names: Sequence[str]) -> datasets.Dataset:
        return datasets.Dataset.from_dict(
            {"text": [f"this is {n} {i}" for i in range(9) for n in names], "label": [*names] * 9}
        )

    found = datasets.DatasetDict(train=split(("apple", "bear", "cat")), test=split(("apple", "cat")))
    found.class_encode_column("label").save_to_disk(tmp_path / "encoded")
    data = load_data(str(tmp_path / "encoded"))
    assert [data.label_names[label] for label in data.test.labels[:2]] == ["apple", "cat"]

    found["test"] = found["test"].remove_columns("label")
    found.save_to_disk(tmp_path / "unlabelled")
    with pytest.raises(UserError, match="test: no column label among text"):
        load_data(str(tmp_path / "unlabelled"))


def test_two_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    column = pyarrow.array(["a", "b"])
    table = pyarrow.Table.from_arrays([column, column, column], names=["text", "text", "label"])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="2 columns are named text; rename one"):
        load_data(str(tmp_path / "rows.parquet"))


def test_columns_of_a_csv_with_a_header_may_come_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("\ufeffid,Label,source,Text\n7,ham,web,Hello there\n8,spam,web,Buy now\n", encoding="utf-8")
    (tmp_path / "test.csv").write_text("text,label\nBuy,spam\n")

    data = load_data(str(tmp_path))

    assert texts_and_names(data) == [("Hello there", "ham"), ("Buy now", "spam"), ("Buy", "spam")]


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_json_lines_with_names_or_numbers(tmp_path: Path, suffix: str) -> None:
    rows = [{"text": "eins", "label": 10}, {"text": "zwei", "label": 9}, {"text": "drei", "label": 10, "more": 1}]
    (tmp_path / f"train.{suffix}").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / f"test.{suffix}").write_text(json.dumps(rows[0]))

    data = load_data(str(tmp_path))

    assert data.label_names == ["9", "10"]
    assert data.train.labels.tolist() == [1, 0, 1]
    assert data.test.texts == ["eins"]


def test_parquet(tmp_path: Path) -> None:
    for split, texts in (("train", TEXTS), ("test", TEXTS[:3])):
        labels = ["even" if i % 2 == 0 else "odd" for i in range(len(texts))]
        table = pyarrow.table({"text": texts, "label": labels, "id": list(range(len(texts)))})
        pyarrow.parquet.write_table(table, tmp_path / f"{split}.parquet")

    data = load_data(str(tmp_path))

    assert data.label_names == ["even", "odd"]
    assert (len(data.train), len(data.test)) == (20, 3)
    assert texts_and_names(data)[1] == (TEXTS[1], "odd")


def saved_dataset(labels: list[int | None], names: list[str]) -> datasets.Dataset:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({"text": TEXTS[: len(labels)], "label": labels}, features=features)


def test_a_folder_saved_by_datasets_keeps_its_class_names(tmp_path: Path) -> None:
    names = ["zebra", "ant", "never seen"]
    splits = {"train": saved_dataset([0, 1, 1, 0], names), "test": saved_dataset([1, 0], names)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")

    data = load_data(str(tmp_path / "saved"))

    assert data.label_names == names
    assert data.train.labels.tolist() == [0, 1, 1, 0]
    assert data.test.labels.tolist() == [1, 0]


def test_a_single_split_saved_by_datasets_gets_a_test_set(tmp_path: Path) -> None:
    saved_dataset([0, 1] * 10, ["zebra", "ant"]).save_to_disk(tmp_path / "saved")

    data = load_data(str(tmp_path / "saved"))

    assert (len(data.train), len(data.test)) == (18, 2)


@pytest.mark.parametrize("label", [-1, None])
def test_a_row_of_a_saved_dataset_without_a_label_is_named(tmp_path: Path, label: int | None) -> None:
    splits = {"train": saved_dataset([0, 1], ["a", "b"]), "test": saved_dataset([1, label], ["a", "b"])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")

    with pytest.raises(
        UserError, match=r"test row 1: label None must be a name .* if these rows have no labels, test on"
    ):
        load_data(str(tmp_path / "saved"))


def single_file(path: Path, labels: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps({"text": t, "label": y}) for t, y in zip(TEXTS, labels, strict=True)))
    return path


def test_a_stratified_test_set_is_split_off_a_single_file(tmp_path: Path) -> None:
    path = single_file(tmp_path / "news.jsonl", ["a", "b"] * 10)

    data = load_data(str(path), LoadOptions(seed=5))

    assert sorted(data.train.texts + data.test.texts) == sorted(TEXTS)
    assert sorted(data.test.labels.tolist()) == [0, 1]
    assert data.notes == ["no test rows in the data: 2 of the 20 rows were set aside as the test set"]
    assert texts_and_names(data) == texts_and_names(load_data(str(path), LoadOptions(seed=5)))
    others = [load_data(str(path), LoadOptions(seed=seed)) for seed in range(6, 9)]
    assert any(other.test.texts != data.test.texts for other in others)


def test_the_sample_is_read_by_name() -> None:
    data = load_data("sample")

    assert data.name == "sample"
    assert data.label_names == AG_NEWS_LABELS
    assert data.notes == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train.csv",
            '"1","a\nb","c"\n"x","c","d"\n',
            r"train.csv line 3: label 'x' is not a number; rows without a header must be",
        ),
        ("train.csv", '"1","a","b"\n"2"\n', r"train.csv line 2: one field"),
        ("train.csv", '"1","a","b"\n"2"," ",""\n', r"train.csv line 2: the text is empty"),
        ("train.csv", '"1","a","b"\n"2","c"d","e"\n', r"train.csv line 2: not valid CSV"),
        ("train.csv", "text,label\nhello,a\nhello\n", r"train.csv line 3: 1 fields, but the header"),
        ("train.csv", "text,label\nhello,a\nhello,\n", r"train.csv line 3: the label is empty"),
        ("train.csv", "text,label\nhello,a\nworld,a\n", r"all training rows have the label 'a'; two labels are needed"),
        ("train.csv", "text,label\n", r"train.csv: holds no rows"),
        ("train.csv", "", r"train.csv: holds no rows"),
        ("train.jsonl", '{"text": "a", "label": 1}\n{"text": "b"\n', r"train.jsonl line 2: not valid JSON"),
        ("train.jsonl", '{"text": "a", "label": 1}\n[1]\n', r"train.jsonl line 2: must be an object with text and"),
        ("train.jsonl", '\n{"text": "a"}\n', r"train.jsonl line 2: no column label among text; name yours"),
        ("train.jsonl", '{"text": 5, "label": 1}\n', r"train.jsonl line 1: the text is not a string"),
        ("train.parquet", "no parquet at all", r"train.parquet: not a readable Parquet file"),
        ("other.csv", "text,label\n", r"the folder holds no train.csv, train.jsonl or train.parquet"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_and_line(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)

    with pytest.raises(UserError, match=message):
        load_data(str(tmp_path))


def test_a_test_label_that_training_does_not_have_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\nhello,a\nworld,b\n")
    (tmp_path / "test.csv").write_text("text,label\nhello,a\nworld,c\n")

    with pytest.raises(UserError, match=r"test.csv line 3: label 'c' is not one of the training labels a, b"):
        load_data(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.csv", "text;label\nHello, there;ham\nBuy; now;spam\n".replace("Buy; now", '"Buy; now"')),
        ("train.csv", "label\ttext\nham\tHello, there\nspam\tBuy; now\n"),
        ("train.tsv", "label\ttext\nham\tHello, there\nspam\tBuy; now\n"),
    ],
)
def test_semicolons_and_tabs_separate_fields_too(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "test.csv").write_text("text,label\nBuy,spam\n")

    data = load_data(str(tmp_path))

    assert texts_and_names(data)[:2] == [("Hello, there", "ham"), ("Buy; now", "spam")]
    assert data.notes == []


def test_rows_without_a_header_may_be_separated_by_tabs(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("3\tOil, again\tPrices; up\n1\tTalks\tMinisters\n")
    (tmp_path / "test.csv").write_text('"1","Talks; more","again; and again"\n')

    data = load_data(str(tmp_path))

    assert data.train.texts == ["Oil, again Prices; up", "Talks Ministers"]
    assert data.test.texts == ["Talks; more again; and again"]


HEADLINES = {
    "news.csv": "id,headline,category\n" + "".join(f"{i},{text},{'ab'[i % 2]}\n" for i, text in enumerate(TEXTS)),
    "news.jsonl": "\n".join(json.dumps({"headline": t, "category": "ab"[i % 2]}) for i, t in enumerate(TEXTS)),
}


@pytest.mark.parametrize("name", HEADLINES)
def test_columns_of_other_names_are_listed_and_can_be_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(HEADLINES[name])

    with pytest.raises(
        UserError,
        match=r"line 1: no column text and no column label among (id, )?headline, category; "
        "name yours with --text_column and --label_column$",
    ):
        load_data(str(path))
    columns = Columns("headline", "Category" if name.endswith("csv") else "category")
    data = load_data(str(path), LoadOptions(columns=columns))

    assert sorted(data.train.texts + data.test.texts) == sorted(TEXTS)
    assert data.label_names == ["a", "b"]


def test_columns_of_parquet_and_of_saved_datasets_can_be_named(tmp_path: Path) -> None:
    columns = {"Headline": TEXTS, "category": ["ab"[i % 2] for i in range(20)]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "news.parquet")
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")

    for path in (tmp_path / "news.parquet", tmp_path / "saved"):
        data = load_data(str(path), LoadOptions(columns=Columns("headline", "category")))
        assert sorted(data.train.texts + data.test.texts) == sorted(TEXTS)
        with pytest.raises(UserError, match=r"no column text and no column label among Headline, category; name"):
            load_data(str(path))


def test_texts_of_several_columns_are_joined_without_those_that_are_empty(tmp_path: Path) -> None:
    columns = {"Title": ["Oil", "", "Talks"], "label": ["a", "b", "a"], "body": ["Prices soar", "No title", ""]}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    with (tmp_path / "news.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    with_null = [{name: text or None for name, text in row.items()} for row in rows]
    (tmp_path / "news.jsonl").write_text("\n".join(map(json.dumps, with_null)))
    table = pyarrow.table({name: [text or None for text in texts] for name, texts in columns.items()})
    pyarrow.parquet.write_table(table, tmp_path / "news.parquet")
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    (tmp_path / "test.csv").write_text("title,body,label\nx,y,a\n")

    for name in ("news.csv", "news.jsonl", "news.parquet", "saved"):
        data = load_data(str(tmp_path / name), LoadOptions(columns=Columns("title, body")))
        assert sorted(data.train.texts + data.test.texts) == ["No title", "Oil Prices soar", "Talks"], name
    with pytest.raises(UserError, match=r"no column summary among Title, label, body; name yours with"):
        load_data(str(tmp_path / "news.csv"), LoadOptions(columns=Columns("title,summary")))


def test_a_column_with_a_comma_in_its_name_is_one_column(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("title, body\tlabel\nA text\ta\nAnother\tb\n")
    (tmp_path / "test.tsv").write_text("Title, Body\tLABEL\nMore\ta\n")

    data = load_data(str(tmp_path), LoadOptions(columns=Columns("title, body")))

    assert data.train.texts == ["A text", "Another"]
    assert data.test.texts == ["More"]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('"Rates" fall\ta\n"Up", he said\tb\n', ['"Rates" fall', '"Up", he said']),
        ('"Rates fall\ta\nand rise"\tb\n', ['"Rates fall', 'and rise"']),
        ('"Rates"\ta\n"Two\nlines, a ""quote"" and a\ttab"\tb\n', ["Rates", 'Two\nlines, a "quote" and a\ttab']),
        ('Rates "fall"\ta\nA 5" disk\tb\n', ['Rates "fall"', 'A 5" disk']),
        ('"One\r\n\ttab"\ta\n"Two"\tb\nThree\ta\n', ["One\r\n\ttab", "Two", "Three"]),
    ],
    ids=["quotes begin texts", "a pair of stray quotes", "quoted fields", "quotes within", "quoted line ends"],
)
def test_a_tsv_may_have_quotes_in_its_texts_or_around_its_fields(
    tmp_path: Path, content: str, texts: list[str]
) -> None:
    (tmp_path / "train.tsv").write_bytes(b"Text\tLabel\n" + content.encode())
    (tmp_path / "test.tsv").write_text("text\tlabel\nBuy\ta\n")

    assert load_data(str(tmp_path)).train.texts == texts


SPLITS = {"training": 8, "validation": 6, "held_out": 4, "unlabelled": 2}


def write_splits(folder: Path, kind: str) -> Path:
    """A dataset whose splits have names of their own, as CSV files or as `datasets` saves it."""
    if kind == "saved":
        splits = {split: saved_dataset([0, 1] * (count // 2), ["a", "b"]) for split, count in SPLITS.items()}
        datasets.DatasetDict(splits).save_to_disk(folder / kind)
        return folder / kind
    (folder / kind).mkdir()
    for split, count in SPLITS.items():
        labelled(folder / kind / f"{split}.csv", ["a", "b"] * (count // 2))
    return folder / kind


@pytest.mark.parametrize("kind", ["saved", "files"])
def test_splits_are_chosen_by_name_and_none_is_used_twice(tmp_path: Path, kind: str) -> None:
    folder = str(write_splits(tmp_path, kind))

    def load(**chosen: str) -> TextData:
        return load_data(folder, LoadOptions(selection=Selection(**chosen)))

    named = load(train_split="training", validation_split="validation", test_split="held_out")
    assert [len(rows) for rows in named.splits.values()] == [8, 4, 6]
    # What is tested on is not validated on too, although its name says so.
    tested = load(train_split="training", test_split="validation")
    assert [len(rows) for rows in tested.splits.values()] == [8, 6]
    with pytest.raises(UserError, match=r"has no dev split, only held_out, training, unlabelled, validation; name one"):
        load(train_split="training", validation_split="dev")
    with pytest.raises(UserError, match=r"--train_split"):
        load()


@pytest.mark.parametrize(
    ("dataset", "chosen", "message"),
    [
        ("sample", {"test_split": "dev"}, "--test_split dev and --dataset sample: it is built in"),
        ("rows.csv", {"train_split": "a"}, "--train_split a and --dataset .*rows.csv: it is a single file"),
        ("", {"dataset_config": "en"}, "--dataset_config en and --dataset .*: only datasets on the hub have it"),
        ("rows.csv", {"dataset_revision": "v1"}, "--dataset_revision v1 and --dataset .*: it is a single file"),
    ],
)
def test_a_choice_that_the_data_does_not_have_is_refused_instead_of_ignored(
    tmp_path: Path, dataset: str, chosen: dict[str, str], message: str
) -> None:
    labelled(tmp_path / "rows.csv", ["a", "b"] * 5)
    place = dataset if dataset == "sample" else str(tmp_path / dataset)

    with pytest.raises(UserError, match=message) as refused:
        load_data(place, LoadOptions(selection=Selection(**chosen)))

    assert refused.value.code == "flags-conflict"


def test_columns_that_are_not_read_are_noted(tmp_path: Path) -> None:
    columns = {"text": TEXTS, "text_pair": TEXTS, "label": ["ab"[i % 2] for i in range(20)], "id": [*range(20)]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "news.parquet")
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    (tmp_path / "news.csv").write_text(
        ",".join(columns)
        + "\n"
        + "".join(",".join(map(str, row)) + "\n" for row in zip(*columns.values(), strict=True))
    )
    (tmp_path / "news.jsonl").write_text(
        "\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True))
    )

    for name in ("news.parquet", "saved", "news.csv", "news.jsonl"):
        assert "columns that are not used: text_pair, id" in load_data(str(tmp_path / name)).notes


def test_texts_of_any_length_are_read(tmp_path: Path) -> None:
    long = "word " * 40_000
    (tmp_path / "train.csv").write_text(f'text,label\n"{long}",a\nshort,b\n')
    (tmp_path / "test.csv").write_text("text,label\nshort,b\n")

    assert load_data(str(tmp_path)).train.texts == [long, "short"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_byte_order_mark_tells_the_encoding(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "train.csv").write_bytes("text\tlabel\nUn café\ta\nZwei\tb\n".encode(encoding))
    (tmp_path / "test.csv").write_text("text,label\nshort,b\n")

    assert load_data(str(tmp_path)).train.texts == ["Un café", "Zwei"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "text,label\nhello,a\n".encode("utf-16-le"),
            r"train.csv: not UTF-8 text \(it looks like UTF-16\); save",
        ),
        (
            "text,label\nhello,a\n".encode("utf-16")[:-1],
            r"train.csv: UTF-16 text that is damaged at byte \d+; save it as",
        ),
        ("Überschrift;Kategorie\nhello;a\n".encode("cp1252"), r"train.csv line 1: not UTF-8 text; save the file as"),
        ("text;label\nUn café;a\n".encode("cp1252"), r'line 2: not UTF-8 text; save the file as UTF-8 \(in Excel "CSV'),
    ],
)
def test_an_encoding_that_is_not_read_is_named_with_a_remedy(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "train.csv").write_bytes(content)

    with pytest.raises(UserError, match=message):
        load_data(str(tmp_path))


def split_texts(split: str, count: int) -> str:
    return "text,label\n" + "".join(f"{split} row {i},{'ab'[i % 2]}\n" for i in range(count))


@pytest.mark.parametrize("name", ["validation", "valid", "dev"])
@pytest.mark.parametrize("splits", [("train", "test"), ("train",)])
def test_a_validation_split_in_the_data_is_used_and_reported(
    tmp_path: Path, name: str, splits: tuple[str, ...]
) -> None:
    for split in (*splits, name):
        (tmp_path / f"{split}.csv").write_text(split_texts(split, 40 if split == "train" else 10))

    data = load_data(str(tmp_path))

    assert data.validation is not None
    assert data.validation.texts == [f"{name} row {i}" for i in range(10)]
    assert data.validation.labels.tolist() == [0, 1] * 5
    assert all(text.startswith("train") for text in data.train.texts)
    assert data.notes[0] == f"validation on the 10 rows of {tmp_path}/{name}.csv"
    assert (len(data.train), len(data.test)) == ((40, 10) if "test" in splits else (36, 4))


def test_a_validation_split_saved_by_datasets_is_kept_apart(tmp_path: Path) -> None:
    splits = {name: saved_dataset([0, 1] * 5, ["a", "b"]) for name in ("train", "validation", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")

    data = load_data(str(tmp_path / "saved"))

    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (10, 10, 10)


def labelled(path: Path, labels: list[str]) -> Path:
    path.write_text("text,label\n" + "".join(f'text {i},"{label}"\n' for i, label in enumerate(labels)))
    return path


def test_a_column_of_numbers_to_predict_is_refused_in_one_line(tmp_path: Path) -> None:
    path = labelled(tmp_path / "scores.csv", [str(i / 2) for i in range(400)])

    with pytest.raises(
        UserError,
        match=r"400 different labels in 400 rows; is the label column free text, or a number to predict",
    ):
        load_data(str(path))


@pytest.mark.parametrize(
    ("labels", "note"),
    [
        (["0.5", "1.5", "2"] * 8, "labels look like numbers to predict (0.5, 1.5, 2): each value is"),
        (["a,b", "b", "c"] * 8, "labels such as 'a,b' look like lists: each combination is"),
        (["red|big", "red|small", "blue"] * 8, "labels such as 'red|big' look like lists: each"),
        (
            [f"kind {i}" for i in range(20)] * 4,
            "20 different labels in 80 rows: few rows to learn each from; is",
        ),
    ],
)
def test_labels_that_hardly_look_like_classes_are_noted(tmp_path: Path, labels: list[str], note: str) -> None:
    assert load_data(str(labelled(tmp_path / "rows.csv", labels))).notes[0].startswith(note)


@pytest.mark.parametrize(
    "labels", [["1", "2", "3"], ["World", "Sci/Tech"], ["Paris, Texas", "Rome, Italy"], ["1.0", "2.0"]]
)
def test_labels_that_are_classes_are_not_doubted(tmp_path: Path, labels: list[str]) -> None:
    [note] = load_data(str(labelled(tmp_path / "rows.csv", labels * 10))).notes
    assert note.startswith("no test rows")


def test_too_few_rows_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"two.csv: 2 rows leave none for validation and test; at least 3 rows of each label are needed"
    ):
        load_data(str(labelled(tmp_path / "two.csv", ["a", "b"])))


def test_a_file_of_another_kind_and_a_name_of_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "news.xml").write_text("<news/>")

    with pytest.raises(UserError, match=r"news.xml: must end in .csv, .tsv, .jsonl, .json, .parquet; save a"):
        load_data(str(tmp_path / "news.xml"))
    with pytest.raises(UserError, match=r"--dataset ag_mews: no such dataset; did you mean ag_news\?; use ag_news"):
        load_data("ag_mews")


@pytest.mark.parametrize(
    "name", ["data/my.csv", "my.tsv", "a/b/c", "nodir/", "./my_data", "~/no such", "owner/news.parquet"]
)
def test_a_missing_file_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(UserError, match=rf"^--dataset {re.escape(name)}: no such file or folder$"):
        load_data(name)


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5])
def test_split_rows_is_complete_disjoint_and_stratified(fraction: float) -> None:
    labels = np.random.default_rng(0).choice(4, size=1000, p=[0.5, 0.3, 0.15, 0.05])

    train, validation = split_rows(labels, fraction, seed=42)

    assert np.sort(np.concatenate([train, validation])).tolist() == list(range(1000))
    assert (np.diff(train) > 0).all()
    assert (np.diff(validation) > 0).all()
    for label in range(4):
        assert (labels[validation] == label).sum() == round((labels == label).sum() * fraction)


def test_split_rows_keeps_a_row_of_every_label_for_training() -> None:
    train, validation = split_rows(np.array([0, 0, 1, 2, 2, 2]), 0.9, seed=0)

    labels = np.array([0, 0, 1, 2, 2, 2])
    assert set(labels[train].tolist()) == {0, 1, 2}
    assert set(labels[validation].tolist()) == {0, 2}


@pytest.mark.parametrize(
    ("file", "content", "labels", "cleaning"),
    [
        ("train.csv", '"3","Oil &amp; gas","prices\\\\rise"\n', ["oil", "gas", "coal"], "none"),
        ("train.csv", "".join(f'"{i}","a","b"\n' for i in (1, 2, 3, 4)), [], "news"),
        ("train.csv", '"1","a","b"\n"2","a","b"\n', [], "none"),
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


def headless(path: Path, classes: Sequence[int], copies: int = 5) -> Path:
    path.write_text("".join(f'"{one}","title {i}","text {i}"\n' for i in range(copies) for one in classes))
    return path


@pytest.mark.parametrize("classes", [[1, 2], [0, 1], [1, 2, 3, 4, 5], [2, 3, 4], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("bad_rows", ["stop", "skip"])
def test_a_file_without_a_header_keeps_its_own_classes(tmp_path: Path, classes: list[int], bad_rows: str) -> None:
    data = load_data(str(headless(tmp_path / "rows.csv", classes)), LoadOptions(bad_rows=bad_rows))

    assert data.label_names == [str(one) for one in classes]
    assert len(data.train) + len(data.test) == 5 * len(classes)
    assert default_cleaning(str(tmp_path / "rows.csv"), data.label_names) == "none"
    assert "rows.csv has no header line, so it was read as class, title and description" in data.notes[-1]
    assert "give it a header such as label,text, or a classes.txt next to it" in data.notes[-1]


def test_two_fields_are_not_ag_news_layout(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("".join(f"{one},text {i}\n" for i in range(5) for one in (1, 2, 3, 4)))
    assert load_data(str(tmp_path / "rows.csv")).label_names == ["1", "2", "3", "4"]


def test_a_header_that_numbers_its_columns_is_not_taken_for_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("0,1\n" + "".join(f"{i % 2},text {i}\n" for i in range(20)))

    with pytest.raises(UserError, match=r"the header only numbers the columns: 0, 1; name yours with --text_column"):
        load_data(str(path))
    assert load_data(str(path), LoadOptions(columns=Columns("1", "0"))).label_names == ["0", "1"]


def test_ids_in_front_of_rows_without_a_header_are_doubted_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("".join(f"{i},text {i},pos\n" for i in range(1, 30)))
    with pytest.raises(
        UserError, match=r"29 different labels in 29 rows.*rows.csv has no header line.*give it a header"
    ):
        load_data(str(tmp_path / "rows.csv"))


@pytest.mark.parametrize("first", ["-1,poor", "0.0,poor", "neg,a poor lamp indeed"])
def test_a_first_row_in_place_of_a_header_is_called_one(tmp_path: Path, first: str) -> None:
    (tmp_path / "rows.csv").write_text(f"{first}\n1,fine\n")
    with pytest.raises(UserError, match=r"no column text .* \(the first line must be a header such as text,label\)"):
        load_data(str(tmp_path / "rows.csv"))


@pytest.mark.parametrize(
    ("cells", "names"),
    [
        ([1, 1.0, 0, 0.0], ["0", "1"]),
        ([True, False], ["False", "True"]),
        ([-1, 0, 1], ["-1", "0", "1"]),
        ([0.5, 1.5], ["0.5", "1.5"]),
    ],
)
def test_labels_mean_the_same_in_every_format(tmp_path: Path, cells: list[Any], names: list[str]) -> None:
    rows = [(f"text {i}", cell) for i, cell in enumerate(cells * 6)]
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"{text},{cell}\n" for text, cell in rows))
    (tmp_path / "lower.csv").write_text("text,label\n" + "".join(f"{text},{cell}\n".lower() for text, cell in rows))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": t, "label": c}) + "\n" for t, c in rows))
    labels = [cell for _, cell in rows]
    table = pyarrow.table({"text": [text for text, _ in rows], "label": labels})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")

    found = [load_data(str(tmp_path / name)) for name in ("rows.csv", "lower.csv", "rows.jsonl", "rows.parquet")]

    assert [data.label_names for data in found] == [names] * 4
    assert all(texts_and_names(data) == texts_and_names(found[0]) for data in found)


@pytest.mark.parametrize(
    ("cell", "labels"),
    [
        ('["a", "b"]', ["a", "b"]),
        ("['a', 'b']", ["a", "b"]),
        ("('a', 'b')", ["a", "b"]),
        ("('a',)", ["a"]),
        ("{'b', 'a'}", ["a", "b"]),
        ("set()", []),
        ("frozenset({'a'})", ["a"]),
        ("['a' 'b']", ["a", "b"]),
        ("[1 2]", ["1", "2"]),
        ("a; b", ["a", "b"]),
        ("(other)", ["(other)"]),
    ],
)
def test_several_labels_are_read_as_programs_write_them(cell: str, labels: list[str]) -> None:
    assert MULTI_LABEL.read_label(cell) == tuple(labels)


@pytest.mark.parametrize(
    "cell", ["['a'", "('a', 'b'", "{'a': 1}", "array(['a'], dtype=object)", "[np.str_('a')]", "['a' ... 'z']"]
)
def test_a_broken_list_of_labels_is_no_label(cell: str) -> None:
    with pytest.raises(UnusableRow, match="list"):
        MULTI_LABEL.read_label(cell)


@pytest.mark.parametrize(
    ("labels", "note"),
    [
        (
            ["Pos", "pos", "neg"],
            "labels that only differ in spelling are trained as classes of their own: 'Pos', 'pos'",
        ),
        (["01", "1", "2"], "labels that only differ in spelling are trained as classes of their own: '01', '1'"),
        (["pos", "pos\u200b", "neg"], r"labels that only differ in spelling .*: 'pos', 'pos\\u200b'"),
        (["caf\u00e9", "cafe\u0301", "bar"], "labels that only differ in spelling are trained"),
        (["nan", "neg", "pos"], "the label 'nan' .8 rows. looks like a missing value"),
        (["None", "neg", "pos"], "the label 'None' .8 rows. looks like a missing value"),
        (["-1", "0", "1", "2"], "the label -1 .8 rows. is trained as a class of its own"),
    ],
)
def test_labels_that_may_be_a_mistake_are_noted(tmp_path: Path, labels: list[str], note: str) -> None:
    assert re.match(note, load_data(str(labelled(tmp_path / "rows.csv", labels * 8))).notes[0])


@pytest.mark.parametrize("labels", [["good", "1.5"], ["1.5", "good"], ["inf", "1"], ["nan", "0.5x"]])
def test_labels_with_a_word_among_them_are_not_numbers_in_any_order(tmp_path: Path, labels: list[str]) -> None:
    notes = load_data(str(labelled(tmp_path / "rows.csv", labels * 8))).notes
    assert not any("numbers to predict" in note for note in notes)


def test_rows_left_out_never_take_most_of_a_class_away(tmp_path: Path) -> None:
    rows = [f"text {i},common" for i in range(40)] + ["rare one,rare", ",rare", ",rare"]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]))
    with pytest.raises(UserError, match=r"2 of the 3 rows with the label 'rare' cannot be used.*the text is empty"):
        load_data(str(tmp_path / "rows.csv"), LoadOptions(bad_rows="skip"))


def test_rows_of_a_class_in_another_encoding_are_not_left_out_in_silence(tmp_path: Path) -> None:
    good = "".join(f"text {i},en\n" for i in range(40)).encode()
    bad = "".join(f"caf\u00e9 {i},fr\n" for i in range(20)).encode("latin-1")
    (tmp_path / "rows.csv").write_bytes(b"text,label\n" + good + bad)
    with pytest.raises(UserError, match=r"20 of the 20 rows with the label 'fr' cannot be used"):
        load_data(str(tmp_path / "rows.csv"), LoadOptions(bad_rows="skip"))


def test_test_rows_without_labels_are_refused_with_what_to_do(tmp_path: Path) -> None:
    labelled(tmp_path / "train.csv", ["a", "b"] * 8)
    (tmp_path / "test.csv").write_text("id,text\n1,hello\n")
    with pytest.raises(UserError, match=r"no column label among id, text; .*test on others with --test_split, or give"):
        load_data(str(tmp_path))
    labelled(tmp_path / "test.csv", ["-1"] * 4)
    with pytest.raises(UserError, match=r"label '-1' is not one of the training labels a, b; if these rows have no"):
        load_data(str(tmp_path))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_the_shards_of_a_split_are_read_as_one(tmp_path: Path, suffix: str) -> None:
    for number in range(2):
        table = pyarrow.table({"text": TEXTS[number::2], "label": ["a", "b"] * 5})
        path = tmp_path / f"train-{number:05}-of-00002{suffix}"
        if suffix == ".parquet":
            pyarrow.parquet.write_table(table, path)
        elif suffix == ".csv":
            path.write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in table.to_pylist()))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))

    data = load_data(str(tmp_path))
    assert sorted([*data.train.texts, *data.test.texts]) == sorted(TEXTS)
    alone = load_data(str(tmp_path / f"train-00000-of-00002{suffix}"))
    assert alone.notes[0].startswith(f"the file train-00000-of-00002{suffix} is one of 2 shards; --dataset")
    (tmp_path / f"train-00001-of-00002{suffix}").unlink()
    with pytest.raises(UserError, match=r"is not one file, nor all shards in one format"):
        load_data(str(tmp_path))


def test_a_split_in_two_formats_is_refused(tmp_path: Path) -> None:
    labelled(tmp_path / "train.csv", ["a", "b"] * 8)
    (tmp_path / "train.jsonl").write_text('{"text": "x", "label": "a"}\n')
    with pytest.raises(UserError, match=r"of the split train it has train.csv, train.jsonl, which is not one file"):
        load_data(str(tmp_path))


def test_parquet_written_by_datasets_keeps_its_class_names(tmp_path: Path) -> None:
    saved_dataset([1, 0] * 10, ["negative", "positive"]).to_parquet(tmp_path / "train.parquet")
    data = load_data(str(tmp_path))
    assert data.label_names == ["negative", "positive"]
    assert data.train.labels[0] == 1
    saved_dataset([1, 0, -1, 1] * 5, ["negative", "positive"]).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"row 3: label None must be a name"):
        load_data(str(tmp_path))


def test_a_number_that_training_cannot_compute_with_is_no_label() -> None:
    with pytest.raises(UnusableRow, match=r"label '1e300' is out of range: must be between -1e18 and 1e18"):
        REGRESSION.read_label("1e300")


def test_classes_txt_decides_what_is_known_of_a_single_file(tmp_path: Path) -> None:
    config = TrainConfig(dataset=str(headless(tmp_path / "rows.csv", [1, 2])))
    before = source_file(tmp_path, config)
    (tmp_path / "classes.txt").write_text("bad\ngood\n")
    assert source_file(tmp_path, config) != before
