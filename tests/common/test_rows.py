"""Rows that cannot be used are left out when asked to, each counted, the first ones named; the others are all there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from common.errors import UserError
from training.data.dataset import LoadOptions, load_data

GOOD = [f"Report number {i} on something that happened" for i in range(20)]
TEST = "text,label\nA test,a\nAnother test,b\n"


def csv_line(number: int) -> str:
    return f'"{GOOD[number]}","{"ab"[number % 2]}"\n'


def write_csv(folder: Path, bad: dict[int, bytes]) -> list[str]:
    """Good rows, with each bad line in front of that of its number; returns the texts of the good ones."""
    lines = [b"text,label\n"]
    for number in range(len(GOOD)):
        lines += [bad[number]] if number in bad else []
        lines.append(csv_line(number).encode())
    (folder / "train.csv").write_bytes(b"".join([*lines, bad.get(len(GOOD), b"")]))
    (folder / "test.csv").write_text(TEST)
    return GOOD


CSV_LINES = {
    "too few fields": (b'"only one"\n', "1 fields, but the header has 2; a text with ',' in it needs quotes"),
    "too many fields": (
        b"Oil rises, traders say,a\n",
        "3 fields, but the header has 2; a text with ',' in it needs quotes",
    ),
    "empty text": (b'" ","a"\n', "the text is empty"),
    "empty label": (b'"A text",""\n', "the label is empty"),
    "stray quote": (b'"A "text","a"\n', "not valid CSV"),
    "quote never closed": (b'"A text,a\n', "not valid CSV"),
    "not UTF-8": ('"Un café","a"\n'.encode("latin-1"), "not UTF-8 text"),
}


@pytest.mark.parametrize("kind", CSV_LINES)
def test_a_bad_csv_line_costs_no_good_one(tmp_path: Path, kind: str) -> None:
    line, why = CSV_LINES[kind]
    texts = write_csv(tmp_path, {3: line, 4: line, 17: line})

    data = load_data(str(tmp_path), LoadOptions(bad_rows="skip"))

    assert data.train.texts == texts
    assert data.train.labels.tolist() == [0, 1] * 10
    assert data.left_out == 3
    # The header is line 1.
    for number in (5, 7, 21):
        assert f"{tmp_path}/train.csv line {number}: {why}" in data.notes[-1]
    assert data.notes[-1].startswith("3 rows that cannot be used were left out: ")


def test_a_file_torn_in_its_last_line_loses_that_line_alone(tmp_path: Path) -> None:
    texts = write_csv(tmp_path, {len(GOOD): b'"Report number 20 on some'})

    data = load_data(str(tmp_path), LoadOptions(bad_rows="skip"))

    assert data.train.texts == texts
    assert f"{tmp_path}/train.csv line 22: not valid CSV (unexpected end of data)" in data.notes[-1]


def test_a_record_over_several_lines_is_read_whole_beside_bad_ones(tmp_path: Path) -> None:
    write_csv(tmp_path, {2: b'"Two\nlines","a"\n', 5: b'"stray "quote","b"\n'})

    data = load_data(str(tmp_path), LoadOptions(bad_rows="skip"))

    assert data.train.texts == [*GOOD[:2], "Two\nlines", *GOOD[2:]]
    assert data.left_out == 1


def test_bad_json_lines_are_left_out(tmp_path: Path) -> None:
    good = [json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(GOOD)]
    bad = ['{"text": "torn', "[1]", '{"text": "no label"}', '{"text": 5, "label": 1}', '{"text": "x", "label": null}']
    (tmp_path / "train.jsonl").write_text("\n".join([*good[:7], *bad, *good[7:], '{"text": "x", "label": {}}']))
    (tmp_path / "test.jsonl").write_text("\n".join([*good[:4], '{"text": "another label", "label": 7}']))

    data = load_data(str(tmp_path), LoadOptions(bad_rows="skip"))

    assert data.train.texts == GOOD
    assert (len(data.test), data.left_out) == (4, 7)
    assert f"{tmp_path}/test.jsonl line 5: label '7' is not one of the training labels 0, 1" in data.notes[-1]


def test_only_the_first_ten_are_named_and_all_are_counted(tmp_path: Path) -> None:
    write_csv(tmp_path, dict.fromkeys(range(12), b'"only one"\n'))

    data = load_data(str(tmp_path), LoadOptions(bad_rows="skip"))

    assert data.left_out == 12
    assert data.notes[-1].count("1 fields, but the header has 2") == 10
    assert data.notes[-1].endswith(" ...")


def test_data_that_is_bad_for_the_most_part_is_refused_all_the_same(tmp_path: Path) -> None:
    bad = "".join(f'"only one {i}"\n' for i in range(21)).encode()
    write_csv(tmp_path, {0: bad})

    with pytest.raises(
        UserError, match=r"train\.csv: 21 of 41 rows cannot be used, .*more than half; .*csv line 2: 1 f"
    ):
        load_data(str(tmp_path), LoadOptions(bad_rows="skip"))


def test_good_data_is_the_same_either_way(tmp_path: Path) -> None:
    write_csv(tmp_path, {})

    skipping = load_data(str(tmp_path), LoadOptions(bad_rows="skip"))
    stopping = load_data(str(tmp_path))

    assert (skipping.train.texts, skipping.notes) == (stopping.train.texts, stopping.notes)
    assert skipping.left_out == 0


def parquet(path: Path) -> Path:
    labels = ["ab"[i % 2] for i in range(len(GOOD))]
    table = pyarrow.table({"text": GOOD, "label": labels})
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pyarrow.parquet.write_table(table, path, row_group_size=5, write_page_checksum=True, **plain)
    return path


def damage(path: Path, text: bytes) -> None:
    """Change a byte of what is stored as ``text``."""
    data = bytearray(path.read_bytes())
    data[data.index(text)] ^= 0x80
    path.write_bytes(data)


def test_a_parquet_row_group_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    damage(parquet(tmp_path / "train.parquet"), b"Report number 7 on")
    (tmp_path / "test.csv").write_text(TEST)

    data = load_data(str(tmp_path), LoadOptions(bad_rows="skip"))

    assert data.train.texts == [*GOOD[:5], *GOOD[10:]]
    assert data.left_out == 5
    assert f"{tmp_path}/train.parquet rows 6 to 10: cannot be read (" in data.notes[-1]
    with pytest.raises(UserError, match=r"train\.parquet rows 6 to 10: cannot be read"):
        load_data(str(tmp_path))


def saved_in_shards(folder: Path) -> Path:
    """Four shards of five rows."""
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])})
    columns = {"text": GOOD, "label": [i % 2 for i in range(len(GOOD))]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(folder, num_shards=4)
    return folder


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    "spoil", [cut, Path.unlink, lambda path: damage(path, b"Report number 7 on")], ids=["torn", "missing", "not UTF-8"]
)
def test_a_shard_that_cannot_be_read_is_named_by_its_file(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    folder = saved_in_shards(tmp_path / "saved")
    shard = folder / "data-00001-of-00004.arrow"
    spoil(shard)

    with pytest.raises(UserError, match=rf"^{shard}: cannot be read \("):
        load_data(str(folder))
    data = load_data(str(folder), LoadOptions(bad_rows="skip"))

    assert sorted(data.train.texts + data.test.texts) == sorted([*GOOD[:5], *GOOD[10:]])
    assert data.label_names == ["a", "b"]
    assert data.left_out == 5
    assert f"{shard}: cannot be read (" in data.notes[-1]


def test_a_saved_dataset_with_few_readable_shards_is_refused(tmp_path: Path) -> None:
    folder = saved_in_shards(tmp_path / "saved")
    for number in range(3):
        cut(folder / f"data-0000{number}-of-00004.arrow")

    with pytest.raises(UserError, match=r"3 of its shards cannot be read, and 1 can"):
        load_data(str(folder), LoadOptions(bad_rows="skip"))


def test_rows_left_out_are_counted_in_the_report_the_card_and_the_file(
    train_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_csv(tmp_path, {3: b'"only one"\n', 9: b'" ","a"\n'})
    flags = ["--dataset", tmp_path, "--max_train_rows", 0, "--batch_size", 8, "--epochs", 1, "--bad_rows", "skip"]

    code = train_here(*flags, "--output_dir", tmp_path / "model")

    note = "2 rows that cannot be used were left out: "
    assert code == 0
    assert note in capfd.readouterr().out
    [line] = (tmp_path / "model.run" / "bad_rows.jsonl").read_text().splitlines()
    assert json.loads(line)["rows_left_out"] == 2
    assert json.loads(line)["what"].startswith(note)
    assert note in (tmp_path / "model.run" / "report.html").read_text()
    assert "could not be used and were left out: 2." in (tmp_path / "model" / "README.md").read_text()
    assert json.loads((tmp_path / "model" / "metrics.json").read_text())["rows_left_out"] == 2
