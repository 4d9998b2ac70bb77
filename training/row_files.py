"""Rows of text from files: CSV, JSON lines, Parquet; a row that cannot be used is named by its file and line."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from training.errors import UserError, first_line

AG_NEWS_LABELS = ["World", "Sports", "Business", "Sci/Tech"]
FORMATS = (".csv", ".jsonl", ".json", ".parquet")
MOST_NAMED = 10

# A row before its label is known to be one of the classes: where it stands, its text, its label as found.
FoundRow = tuple[str, str, Any]
UsableRow = tuple[str, str]  # text, label


class UnusableRow(ValueError):
    """Why a row cannot be used."""


class BadRows:
    """What becomes of rows that cannot be used: the first one ends the reading, or all are left out and counted.

    Args:
        skip: leave them out.
    """

    def __init__(self, *, skip: bool) -> None:
        self.skip = skip
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

    @property
    def note(self) -> str:
        """How many rows were left out, and which came first."""
        more = "" if self.count <= len(self.named) else " ..."
        return f"{self.count:,} rows that cannot be used were left out: {'; '.join(self.named)}{more}"


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


def read_file(path: Path, bad: BadRows, label_names: Sequence[str] | None = None) -> Iterator[FoundRow]:
    """The rows of a file, one by one.

    Args:
        path: ends in one of :data:`FORMATS`.
        bad: told what is no row.
        label_names: what the numbers of AG News' layout stand for.

    Raises:
        UserError: the file cannot be read.
    """
    if path.suffix not in FORMATS:
        raise UserError(f"--dataset {path}: must end in {', '.join(FORMATS)}")
    try:
        if path.suffix == ".csv":
            yield from _read_csv(path, bad, label_names or AG_NEWS_LABELS)
        else:
            yield from (_read_parquet if path.suffix == ".parquet" else _read_json_lines)(path, bad)
    except OSError as error:
        raise UserError(f"--dataset {path}: {error.strerror or error}") from error


def _lines(path: Path) -> list[str]:
    """A file's lines with their ends; what is not UTF-8 stands in them as surrogates."""
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    return [line.decode(errors="surrogateescape") for line in data.splitlines(keepends=True)]


def _check_encoding(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableRow("not UTF-8 text") from error


def _read_csv(path: Path, bad: BadRows, label_names: Sequence[str]) -> Iterator[FoundRow]:
    columns: tuple[int, int] | None = None
    for number, (line, fields) in enumerate(_records(path, bad)):
        if number == 0 and (columns := _header(fields)):
            continue
        if not fields:
            continue
        where = f"{path} line {line}"
        try:
            _check_encoding("".join(fields))
            text, label = _headed_row(fields, columns) if columns else _ag_row(fields, label_names)
        except UnusableRow as error:
            bad.reject(where, str(error))
        else:
            yield where, text, label


def _records(path: Path, bad: BadRows) -> Iterator[tuple[int, list[str]]]:
    """The number of each record's last line, and its fields.

    A record that cannot be parsed costs its first line alone: a stray quote would take good rows after it along.
    """
    lines, start = _lines(path), 0
    while start < len(lines):
        reader, done = csv.reader((lines[i] for i in range(start, len(lines))), strict=True), 0
        try:
            for fields in reader:
                done = reader.line_num
                yield start + done, fields
            return
        except csv.Error as error:
            start += done + 1
            bad.reject(f"{path} line {start}", f"not valid CSV ({error})")


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


def _header(fields: list[str]) -> tuple[int, int] | None:
    names = [name.strip().lower() for name in fields]
    return (names.index("text"), names.index("label")) if {"text", "label"} <= set(names) else None


def _headed_row(fields: list[str], columns: tuple[int, int]) -> tuple[str, str]:
    if len(fields) <= max(columns):
        raise UnusableRow(f"{len(fields)} fields, but the header names text and label further right")
    return fields[columns[0]], fields[columns[1]]


def _ag_row(fields: list[str], names: Sequence[str]) -> tuple[str, str]:
    if len(fields) < 2:
        raise UnusableRow(f'one field; AG News\' layout is "label 1-{len(names)}","title","description"')
    label = fields[0].strip()
    if not label.isdecimal():
        raise UnusableRow(
            f"label {label!r} is no number; use AG News' layout with no header, or a header line with text and label"
        )
    if not 1 <= int(label) <= len(names):
        raise UnusableRow(f"label {label} is out of range 1 to {len(names)}")
    return " ".join(part for part in fields[1:] if part), names[int(label) - 1]


def _read_json_lines(path: Path, bad: BadRows) -> Iterator[FoundRow]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = _json_row(line)
        except UnusableRow as error:
            bad.reject(where, str(error))
        else:
            yield where, row["text"], row["label"]


def _json_row(line: str) -> dict[str, Any]:
    _check_encoding(line)
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UnusableRow(f"not valid JSON ({error.msg}); one object a line is read") from error
    if not isinstance(row, dict) or "text" not in row or "label" not in row:
        raise UnusableRow("must be an object with text and label")
    return row


def _read_parquet(path: Path, bad: BadRows) -> Iterator[FoundRow]:
    import pyarrow
    import pyarrow.parquet

    unreadable = (pyarrow.ArrowException, OSError, UnicodeDecodeError)
    try:
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
        missing = [column for column in ("text", "label") if column not in file.schema_arrow.names]
    except unreadable as error:
        raise UserError(f"{path}: no Parquet file with text and label ({first_line(error)})") from error
    if missing:
        raise UserError(f"{path}: no Parquet file with text and label ({' and '.join(missing)} missing)")
    first = 1
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        try:
            table = file.read_row_group(group, columns=["text", "label"])
            texts, labels = table["text"].to_pylist(), table["label"].to_pylist()
        except unreadable as error:
            bad.reject(f"{path} rows {first} to {first + rows - 1}", f"cannot be read ({first_line(error)})", rows)
        else:
            for number, (text, label) in enumerate(zip(texts, labels, strict=True), start=first):
                yield f"{path} row {number}", text, label
        first += rows
