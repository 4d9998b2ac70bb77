"""Rows of text from files: CSV, TSV, JSON lines, Parquet; a row that cannot be used is named by its file and line."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common.delimited import Columns, check_utf8, find_layout, utf8_bytes
from common.errors import UserError, first_line

AG_NEWS_LABELS = ["World", "Sports", "Business", "Sci/Tech"]
FORMATS = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
MOST_NAMED = 10
NAME_COLUMNS = "name yours with --text_column and --label_column"

# A row before its label is known to be one of the classes: where it stands, its text, its label as found.
FoundRow = tuple[str, str, Any]
UsableRow = tuple[str, str]  # text, label


class UnusableRow(ValueError):
    """Why a row cannot be used."""


class Reading:
    """Which columns are read, and what becomes of rows that cannot be used: the first ends the reading, or all are left
    out and counted.

    Args:
        columns: of the text and the label.
        skip: leave out rows that cannot be used.
    """

    def __init__(self, columns: Columns, *, skip: bool) -> None:
        self.columns = columns
        self.skip = skip
        self.unused: dict[str, None] = {}  # names of columns, in the order in which they were met
        self.count = 0
        self.named: list[str] = []

    def reject(self, where: str, why: str, rows: int = 1) -> None:
        """Leave rows out.

        Raises:
            UserError: none may be.
        """
        if not self.skip:
            raise UserError(f"{where}: {why}")
        self.count += rows
        if len(self.named) < MOST_NAMED:
            self.named.append(f"{where}: {why}")

    def usable(self, what: str, rows: Iterable[FoundRow], labels: Collection[str] = ()) -> list[UsableRow]:
        """The rows that can be used.

        Args:
            what: the file or split they are from.
            rows: as they are read; whoever reads them rejects what is no row.
            labels: of which each label must be one; none given, any may be.

        Raises:
            UserError: there are none, or those left out are more than those that remain.
        """
        before, usable = self.count, []
        for where, text, label in rows:
            try:
                usable.append(_checked(text, label, labels))
            except UnusableRow as error:
                self.reject(where, str(error))
        left_out = self.count - before
        if left_out > len(usable):
            raise UserError(
                f"--dataset {what}: {left_out:,} of {left_out + len(usable):,} rows cannot be used, which is more than "
                f"half; {self.named[0]}"
            )
        if not usable:
            raise UserError(f"--dataset {what}: holds no rows")
        return usable

    def find_columns(self, where: str, found: Sequence[str]) -> tuple[str, str]:
        """The names of the text's and the label's column as they are written here.

        Raises:
            UserError: one is not there.
        """
        try:
            text, label = self.columns.among(found)
        except ValueError as error:
            raise UserError(f"{where}: {error}; {NAME_COLUMNS}") from error
        self.unused |= dict.fromkeys(name for i, name in enumerate(found) if i not in (text, label))
        return found[text], found[label]

    @property
    def notes(self) -> list[str]:
        """Columns that were not read; last how many rows were left out, and which came first."""
        unused = [f"columns that are not used: {', '.join(self.unused)}"] if self.unused else []
        more = "" if self.count <= len(self.named) else " ..."
        left_out = f"{self.count:,} rows that cannot be used were left out: {'; '.join(self.named)}{more}"
        return [*unused, *([left_out] if self.count else [])]


def _checked(text: Any, label: Any, labels: Collection[str]) -> UsableRow:
    if not isinstance(text, str) or not text.strip():
        raise UnusableRow(f"the text is {'empty' if isinstance(text, str) else 'no text'}")
    if isinstance(label, bool | float) or not isinstance(label, str | int) or not str(label).strip():
        raise UnusableRow(f"label {label!r} must be a name or a whole number")
    if isinstance(label, int) and label < 0:
        raise UnusableRow(f"label {label} is out of range (unlabelled rows cannot be trained on)")
    name = str(label).strip()
    if labels and name not in labels:
        raise UnusableRow(f"label {name!r} is none of the training labels {', '.join(list(labels)[:10])}")
    return text, name


def read_file(path: Path, reading: Reading, label_names: Sequence[str] | None = None) -> Iterator[FoundRow]:
    """The rows of a file, one by one.

    Args:
        path: ends in one of :data:`FORMATS`.
        reading: which columns are read; told what is no row.
        label_names: what the numbers of AG News' layout stand for.

    Raises:
        UserError: the file cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UserError(f'--dataset {path}: must end in {", ".join(FORMATS)}; save a spreadsheet as "CSV UTF-8"')
    try:
        if suffix in (".csv", ".tsv"):
            yield from _read_csv(path, reading, label_names or AG_NEWS_LABELS)
        else:
            yield from (_read_parquet if suffix == ".parquet" else _read_json_lines)(path, reading)
    except OSError as error:
        raise UserError(f"--dataset {path}: {error.strerror or error}") from error


def _lines(path: Path) -> list[str]:
    """A file's lines with their ends; what is not UTF-8 stands in them as surrogates."""
    try:
        data = utf8_bytes(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    return [line.decode(errors="surrogateescape") for line in data.splitlines(keepends=True)]


def _check_encoding(text: str) -> None:
    try:
        check_utf8(text)
    except ValueError as error:
        raise UnusableRow(str(error)) from error


def _read_csv(path: Path, reading: Reading, label_names: Sequence[str]) -> Iterator[FoundRow]:
    lines = _lines(path)
    first = next((i for i, line in enumerate(lines) if line.strip()), None)
    if first is None:
        return
    try:
        layout = find_layout(lines[first], reading.columns)
    except ValueError as error:
        raise UserError(f"{path} line {first + 1}: {error}; {NAME_COLUMNS}") from error
    reading.unused |= dict.fromkeys(layout.unused)
    if layout.places:
        first += 1
    for line, fields in _records(path, lines, first, layout.separator, reading):
        if not fields:
            continue
        where = f"{path} line {line}"
        try:
            _check_encoding("".join(fields))
            text, label = _headed_row(fields, layout.places) if layout.places else _ag_row(fields, label_names)
        except UnusableRow as error:
            reading.reject(where, str(error))
        else:
            yield where, text, label


def _records(
    path: Path, lines: Sequence[str], start: int, separator: str, reading: Reading
) -> Iterator[tuple[int, list[str]]]:
    """The number of each record's last line, and its fields.

    A record that cannot be parsed costs its first line alone: a stray quote would take good rows after it along.
    """
    while start < len(lines):
        rest = (lines[i] for i in range(start, len(lines)))
        reader, done = csv.reader(rest, delimiter=separator, strict=True), 0
        try:
            for fields in reader:
                done = reader.line_num
                yield start + done, fields
            return
        except csv.Error as error:
            start += done + 1
            reading.reject(f"{path} line {start}", f"not valid CSV ({error})")


def in_ag_news_layout(path: Path) -> bool:
    """Whether a file begins as AG News' own do: no header, but a class number and what it belongs to."""
    if path.suffix != ".csv":
        return False
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
            fields = next(csv.reader(lines), [])
    except (OSError, csv.Error):
        return False
    return len(fields) > 1 and fields[0].strip().isdecimal()


def _headed_row(fields: list[str], columns: tuple[int, int]) -> tuple[str, str]:
    if len(fields) <= max(columns):
        raise UnusableRow(f"{len(fields)} fields, but the header names text and label further right")
    return fields[columns[0]], fields[columns[1]]


def _ag_row(fields: list[str], names: Sequence[str]) -> tuple[str, str]:
    if len(fields) < 2:
        raise UnusableRow(f'one field; rows without a header are "class 1-{len(names)}","title","description"')
    label = fields[0].strip()
    if not label.isdecimal():
        raise UnusableRow(
            f'label {label!r} is no number; rows without a header are "class 1-{len(names)}","title","description"'
        )
    if not 1 <= int(label) <= len(names):
        raise UnusableRow(f"label {label} is out of range 1 to {len(names)}")
    return " ".join(part for part in fields[1:] if part), names[int(label) - 1]


def _read_json_lines(path: Path, reading: Reading) -> Iterator[FoundRow]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            text, label = _json_row(line, reading)
        except UnusableRow as error:
            reading.reject(where, str(error))
        else:
            yield where, text, label


def _json_row(line: str, reading: Reading) -> tuple[Any, Any]:
    _check_encoding(line)
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UnusableRow(f"not valid JSON ({error.msg}); one object a line is read") from error
    if not isinstance(row, dict):
        raise UnusableRow("must be an object with text and label")
    try:
        text, label = reading.columns.among(names := list(row))
    except ValueError as error:
        raise UnusableRow(f"{error}; {NAME_COLUMNS}") from error
    reading.unused |= dict.fromkeys(name for i, name in enumerate(names) if i not in (text, label))
    return row[names[text]], row[names[label]]


def _read_parquet(path: Path, reading: Reading) -> Iterator[FoundRow]:
    import pyarrow
    import pyarrow.parquet

    unreadable = (pyarrow.ArrowException, OSError, UnicodeDecodeError)
    try:
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
        found = file.schema_arrow.names
    except unreadable as error:
        raise UserError(f"{path}: no Parquet file that can be read ({first_line(error)})") from error
    columns = list(reading.find_columns(str(path), found))
    first = 1
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        try:
            table = file.read_row_group(group, columns=columns)
            texts, labels = (table[column].to_pylist() for column in columns)
        except unreadable as error:
            reading.reject(f"{path} rows {first} to {first + rows - 1}", f"cannot be read ({first_line(error)})", rows)
        else:
            for number, (text, label) in enumerate(zip(texts, labels, strict=True), start=first):
                yield f"{path} row {number}", text, label
        first += rows
