from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.errors import UserError
from common.problem_types import MULTI_LABEL
from common.rows import SAMPLE_NEWS, Columns, find_rows, read_labelled_rows

LABELS = ["World", "Sports", "Business", "Sci/Tech"]


def test_title_and_description_are_joined_and_classes_count_from_one(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text('"3","Oil","Prices rise"\n"1","Talks",""\n')
    rows = read_labelled_rows(tmp_path, LABELS)
    assert rows.texts == ["Oil Prices rise", "Talks"]
    assert rows.targets == [2, 0]
    assert rows.name == str(tmp_path / "test.csv")


def test_a_folder_is_measured_on_its_test_rows_and_its_training_texts_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text('"1","test",""\n')
    (tmp_path / "train.csv").write_text('"2","train",""\n')
    rows = read_labelled_rows(tmp_path, LABELS)
    assert (rows.texts, rows.training_texts) == (["test"], ["train"])


def test_a_header_and_json_lines_name_their_labels(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("label,text\nSports,Goal!\nWorld,Talks\n")
    (tmp_path / "rows.jsonl").write_text(
        '{"text": "Goal!", "label": "Sports"}\n\n{"text": "Talks", "label": "World"}\n'
    )
    for name in ("rows.csv", "rows.jsonl"):
        rows = read_labelled_rows(tmp_path / name, LABELS)
        assert (rows.texts, rows.targets) == (["Goal!", "Talks"], [1, 0])
        assert rows.training_texts == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", "Kategorie;Titel\nSports;Goal!\nWorld;Talks, talks\n".encode("utf-8-sig")),
        ("rows.tsv", "Titel\tKategorie\nGoal!\tSports\nTalks, talks\tWorld\n".encode("utf-16")),
        ("rows.jsonl", b'{"Titel": "Goal!", "Kategorie": "Sports"}\n{"Titel": "Talks, talks", "Kategorie": "World"}\n'),
    ],
)
def test_files_are_read_as_training_reads_them(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    rows = read_labelled_rows(tmp_path / name, LABELS, columns=Columns("titel", "kategorie"))
    assert (rows.texts, rows.targets) == (["Goal!", "Talks, talks"], [1, 0])


def test_texts_of_any_length_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f'text,label\n"{"word " * 40_000}",World\n')
    assert len(read_labelled_rows(tmp_path / "rows.csv", LABELS).texts[0]) == 200_000


def test_a_limit_takes_rows_evenly(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"{i},World\n" for i in range(10)))
    assert read_labelled_rows(tmp_path / "rows.csv", LABELS, 3).texts == ["0", "3", "6"]
    assert len(read_labelled_rows(tmp_path / "rows.csv", LABELS, 99).texts) == 10


def test_the_models_own_dataset_comes_before_the_sample(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text('"1","test",""\n')
    assert find_rows(str(tmp_path)) == tmp_path
    assert find_rows("fancyzhx/ag_news") == find_rows(None) == SAMPLE_NEWS
    assert read_labelled_rows(SAMPLE_NEWS, LABELS).texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "rows.csv",
            "text,label\nGoal!,Cricket\n",
            "rows.csv line 2: label 'Cricket' is not one of the model's labels",
        ),
        ("rows.csv", '"5","Goal!",""\n', "rows.csv line 1: label 5 is out of range 1 to 4"),
        ("rows.csv", "Goal!\n", "rows.csv line 1: no column text and no column label among Goal!; the columns must"),
        ("rows.csv", "text,label\nGoal!\n", "rows.csv line 2: 1 fields"),
        ("rows.csv", "text,label\n", "holds no labelled text"),
        ("rows.jsonl", "{\n", "rows.jsonl line 1: not valid JSON"),
        ("rows.jsonl", '{"text": 1, "label": "World"}\n', "rows.jsonl line 1: the text is not a string"),
        (
            "rows.jsonl",
            '{"headline": "Goal!", "label": "World"}\n',
            "no column text among headline, label; the columns",
        ),
        ("rows.jsonl", "[1]\n", "rows.jsonl line 1: must be an object with text and label"),
        ("rows.txt", "Goal!\n", "must end in .csv, .tsv, .jsonl, .json"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_with_file_and_line(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=r"^[^\n]*$") as refusal:
        read_labelled_rows(tmp_path / name, LABELS)
    assert message in str(refusal.value)


def test_bytes_that_are_no_text_and_nothing_at_all_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"text,label\n\xff,World\n")
    with pytest.raises(UserError, match="not UTF-8"):
        read_labelled_rows(tmp_path / "rows.csv", LABELS)
    with pytest.raises(UserError, match="no such file or folder"):
        read_labelled_rows(tmp_path / "none", LABELS)
    with pytest.raises(UserError, match=r"holds no test\.csv"):
        read_labelled_rows(Path(os.devnull).parent, LABELS)


def test_a_column_of_a_label_that_holds_neither_0_nor_1_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,sun,rain\nhello,1,0\nfine,2,0\n")

    with pytest.raises(UserError, match=r"rows\.csv line 3: '2' in the column sun must be 0 or 1") as refused:
        read_labelled_rows(path, ["sun", "rain"], columns=Columns("text", "sun,rain"), problem_type=MULTI_LABEL)

    assert refused.value.code == "row-unusable"
