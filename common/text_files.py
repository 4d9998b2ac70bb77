"""Files of text by their lines: which encoding they have, and where in the file each line begins.

Training and scoring read CSV, TSV and JSON lines through :class:`Lines`, so a file that one of them
can read is read by the other. What a line means is decided in :mod:`common.rows`.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError
from common.problem_types import UnusableRow

# Otherwise a quote that is never closed would make one record of the rest of a file, and a file
# without line ends would be one line.
LONGEST_RECORD = 32 * 2**20
# Where a file that is not text shows it.
_BYTES_LOOKED_AT = 4096
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
# How files begin that are not text, whatever they are called.
_OTHER_FILES = {
    b"\x1f\x8b": "a gzip archive; unpack it",
    b"PK\x03\x04": 'a zip archive or a spreadsheet; unpack it, or save it as "CSV UTF-8"',
    b"\xd0\xcf\x11\xe0": 'an old Excel file; save it as "CSV UTF-8"',
    b"BZh": "a bzip2 archive; unpack it",
    b"\xfd7zXZ\0": "an xz archive; unpack it",
    b"\x28\xb5\x2f\xfd": "a zstd archive; unpack it",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"PAR1": "a Parquet file; name it .parquet",
    b"%PDF": "a PDF file",
    b"SQLite format 3\0": "a SQLite database; export its table as CSV",
    codecs.BOM_UTF32_LE: "UTF-32 text; save it as UTF-8",
    b"\0\0\xfe\xff": "UTF-32 text; save it as UTF-8",
}


def utf8_bytes(data: bytes, *, is_whole: bool = True) -> bytes:
    """A file's text in UTF-8 without a byte order mark; UTF-16 is recognized by its mark.

    ``is_whole``: whether it is the whole file, or its beginning, which may end within a character.

    Raises:
        ValueError: it is another kind of file, UTF-16 without a mark, or damaged UTF-16.
    """
    # UTF-32's mark begins with UTF-16's, so this comes first.
    for begin, what in _OTHER_FILES.items():
        if data.startswith(begin):
            raise ValueError(f"not text but {what}")
    if data[:2] in _UTF16:
        try:
            data = codecs.getincrementaldecoder("utf-16")().decode(data, is_whole).encode()
        except UnicodeDecodeError as error:
            raise _damaged_at(error.start) from error
    # A NUL here and there is a character like others, but of most letters UTF-16 makes a byte and a
    # NUL.
    head = data[:1000]
    if max(head[::2].count(0), head[1::2].count(0)) > len(head) // 4:
        kind = "UTF-32" if head.count(0) > len(head) * 5 // 8 else "UTF-16"
        raise ValueError(f"not UTF-8 text (it looks like {kind}); save it as UTF-8")
    if 0 in head and "\ufffd" in head[:-3].decode(errors="replace"):
        raise ValueError("not UTF-8 text, but bytes of another kind; is it a text file?")
    return data.removeprefix(codecs.BOM_UTF8)


def _damaged_at(offset: int) -> ValueError:
    return ValueError(f"UTF-16 text that is damaged at byte {offset}; save it as UTF-8")


def _unreadable(name: Path | str, error: ValueError) -> UserError:
    return UserError(f"{name}: {error}", code="data-unreadable")


def check_utf8(text: str) -> None:
    """Refuse text that was decoded with ``surrogateescape`` because its bytes are not UTF-8.

    Raises:
        UnusableRow: it is such text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        remedy = 'save the file as UTF-8 (in Excel "CSV UTF-8")'
        raise UnusableRow(f"not UTF-8 text; {remedy}") from error


def text_lines(name: Path | str, data: bytes) -> list[str]:
    """A file's lines with their ends; bytes that are not UTF-8 become surrogates.

    Raises:
        UserError: it is UTF-16 without a mark, or truncated UTF-16.
    """
    try:
        data = utf8_bytes(data)
    except ValueError as error:
        raise _unreadable(name, error) from error
    return [line.decode(errors="surrogateescape") for line in data.splitlines(keepends=True)]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part begins: the bytes (of Parquet the rows), lines and rows before it."""

    offset: int = 0
    lines: int = 0
    rows: int = 0


class TextFile:
    """An open file of UTF-8, or of UTF-16 with a byte order mark.

    Offsets are those of the file itself and not of its text in UTF-8, so that a reader can begin
    at any of them without decoding what is before it.

    Raises:
        UserError: it begins like something else.
    """

    def __init__(self, name: str, file: BinaryIO) -> None:
        self.name, self._file = name, file
        file.seek(0)
        head = file.read(_BYTES_LOOKED_AT)
        try:
            utf8_bytes(head, is_whole=False)
        except ValueError as error:
            raise _unreadable(name, error) from error
        self._encoding = _UTF16.get(head[:2], "utf-8")
        self._line_feed = "\n".encode(self._encoding)

    def seek(self, offset: int) -> None:
        self._file.seek(offset)

    def next_lines(self, offset: int, number: int) -> list[tuple[str, int]]:
        """Read on to the next line feed: the lines up to it with the bytes that each takes.

        They are several if they end in carriage returns alone, as old Macs wrote them; none at the
        end of the file. ``offset``, ``number``: what was read before, for messages.
        """
        raw = self._up_to_line_feed()
        if len(raw) >= LONGEST_RECORD and not raw.endswith(self._line_feed):
            what = f"longer than {LONGEST_RECORD // 2**20} MiB; is it text?"
            raise UserError(f"{self.name} line {number + 1}: {what}", code="data-unreadable")
        # Bytes that are not UTF-8 make one row unusable, which can be left out. Damaged UTF-16
        # makes the file unusable: after a lost byte, all that follows is read as other characters.
        if self._encoding == "utf-8":
            lines = raw.splitlines(keepends=True)
            return [(line.decode(errors="surrogateescape"), len(line)) for line in lines]
        try:
            utf8 = raw.decode(self._encoding).encode()
        except UnicodeDecodeError as error:
            raise _unreadable(self.name, _damaged_at(offset + error.start)) from error
        # As bytes, because Python splits a str at form feeds and other characters too.
        texts = [line.decode() for line in utf8.splitlines(keepends=True)]
        return [(text, len(text.encode(self._encoding))) for text in texts]

    def _up_to_line_feed(self) -> bytes:
        if self._encoding == "utf-8":
            return self._file.readline(LONGEST_RECORD)
        # The byte of a line feed is also half of other characters, such as Ċ (0A 01). So what
        # readline returns is filled up to whole characters, until the last of them is a line feed.
        raw = bytearray()
        while len(raw) < LONGEST_RECORD and (piece := self._file.readline(LONGEST_RECORD)):
            raw += piece + (self._file.read(1) if len(piece) % 2 else b"")
            if raw.endswith(self._line_feed):
                break
        return bytes(raw)


class Lines(Sequence[str]):
    """A file's lines by number, read when asked for; only those of the current record are held."""

    def __init__(self, source: TextFile, place: Place = Place()) -> None:
        self._source = source
        self._held: dict[int, tuple[str, int]] = {}  # the line, and the byte at which it ends
        self._first, self._next, self._offset = place.lines, place.lines, place.offset
        self._begin = place.offset  # of what is held
        source.seek(place.offset)

    def __getitem__(self, number: int) -> str:
        while number >= self._next:
            # A csv.Error, so that it is handled like any malformed record: its first line is
            # rejected, and reading continues with the next one.
            if self._offset - self._begin > LONGEST_RECORD:
                raise csv.Error(
                    f"a record of more than {LONGEST_RECORD // 2**20} MiB: is a quote not closed?"
                )
            found = self._source.next_lines(self._offset, self._next)
            if not found:
                raise IndexError(number)
            for line, size in found:
                text = line.removeprefix("\ufeff") if self._offset == 0 else line
                self._offset += size
                self._held[self._next] = (text, self._offset)
                self._next += 1
        return self._held[number][0]

    def __len__(self) -> int:
        raise NotImplementedError("not known before the file is read to its end")

    def place_after(self, number: int) -> Place:
        """Where the line after the first ``number`` lines begins; those before it are dropped."""
        while self._first < number:
            self._begin = self._held.pop(self._first)[1]
            self._first += 1
        return Place(self._begin, number)

    def end(self) -> Place:
        """The end of the file, once it was reached."""
        return Place(self._offset, self._next)

    @contextlib.contextmanager
    def from_start(self) -> Iterator[Lines]:
        """The same file from its first line on, to be read before this one is read further."""
        try:
            yield Lines(self._source)
        finally:
            self._source.seek(self._offset)
