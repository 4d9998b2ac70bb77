"""Parts of a file are the same from wherever they are read."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from common import row_parts, text_files
from common.errors import UserError
from common.row_parts import ParquetParts, PartReader, open_parts
from common.text_files import Place


def opened(path: Path, part_rows: int = 7) -> PartReader:
    return open_parts(path.name, path.suffix, path.open("rb"), "text", part_rows)


def all_parts(reader: PartReader) -> list[tuple[Place, list[str | None], dict[int, str]]]:
    place, found = Place(), []
    while (part := reader.read(place)).texts:
        found.append((place, part.texts, part.problems))
        place = part.end
    return found


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    """The same 50 texts in each format."""
    texts = [f'text {number}, with\nlines and "quotes" é' for number in range(50)]
    quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
    files = {name: tmp_path / f"rows.{name}" for name in ("csv", "tsv", "jsonl", "parquet")}
    files["csv"].write_text(
        "\ufeffid,text\r\n" + "".join(f"{i},{text}\r\n\n" for i, text in enumerate(quoted)), newline=""
    )
    files["tsv"].write_text("text\tid\n" + "".join(f"{text}\t{i}\n" for i, text in enumerate(quoted)))
    files["jsonl"].write_text("\n\n".join(json.dumps({"id": i, "Text": text}) for i, text in enumerate(texts)))
    table = pyarrow.table({"id": range(50), "text": texts})
    pyarrow.parquet.write_table(table, files["parquet"], row_group_size=11)
    return files


@pytest.mark.parametrize("name", ["csv", "tsv", "jsonl", "parquet"])
def test_a_part_is_the_same_from_a_reader_that_begins_there(paths: dict[str, Path], name: str) -> None:
    expected = all_parts(opened(paths[name]))
    assert [text for _, texts, _ in expected for text in texts] == [
        f'text {number}, with\nlines and "quotes" é' for number in range(50)
    ]
    assert [place.rows for place, _, _ in expected] == list(range(0, 50, 7))

    reader = opened(paths[name])
    shuffled = random.Random(0).sample(expected, len(expected))
    for place, texts, _ in shuffled:
        assert reader.read(place).texts == texts


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_a_part_of_utf_16_is_the_same_from_a_reader_that_begins_there(
    paths: dict[str, Path], name: str, encoding: str
) -> None:
    # One byte of each of these characters is that of a line feed; the last one has two.
    text = paths[name].read_bytes().decode("utf-8-sig").replace("é", "🐢\u010a\u0a10\u0a0a").replace("\r\n", "\r")
    paths[name].write_bytes(("\ufeff" + text.replace("\\u00e9", "🐢\u010a\u0a10\u0a0a")).encode(encoding))
    expected = all_parts(opened(paths[name]))
    assert [text for _, texts, _ in expected for text in texts] == [
        f'text {number}, with\nlines and "quotes" 🐢\u010a\u0a10\u0a0a' for number in range(50)
    ]
    for place, texts, _ in reversed(expected):
        assert opened(paths[name]).read(place).texts == texts


def test_a_quote_that_is_never_closed_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LONGEST_RECORD", 1000)
    path = tmp_path / "rows.csv"
    path.write_text('text\n"never closed\n' + "".join(f"text {number}\n" for number in range(300)) + '"nor this\n')
    parts = all_parts(opened(path))

    texts = [text for _, some, _ in parts for text in some]
    assert texts == [None, *(f"text {number}" for number in range(300)), None]
    problems = [problem for _, _, some in parts for problem in some.values()]
    assert [problem.partition(":")[0] for problem in problems] == ["rows.csv line 2", "rows.csv line 303"]


def test_long_documents_end_a_part_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_parts, "BYTES_PER_PART", 1000)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * 400}) + "\n" for _ in range(10)))

    assert {len(texts) for _, texts, _ in all_parts(opened(path, 100))} == {3, 1}


def test_a_file_that_has_no_line_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LONGEST_RECORD", 1000)
    with pytest.raises(UserError, match="line 1: longer than"):
        open_parts("rows.jsonl", ".jsonl", io.BytesIO(b"x" * 5000), "text")


def test_lines_that_are_no_csv_fill_parts_like_good_rows(tmp_path: Path) -> None:
    # A quote escaped by a backslash, as MySQL writes it, makes every line of a file unusable.
    path = tmp_path / "rows.csv"
    path.write_text("text,id\n" + '"say \\"hi\\" now",2\n' * 50 + "fine,3\n")
    parts = all_parts(opened(path))

    assert [len(texts) for _, texts, _ in parts] == [7] * 7 + [2]
    assert parts[-1][1] == [None, "fine"]
    assert parts[-1][2][0].startswith("rows.csv line 51: not valid CSV")


def test_rows_before_a_place_in_a_large_row_group_are_passed_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, taken, take = tmp_path / "rows.parquet", [], ParquetParts._take
    table = pyarrow.table({"text": [f"row {number}" for number in range(1000)]})
    pyarrow.parquet.write_table(table, path, row_group_size=1000)

    def noted(reader: ParquetParts, num_rows: int) -> pyarrow.Table:
        taken.append(num_rows)
        return take(reader, num_rows)

    monkeypatch.setattr(ParquetParts, "_take", noted)
    part = opened(path).read(Place(995, 0, 995))

    assert part.texts == [f"row {number}" for number in range(995, 1000)]
    assert max(taken) <= 7


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_text_in_several_columns_and_a_second_text_are_read_from_every_format(tmp_path: Path, suffix: str) -> None:
    rows = [{"Title": "Oil", "body": "prices rise", "reply": "No."}, {"Title": "", "body": "Goal!", "reply": "Yes."}]
    path = tmp_path / f"rows{suffix}"
    match suffix:
        case ".csv":
            path.write_text("Title,body,reply\nOil,prices rise,No.\n,Goal!,Yes.\n")
        case ".jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        case _:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)

    with path.open("rb") as file:
        single = open_parts(path.name, suffix, file, "title,body").read(Place())
        pairs = open_parts(path.name, suffix, file, "title,body", pair_column="Reply").read(Place())

    assert single.texts == ["Oil prices rise", "Goal!"]
    assert pairs.texts == [("Oil prices rise", "No."), ("Goal!", "Yes.")]
