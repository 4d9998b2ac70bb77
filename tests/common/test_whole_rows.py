"""A row is used as a whole or not at all, by one rule for training, evaluation and scoring."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from common.errors import UserError
from common.row_parts import open_parts
from common.rows import Columns, Reading, read_file, read_labelled_rows
from common.text_files import Place

GOOD = "".join(f"fine thing {i},pos,web\npoor thing {i},neg,web\n" for i in range(5))


def trained(path: Path) -> tuple[list[str], list[str]]:
    """The texts, and the reasons why other rows cannot be used."""
    reading = Reading(Columns(), skip=True)
    texts = [text for _, text, _ in read_file(path, reading)]
    return texts, [named.partition(": ")[2] for named in reading.named]


def scored(path: Path, text_column: str = "text") -> tuple[list[str], list[str]]:
    part = open_parts(path.name, path.suffix, io.BytesIO(path.read_bytes()), text_column).read(Place())
    return [str(text) for text in part.texts if text is not None], [
        problem.partition(": ")[2] for problem in part.problems.values()
    ]


def both(path: Path, content: str | bytes) -> tuple[list[str], list[str]]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    texts, problems = trained(path)
    assert (texts, problems) == scored(path)
    return texts, problems


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nice, warm,pos,\n", "4 fields, but the header has 3; a text with ',' in it needs quotes"),
        ("nice, warm,pos,web\n", "4 fields, but the header has 3"),
        ("nice,pos\n", "2 fields, but the header has 3"),
        ("text,label,source\n", "repeats the header"),
        ('\ufeffText, "label" ,SOURCE\n', "repeats the header"),
    ],
)
def test_a_row_that_does_not_fit_the_header_is_used_by_nobody(tmp_path: Path, line: str, problem: str) -> None:
    texts, [found] = both(tmp_path / "rows.csv", f"text,label,source\n{GOOD}{line}last one,pos,web\n")

    assert len(texts) == 11
    assert found.startswith(problem)
    with pytest.raises(UserError, match=problem.partition(";")[0]):
        read_labelled_rows(tmp_path / "rows.csv", ["neg", "pos"])


def test_a_header_among_json_lines_is_used_by_nobody(tmp_path: Path) -> None:
    row = '{"text": "fine", "label": "pos"}\n'
    texts, [problem] = both(tmp_path / "rows.jsonl", row * 3 + '{"text": "text", "label": "label"}\n')
    assert texts == ["fine"] * 3
    assert problem.startswith("repeats the header")


def test_a_separator_at_the_end_of_every_line_is_no_field(tmp_path: Path) -> None:
    texts, problems = both(tmp_path / "rows.csv", "text,label\nfine,pos,\npoor,neg,\nodd,pos\n")
    assert texts == ["fine", "poor"]
    assert problems == ["2 fields, but the header has 2 and the first row 3; a text with ',' in it needs quotes"]


def test_text_in_columns_without_a_name_makes_a_row_unusable(tmp_path: Path) -> None:
    texts, [problem] = both(tmp_path / "rows.csv", "label,text,,\nham,fine,,\nspam,win, now,\nham,short\n")
    assert texts == ["fine", "short"]
    assert problem == "text in a column that has no name in the header; a text with ',' in it needs quotes"


@pytest.mark.parametrize("header", ["text, label", '"text", "label"', "text,label"])
def test_a_space_behind_the_separator_is_no_part_of_a_field(tmp_path: Path, header: str) -> None:
    texts, problems = both(tmp_path / "rows.csv", f'{header}\n"one, two", "pos"\n"three", "neg"\n')
    assert (texts, problems) == (["one, two", "three"], [])
    labels = [label for _, _, label in read_file(tmp_path / "rows.csv", Reading(Columns(), skip=False))]
    assert labels == ["pos", "neg"]


@pytest.mark.parametrize("hint", ["sep=;", "SEP=;", '"sep=;"'])
def test_the_line_that_names_excels_separator_is_obeyed(tmp_path: Path, hint: str) -> None:
    assert both(tmp_path / "rows.csv", f"{hint}\r\ntext;label\r\na, b;pos\r\n") == (["a, b"], [])


@pytest.mark.parametrize("position", [0, 1500])
def test_a_nul_is_a_character_wherever_it_is(tmp_path: Path, position: int) -> None:
    texts, problems = both(tmp_path / "rows.csv", "text,label\n" + "filler,a\n" * position + "with\0nul,a\n")
    assert not problems
    assert texts[-1] == "with\0nul"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", "text,label,text\na,pos,b\n"),
        ("rows.tsv", "Text\tlabel\ttext\na\tpos\tb\n"),
        ("rows.jsonl", '{"text": "a", "label": "pos", "text": "b"}\n'),
        ("rows.jsonl", '{"text": "a", "label": "pos", "Text": "b"}\n'),
    ],
)
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=r"(columns|values) are named text; rename one$"):
        list(read_file(tmp_path / name, Reading(Columns(), skip=False)))
    try:
        texts, [problem] = scored(tmp_path / name)  # of JSON lines, each row has its own columns
    except UserError as error:
        texts, problem = [], str(error)
    assert not texts
    assert problem.endswith("are named text; rename one")


@pytest.mark.parametrize("names", [("text", "a", "a"), ("text", "text", "a")])
def test_a_column_that_is_twice_in_parquet_is_not_scored(tmp_path: Path, names: Sequence[str]) -> None:
    table = pyarrow.Table.from_arrays([["Shares fall"], ["x"], ["y"]], names=list(names))
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"two columns are called \w+; rename one$"):
        scored(tmp_path / "rows.parquet")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400", '{"deep": [1e400]}'])
def test_a_number_that_json_cannot_hold_is_not_turned_into_null(tmp_path: Path, number: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "a", "x": 1}}\n{{"text": "b", "x": {number}}}\n')
    texts, [problem] = scored(tmp_path / "rows.jsonl")
    assert texts == ["a"]
    assert problem.startswith("has a number that JSON cannot hold")


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.jsonl"])
def test_utf_16_is_read_by_training_and_by_scoring(tmp_path: Path, name: str) -> None:
    row = '{"text": "żółw, 🐢", "label": "pos"}\n' if name == "rows.jsonl" else '"żółw, 🐢"{}pos\n'
    header = "" if name == "rows.jsonl" else "text{}label\n"
    separator = "\t" if name == "rows.tsv" else ","
    content = (header + row * 1000).replace("{}", separator)
    assert both(tmp_path / name, content.encode("utf-16")) == (["żółw, 🐢"] * 1000, [])
    damaged = content.encode("utf-16") + b"\x3d\xd8\n\0"  # half a character, far from the beginning
    (tmp_path / name).write_bytes(damaged)
    for read in (trained, scored):
        with pytest.raises(UserError, match=f"{name}: UTF-16 text that is damaged at byte {len(damaged) - 4}; save it"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x1f\x8b\x08\0", "a gzip archive; unpack it"),
        (b"PK\x03\x04\0\0", "a zip archive or a spreadsheet"),
        ("text,label\n".encode("utf-32"), "UTF-32 text"),
        ("text,label\n".encode("utf-32-le"), "looks like UTF-32"),
        ("text,label\n".encode("utf-16-be"), "looks like UTF-16"),
        (bytes(range(256)) * 20, "not UTF-8 text, but bytes of another kind"),
        (b"PAR1....", "a Parquet file; name it .parquet"),
    ],
)
def test_a_file_that_is_not_text_is_called_what_it_is(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        trained(tmp_path / "rows.csv")
    with pytest.raises(UserError, match=message):
        scored(tmp_path / "rows.csv")


@pytest.mark.parametrize("content", ['[\n{"text": "a", "label": "b"}\n]\n', json.dumps([{"text": "a"}, {"text": "b"}])])
def test_a_json_array_is_named_with_what_to_do(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(UserError, match=r"JSON array.*each line must hold one object \(as pandas writes with"):
        list(read_file(tmp_path / "rows.json", Reading(Columns(), skip=False)))
