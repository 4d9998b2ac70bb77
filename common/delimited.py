"""Delimited text as people save it: its encoding, its separator, and the columns of the text and the label."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Sequence
from dataclasses import dataclass

SEPARATORS = ",;\t"
_MOST_COLUMNS_NAMED = 20
_LONGEST_NAME = 30

# A long document is one field; csv's own limit is 131,072 characters.
csv.field_size_limit(2**31 - 1)


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns that hold the text and the label."""

    text: str = "text"
    label: str = "label"

    def missing(self, found: Sequence[str]) -> str:
        """Which of the two are not among the names that were found, whatever their case; empty if both are."""
        names = [name.strip().lower() for name in found]
        missing = [name for name in (self.text, self.label) if name.lower() not in names]
        if not missing:
            return ""
        named = ", ".join(name.strip()[:_LONGEST_NAME] for name in found[:_MOST_COLUMNS_NAMED])
        return f"no column {' and no column '.join(missing)} among {named}"

    def among(self, found: Sequence[str]) -> tuple[int, int]:
        """The places of the two among the names that were found, whatever their case.

        Raises:
            ValueError: one is not there.
        """
        if missing := self.missing(found):
            raise ValueError(missing)
        names = [name.strip().lower() for name in found]
        return names.index(self.text.lower()), names.index(self.label.lower())


@dataclass(frozen=True, slots=True)
class Layout:
    """How a file of delimited text is laid out.

    ``places``: the positions of text and label in a row, or None for AG News' layout (class, title, description), which
    has no header. ``unused``: the names of the other columns.
    """

    separator: str
    places: tuple[int, int] | None
    unused: tuple[str, ...] = ()


def find_layout(first_line: str, columns: Columns) -> Layout:
    """Tell the separator and the columns from a file's first line.

    Raises:
        ValueError: it names no such columns, and is no row of AG News' layout.
    """
    rows = {separator: next(csv.reader([first_line], delimiter=separator), []) for separator in SEPARATORS}
    for separator, fields in rows.items():
        if not columns.missing(fields):
            places = columns.among(fields)
            unused = [field.strip() for place, field in enumerate(fields) if place not in places]
            return Layout(separator, places, tuple(unused))
    for separator, fields in rows.items():
        if columns == Columns() and len(fields) > 1 and fields[0].strip().isdecimal():
            return Layout(separator, None)
    check_utf8(first_line)
    raise ValueError(columns.missing(max(rows.values(), key=len)))


def utf8_bytes(data: bytes) -> bytes:
    """A file's text in UTF-8 without a byte order mark; UTF-16 is recognised by its own.

    Raises:
        ValueError: it is in UTF-16 without a mark, or a torn one.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            data = data.decode("utf-16").encode()
        except UnicodeDecodeError as error:
            raise ValueError(f"UTF-16 text that is torn at byte {error.start}; save it as UTF-8") from error
    if b"\0" in data[:1000]:
        raise ValueError("not UTF-8 text (it looks like UTF-16); save it as UTF-8")
    return data.removeprefix(codecs.BOM_UTF8)


def check_utf8(text: str) -> None:
    """Refuse text whose bytes were decoded with ``surrogateescape`` because they are not UTF-8.

    Raises:
        ValueError: it is.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError('not UTF-8 text; save the file as UTF-8 (in Excel "CSV UTF-8")') from error
