"""Rows of text and label from CSV, TSV, JSON lines and Parquet; an unusable row is reported with file and line.

Training reads its data here, and serving reads the rows that an exported model is measured on. From top to bottom: the
columns of text and label, what happens to unusable rows, the file formats, and labelled rows for an existing model.
Files that are too large for memory are read part by part in :mod:`common.row_parts`, with the functions of this module.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import json
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from common.errors import UserError, first_line
from common.files import is_lfs_pointer
from common.problem_types import MULTI_LABEL, REGRESSION, SINGLE_LABEL, Label, ProblemType, UnusableRow
from common.text import Text

SAMPLE_NEWS = Path(__file__).with_name("sample_news")
AG_NEWS_LABELS = ["World", "Sports", "Business", "Sci/Tech"]
FORMATS = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
# Each line of such a file is a text; it has no labels.
PLAIN_TEXT_FORMAT = ".txt"
_SEPARATORS = ",;\t"
MOST_NAMED = 10
_MOST_COLUMNS_NAMED = 20
_LONGEST_NAME = 30

# A long document is one field; csv's own limit is 131,072 characters.
csv.field_size_limit(2**31 - 1)

# Else a quote that is never closed would make one record of the rest of a file, and missing line ends one line of all.
LONGEST_RECORD = 32 * 2**20

# A row before its label is known to be a class: its position, its text or pair of texts, its label as found.
FoundRow = tuple[str, Any, Any]
# The positions of the columns of the text, of the label and, of pairs, of the second text.
Places = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns that hold the text, the label and, of pairs of texts, the second text; of texts without
    labels only the first.

    A text may be in several columns, whose names are separated by commas, such as ``title,body``: they are joined. So
    may the labels of a text: then each column is named as a label, and says with 0 or 1 whether it applies.
    """

    text: str = "text"
    label: str = "label"
    pair: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.text, self.label, self.pair)))

    def _parts(self, found: Sequence[str]) -> list[list[str]]:
        """The columns that each of :attr:`names` stands for; a single column may have a comma in its name."""
        names = [name.strip().lower() for name in found]
        is_one = [name.strip().lower() in names for name in self.names]
        return [
            [name.strip()] if one else [part.strip() for part in name.split(",")]
            for name, one in zip(self.names, is_one, strict=True)
        ]

    def missing(self, found: Sequence[str]) -> str:
        """Which of them are missing from the names found, ignoring case; empty if all are there."""
        names = [name.strip().lower() for name in found]
        missing = [name for name in itertools.chain(*self._parts(found)) if name.lower() not in names]
        if not missing:
            return ""
        named = ", ".join(name.strip()[:_LONGEST_NAME] for name in found[:_MOST_COLUMNS_NAMED])
        return f"no column {' and no column '.join(missing)} among {named}"

    def among(self, found: Sequence[str]) -> Places:
        """Their positions among the names found, ignoring case: text, label and, of pairs, the second text.

        Raises:
            ValueError: one is missing.
        """
        if missing := self.missing(found):
            raise ValueError(missing)
        names = [name.strip().lower() for name in found]
        return tuple(tuple(names.index(name.lower()) for name in parts) for parts in self._parts(found))


TEXT_AND_LABEL = Columns()


@dataclass(frozen=True, slots=True)
class Layout:
    """How a delimited text file is laid out.

    ``places``: the positions of text, label and second text in a row, or None for AG News' layout (class, title,
    description), which has no header. ``unused``: the names of the other columns.
    """

    separator: str
    places: Places | None
    unused: tuple[str, ...] = ()
    width: int = 0  # of the header


def separators(suffix: str) -> str:
    """What may stand between the fields of such a file; what is tried first also decides files of one column."""
    return "\t,;" if suffix == ".tsv" else _SEPARATORS


def find_layout(first_line: str, columns: Columns, candidates: str) -> Layout:
    """Find the separator, one of the ``candidates``, and the columns from a file's first line.

    Raises:
        ValueError: it has no such columns, and is not a row in AG News' layout.
    """
    rows = {separator: next(csv.reader([first_line], delimiter=separator), []) for separator in candidates}
    for separator, fields in rows.items():
        if not columns.missing(fields):
            places = columns.among(fields)
            used = set(itertools.chain(*places))
            unused = tuple(field.strip() for i, field in enumerate(fields) if i not in used)
            return Layout(separator, places, unused, len(fields))
    for separator, fields in rows.items():
        if columns in (Columns(), Columns(label="")) and len(fields) > 1 and fields[0].strip().isdecimal():
            return Layout(separator, None)
    check_utf8(first_line)
    raise ValueError(columns.missing(max(rows.values(), key=len)))


def utf8_bytes(data: bytes) -> bytes:
    """A file's text in UTF-8 without a byte order mark; UTF-16 is recognized by its mark.

    Raises:
        ValueError: it is UTF-16 without a mark, or truncated UTF-16.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            data = data.decode("utf-16").encode()
        except UnicodeDecodeError as error:
            raise ValueError(f"UTF-16 text that is damaged at byte {error.start}; save it as UTF-8") from error
    if b"\0" in data[:1000]:
        raise ValueError("not UTF-8 text (it looks like UTF-16); save it as UTF-8")
    return data.removeprefix(codecs.BOM_UTF8)


def check_utf8(text: str) -> None:
    """Refuse text that was decoded with ``surrogateescape`` because its bytes are not UTF-8.

    Raises:
        ValueError: it is such text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError('not UTF-8 text; save the file as UTF-8 (in Excel "CSV UTF-8")') from error


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part begins: the bytes before it (for Parquet the rows), and the numbers of lines and rows before it."""

    offset: int = 0
    lines: int = 0
    rows: int = 0


class Lines(Sequence[str]):
    """A file's lines by their number, read when they are asked for; only those of the current record are held."""

    def __init__(self, name: str, file: BinaryIO, place: Place) -> None:
        self._name, self._file = name, file
        self._held: dict[int, tuple[str, int]] = {}  # the line, and the byte at which it ends
        self._first, self._next, self._offset = place.lines, place.lines, place.offset
        self._begin = place.offset  # of what is held
        file.seek(place.offset)

    def __getitem__(self, number: int) -> str:  # type: ignore[override]
        while number >= self._next:
            if self._offset - self._begin > LONGEST_RECORD:
                raise csv.Error(f"a record of more than {LONGEST_RECORD // 2**20} MiB: is a quote not closed?")
            raw = self._file.readline(LONGEST_RECORD)
            if not raw:
                raise IndexError(number)
            if len(raw) == LONGEST_RECORD and not raw.endswith(b"\n"):
                raise UserError(
                    f"{self._name} line {self._next + 1}: longer than {LONGEST_RECORD // 2**20} MiB; is it text?",
                    code="data-unreadable",
                )
            start = self._offset
            for line in raw.splitlines(keepends=True):
                self._offset += len(line)
                data = line.removeprefix(b"\xef\xbb\xbf") if start == 0 and self._next == 0 else line
                self._held[self._next] = (data.decode(errors="surrogateescape"), self._offset)
                self._next += 1
        return self._held[number][0]

    def __len__(self) -> int:
        raise NotImplementedError("not known before the file is read to its end")

    def place_after(self, number: int) -> Place:
        """Where the line after the first ``number`` lines begins; the lines before it are let go."""
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
            yield Lines(self._name, self._file, Place())
        finally:
            self._file.seek(self._offset)


class Reading:
    """Which columns are read, and what happens to unusable rows: the first one ends the reading, or all of them are
    left out and counted.

    Args:
        columns: of text and label.
        skip: leave out unusable rows.
        flag: the flag that names the file, for error messages.
        remedy: what to do if the columns are missing.
        problem_type: what labels are.
        new_texts: an empty list for the texts of a split, or what takes its place if they do not fit into memory.
    """

    def __init__(
        self,
        columns: Columns,
        *,
        skip: bool,
        flag: str = "--dataset",
        remedy: str = "name yours with --text_column and --label_column",
        problem_type: ProblemType = SINGLE_LABEL,
        new_texts: Callable[[], Any] = list,
    ) -> None:
        self.columns = columns
        self.skip = skip
        self.flag = flag
        self.remedy = remedy
        self.problem_type = problem_type
        self.new_texts = new_texts
        self.unused: dict[str, None] = {}  # names of columns, in the order in which they were met
        self.count = 0
        self.named: list[str] = []

    def reject(self, where: str, why: str, rows: int = 1) -> None:
        if not self.skip:
            raise UserError(f"{where}: {why}", code="row-unusable")
        self.count += rows
        if len(self.named) < MOST_NAMED:
            self.named.append(f"{where}: {why}")

    def usable(
        self, what: str, rows: Iterable[FoundRow], labels: Collection[str] = ()
    ) -> tuple[Sequence[Text], Sequence[Label]]:
        """The texts and the labels of the usable rows.

        Args:
            what: the file or split they are from.
            rows: as they are read; the format's reader has already rejected what is not a row.
            labels: the allowed labels; empty to allow any.

        Raises:
            UserError: there are none, or more were left out than remain.
        """
        before, usable = self.count, self.new_texts()
        found: Any = array("d") if self.problem_type is REGRESSION else []
        names: dict[Label, Label] = {}
        for where, text, label in rows:
            try:
                for each in text if isinstance(text, tuple) else (text,):
                    if not isinstance(each, str) or not each.strip():
                        raise UnusableRow(f"the text is {'empty' if isinstance(each, str) else 'not a string'}")
                read = self.problem_type.read_label(self.label_of(label), labels)
            except UnusableRow as error:
                self.reject(where, str(error))
            else:
                usable.append(text)
                # One object for all rows that have the label.
                found.append(read if isinstance(found, array) else names.setdefault(read, read))
        left_out = self.count - before
        if left_out > len(usable):
            raise UserError(
                f"{self.flag} {what}: {left_out:,} of {left_out + len(usable):,} rows cannot be used, which is more "
                f"than half; {self.named[0]}",
                code="rows-mostly-unusable",
            )
        if not usable:
            raise UserError(f"{self.flag} {what}: holds no rows", code="data-empty")
        return usable, found

    @property
    def formats(self) -> tuple[str, ...]:
        """How the names of readable files end."""
        return FORMATS if self.columns.label else (*FORMATS, PLAIN_TEXT_FORMAT)

    def label_of(self, found: Any) -> Any:
        """A label as one cell would give it; of several columns, the names of those that say 1.

        Raises:
            UserError: several columns make no label of this kind.
            UnusableRow: a column says neither 0 nor 1.
        """
        if not isinstance(found, tuple):
            return found
        if self.problem_type is not MULTI_LABEL:
            raise UserError(
                f"--label_column {self.columns.label}: only --task multi_label reads several columns of 0 and 1",
                code="flags-conflict",
            )
        names = [name.strip() for name in self.columns.label.split(",")]
        return [name for name, cell in zip(names, found, strict=True) if _applies(name, cell)]

    def find_columns(self, where: str, found: Sequence[str]) -> list[list[str]]:
        """The names of the columns of text, label and second text as written in this file."""
        try:
            places = self.columns.among(found)
        except ValueError as error:
            raise UserError(f"{where}: {error}; {self.remedy}", code="data-columns") from error
        used = set(itertools.chain(*places))
        self.unused |= dict.fromkeys(name for i, name in enumerate(found) if i not in used)
        return [[found[place] for place in parts] for parts in places]

    @property
    def notes(self) -> list[str]:
        """Which columns were not read; the last note says how many rows were left out, and names the first."""
        unused = [f"columns that are not used: {', '.join(self.unused)}"] if self.unused else []
        more = "" if self.count <= len(self.named) else " ..."
        left_out = f"{self.count:,} rows that cannot be used were left out: {'; '.join(self.named)}{more}"
        return [*unused, *([left_out] if self.count else [])]


def read_file(path: Path, reading: Reading, label_names: Sequence[str] | None = None) -> Iterator[FoundRow]:
    """The rows of a file, one by one.

    Args:
        path: ends in one of :attr:`Reading.formats`.
        reading: which columns are read, and what happens to unusable rows.
        label_names: what the class numbers of AG News' layout mean.

    Raises:
        UserError: the file cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix not in reading.formats:
        raise UserError(
            f'{reading.flag} {path}: must end in {", ".join(reading.formats)}; save a spreadsheet as "CSV UTF-8"',
            code="data-format",
        )
    try:
        if is_lfs_pointer(path):
            what = "is only a pointer of Git LFS to the file; run git lfs pull in its folder"
            raise UserError(f"{reading.flag} {path}: {what}", code="data-unreadable")
        if suffix == PLAIN_TEXT_FORMAT:
            yield from _read_lines(path, reading)
        elif suffix in (".csv", ".tsv"):
            yield from _read_csv(path, reading, label_names or AG_NEWS_LABELS)
        else:
            yield from (_read_parquet if suffix == ".parquet" else _read_json_lines)(path, reading)
    except OSError as error:
        raise UserError(f"{reading.flag} {path}: {error.strerror or error}", code="data-unreadable") from error


def text_lines(name: Path | str, data: bytes) -> list[str]:
    """A file's lines with their ends; bytes that are not UTF-8 become surrogates.

    Raises:
        UserError: it is UTF-16 without a mark, or truncated UTF-16.
    """
    try:
        data = utf8_bytes(data)
    except ValueError as error:
        raise UserError(f"{name}: {error}", code="data-unreadable") from error
    return [line.decode(errors="surrogateescape") for line in data.splitlines(keepends=True)]


@contextlib.contextmanager
def _open_lines(path: Path) -> Iterator[Lines]:
    """A file's lines, read as they are asked for; UTF-16 is read whole."""
    with path.open("rb") as file:
        head = file.read(1000)
        try:
            if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                yield Lines(str(path), io.BytesIO(utf8_bytes(head + file.read())), Place())
                return
            utf8_bytes(head)
        except ValueError as error:
            raise UserError(f"{path}: {error}", code="data-unreadable") from error
        yield Lines(str(path), file, Place())


def _check_encoding(text: str) -> None:
    try:
        check_utf8(text)
    except ValueError as error:
        raise UnusableRow(str(error)) from error


def _read_csv(path: Path, reading: Reading, label_names: Sequence[str]) -> Iterator[FoundRow]:
    with _open_lines(path) as lines:
        yield from _csv_rows(path, lines, reading, label_names)


def _csv_rows(path: Path, lines: Lines, reading: Reading, label_names: Sequence[str]) -> Iterator[FoundRow]:
    first = next((i for i, line in enumerate(lines) if line.strip()), None)
    if first is None:
        return
    try:
        layout = find_layout(lines[first], reading.columns, separators(path.suffix.lower()))
    except ValueError as error:
        raise UserError(f"{path} line {first + 1}: {error}; {reading.remedy}", code="data-columns") from error
    try:
        check_utf8(lines[first] if layout.places else "")
    except ValueError as error:
        raise UserError(f"{path} line {first + 1}: {error}", code="data-unreadable") from error
    reading.unused |= dict.fromkeys(layout.unused)
    quotes = layout.separator != "\t" or not quotes_are_text(lines, first, has_header=bool(layout.places))
    if layout.places:
        first += 1
    for line, fields in csv_records(path, lines, first, layout.separator, reading, quotes=quotes):
        lines.place_after(line)
        if not fields:
            continue
        where = f"{path} line {line}"
        try:
            _check_encoding("".join(fields))
            text, label = _headed_row(fields, layout) if layout.places else _ag_row(fields, label_names)
        except UnusableRow as error:
            reading.reject(where, str(error))
        else:
            yield where, text, label


def quotes_are_text(lines: Lines, first: int, *, has_header: bool) -> bool:
    """Whether the quotes in a TSV, whose first row or header is line ``first``, belong to its texts.

    Some programs put quotes around fields, as in CSV, others write texts as they are, quotes included. The file does
    not say which, so all of it is read both ways: the right one leaves fewer malformed records, or else joins no lines.
    """
    num_fields = lines[first].count("\t") + 1
    with lines.from_start() as again:
        for number, line in enumerate(again, start=1):
            again.place_after(number)
            if line.startswith('"') or '\t"' in line:
                break
        else:
            return False

    def misfit(*, quotes: bool) -> tuple[int, int]:
        reading, malformed, records = Reading(TEXT_AND_LABEL, skip=True), 0, 0
        with lines.from_start() as again:
            for line, fields in csv_records("", again, first + has_header, "\t", reading, quotes=quotes):
                again.place_after(line)
                records += bool(fields)
                malformed += bool(fields) and len(fields) != num_fields
        return malformed + reading.count, -records

    return misfit(quotes=False) < misfit(quotes=True)


def csv_records(
    name: Path | str, lines: Sequence[str], start: int, separator: str, reading: Reading, *, quotes: bool = True
) -> Iterator[tuple[int, list[str]]]:
    """The line number at which each record ends, and its fields; blank lines and rejected ones have none.

    A record that cannot be parsed only costs its first line, because a stray quote would swallow the good rows after
    it. Without ``quotes``, quotes are letters like any other.
    """
    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    while True:
        reader, done = csv.reader(_lines_from(lines, start), delimiter=separator, strict=True, quoting=quoting), 0
        try:
            for fields in reader:
                done = reader.line_num
                yield start + done, fields
            return
        except csv.Error as error:
            start += done + 1
            reading.reject(f"{name} line {start}", f"not valid CSV ({error})")
            yield start, []


def _lines_from(lines: Sequence[str], start: int) -> Iterator[str]:
    # Without asking for the number of lines, which is not known while a file is still being read.
    with contextlib.suppress(IndexError):
        for i in itertools.count(start):
            yield lines[i]


def in_ag_news_layout(path: Path) -> bool:
    """Whether a file begins like AG News' own: no header, but a class number and two texts."""
    if path.suffix != ".csv":
        return False
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
            fields = next(csv.reader(lines), [])
    except (OSError, csv.Error):
        return False
    return len(fields) > 1 and fields[0].strip().isdecimal()


def class_names_beside(file: Path) -> list[str] | None:
    """The classes that the numbers in a file of AG News' layout mean, from a ``classes.txt`` in its folder."""
    path = file.with_name("classes.txt")
    if not path.is_file():
        return None
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: must be UTF-8 text ({first_line(error)}); save it as such", code="data-unreadable"
        ) from error
    return [line.strip() for line in lines if line.strip()]


def _headed_row(fields: list[str], layout: Layout) -> tuple[Any, str]:
    places = cast("Places", layout.places)
    if any(field.strip() for field in fields[layout.width :]):
        what = f"{len(fields)} fields, but the header has {layout.width}"
        raise UnusableRow(f"{what}; a text with {layout.separator!r} in it needs quotes")
    if len(fields) <= max(itertools.chain(*places)):
        raise UnusableRow(f"{len(fields)} fields, but the header names text and label further to the right")
    return text_and_label(*([fields[place] for place in parts] for parts in places))


def text_and_label(*cells: Sequence[Any]) -> tuple[Any, Any]:
    """What a row's cells make: those of the text, of the label (None without) and, of pairs, of the second text."""
    text, *pair = [joined(columns) for columns in (*cells[:1], *cells[2:])]
    labels = cells[1] if len(cells) > 1 else [None]
    return ((text, *pair) if pair else text), labels[0] if len(labels) == 1 else tuple(labels)


def _applies(name: str, cell: Any) -> bool:
    said = str(cell).strip().lower()
    if said not in (yes_and_no := {"1": True, "0": False, "true": True, "false": False, "1.0": True, "0.0": False}):
        raise UnusableRow(f"{cell!r} in the column {name} must be 0 or 1")
    return yes_and_no[said]


def joined(cells: Sequence[Any]) -> Any:
    """What is not empty, with a space between, as in AG News; any cell that is not a text stands for the whole."""
    if len(cells) == 1:
        return cells[0]
    present = [cell for cell in cells if cell is not None]
    not_text = next((cell for cell in present if not isinstance(cell, str)), None)
    return " ".join(filter(None, present)) if not_text is None else not_text


def _ag_row(fields: list[str], names: Sequence[str]) -> tuple[str, str]:
    if len(fields) < 2:
        raise UnusableRow(f'one field; rows without a header must be "class 1-{len(names)}","title","description"')
    label = fields[0].strip()
    if not label.isdecimal():
        raise UnusableRow(
            f'label {label!r} is not a number; rows without a header must be "class 1-{len(names)}","title",'
            '"description"'
        )
    if not 1 <= int(label) <= len(names):
        raise UnusableRow(f"label {label} is out of range 1 to {len(names)}")
    return " ".join(part for part in fields[1:] if part), names[int(label) - 1]


def _read_lines(path: Path, reading: Reading) -> Iterator[FoundRow]:
    with _open_lines(path) as lines:
        for number, line in enumerate(lines, start=1):
            lines.place_after(number)
            if not line.strip():
                continue
            try:
                _check_encoding(line)
            except UnusableRow as error:
                reading.reject(f"{path} line {number}", str(error))
            else:
                yield f"{path} line {number}", line.rstrip("\r\n"), None


def _read_json_lines(path: Path, reading: Reading) -> Iterator[FoundRow]:
    with _open_lines(path) as lines:
        yield from _json_rows(path, lines, reading)


def _json_rows(path: Path, lines: Lines, reading: Reading) -> Iterator[FoundRow]:
    for number, line in enumerate(lines, start=1):
        lines.place_after(number)
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            text, label = _json_row(line, reading)
        except UnusableRow as error:
            reading.reject(where, str(error))
        else:
            yield where, text, label


def parse_json(line: str) -> Any:
    """What one of the JSON lines holds.

    Raises:
        UnusableRow: it is not JSON, or more than Python can hold.
    """
    _check_encoding(line)
    try:
        found = json.loads(line)
        if "\\ud" in line.lower():  # half a character, spelt as an escape, is text that no file can hold
            whole = json.dumps(found, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return json.loads(whole)
        return found
    except json.JSONDecodeError as error:
        raise UnusableRow(f"not valid JSON ({error.msg}); each line must hold one object") from error
    except RecursionError as error:
        raise UnusableRow("JSON that is nested too deep") from error
    except ValueError as error:
        raise UnusableRow("JSON with a number of too many digits") from error


def _json_row(line: str, reading: Reading) -> tuple[Any, Any]:
    row = parse_json(line)
    if not isinstance(row, dict):
        raise UnusableRow("must be an object with text and label")
    try:
        places = reading.columns.among(names := list(row))
    except ValueError as error:
        raise UnusableRow(f"{error}; {reading.remedy}") from error
    used = set(itertools.chain(*places))
    reading.unused |= dict.fromkeys(name for i, name in enumerate(names) if i not in used)
    return text_and_label(*([row[names[place]] for place in parts] for parts in places))


def _read_parquet(path: Path, reading: Reading) -> Iterator[FoundRow]:
    import pyarrow
    import pyarrow.parquet

    unreadable = (pyarrow.ArrowException, OSError, UnicodeDecodeError)
    try:
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
        found = file.schema_arrow.names
    except unreadable as error:
        raise UserError(f"{path}: not a readable Parquet file ({first_line(error)})", code="data-unreadable") from error
    columns = reading.find_columns(str(path), found)
    for wanted in itertools.chain(*columns):
        if found.count(wanted) > 1:
            raise UserError(
                f"{path}: {found.count(wanted)} columns are named {wanted}; rename one", code="data-columns"
            )
    first = 1
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        try:
            table = file.read_row_group(group, columns=[*dict.fromkeys(itertools.chain(*columns))])
            cells = [zip(*(table[name].to_pylist() for name in names), strict=True) for names in columns]
        except unreadable as error:
            reading.reject(f"{path} rows {first} to {first + rows - 1}", f"cannot be read ({first_line(error)})", rows)
        else:
            for number, row in enumerate(zip(*cells, strict=True), start=first):
                yield f"{path} row {number}", *text_and_label(*row)
        first += rows


# What is right for a text: the id of its class, the ids of the labels that apply, or a number.
Target = int | tuple[int, ...] | float


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Texts with what is right for each.

    ``name``: the file they are from. ``texts``: as found, not cleaned; pairs if their columns have a second text.
    ``calibration_texts``: texts that accuracy is not measured on, if any, such as a folder's training rows.
    """

    name: str
    texts: list[Text]
    targets: list[Target]
    calibration_texts: list[Text]


def find_rows(model_dataset: str | None, problem_type: ProblemType = SINGLE_LABEL) -> Path:
    """The rows to measure on if none are given: the model's own dataset if it is here, otherwise the sample news, which
    have one label each.

    Raises:
        UserError: neither is available.
    """
    sample = [SAMPLE_NEWS] if problem_type is SINGLE_LABEL else []
    for path in ([Path(model_dataset)] if model_dataset else []) + sample:
        if (path.is_file() and path.suffix in FORMATS) or _split_file(path, "test"):
            return path
    raise UserError(
        "no labelled rows to measure on; name some with --rows (a folder with test.csv, or a file)",
        code="data-not-found",
    )


def read_labelled_rows(
    path: Path,
    labels: Sequence[str],
    limit: int | None = None,
    columns: Columns = TEXT_AND_LABEL,
    problem_type: ProblemType = SINGLE_LABEL,
) -> LabelledRows:
    """Read rows for a model that is there already. Blank texts are left out.

    ``path`` is a file, or a folder with ``test.csv`` (else ``train.csv``), or the same of another format. ``limit``
    takes so many rows, evenly spread.

    Raises:
        UserError: nothing is there, a row cannot be used, or the model has no such label; with file and line.
    """
    training_file = _split_file(path, "train")
    file = (_split_file(path, "test") or training_file or path) if path.is_dir() else path
    if not file.is_file():
        what = "holds no test.csv or test.jsonl" if path.is_dir() else "no such file or folder"
        raise UserError(
            f"{path}: {what}; --rows names a folder with test.csv, a CSV or JSONL file", code="data-not-found"
        )
    class_of = {label: class_id for class_id, label in enumerate(labels)}
    texts: list[Text] = []
    targets: list[Target] = []
    for where, text, cell in _rows_of_model(file, columns, problem_type):
        try:
            label = problem_type.read_label(cell)
        except UnusableRow as error:
            raise UserError(f"{where}: {error}", code="row-unusable") from error
        texts.append(text)
        if isinstance(label, float):
            targets.append(label)
            continue
        names = (label,) if isinstance(label, str) else label
        if unknown := [name for name in names if name not in class_of]:
            raise UserError(
                f"{where}: label {unknown[0]!r} is not one of the model's labels {', '.join(labels[:10])}",
                code="label-unknown",
            )
        found = tuple(class_of[name] for name in names)
        targets.append(found[0] if isinstance(label, str) else found)
    if not texts:
        raise UserError(f"{file}: holds no labelled text", code="data-empty")
    calibration = texts
    if training_file and training_file != file:
        calibration = [text for _, text, _ in _rows_of_model(training_file, columns, problem_type)]
    chosen = evenly_spread(len(texts), limit)
    return LabelledRows(str(file), [texts[i] for i in chosen], [targets[i] for i in chosen], calibration)


def evenly_spread(count: int, limit: int | None) -> list[int]:
    """The positions of at most ``limit`` of so many rows, evenly spread; None takes all."""
    wanted = min(count, limit or count)
    return [i * count // wanted for i in range(wanted)]


def _split_file(folder: Path, split: str) -> Path | None:
    return next((folder / f"{split}{suffix}" for suffix in FORMATS if (folder / f"{split}{suffix}").is_file()), None)


def _rows_of_model(file: Path, columns: Columns, problem_type: ProblemType) -> Iterator[tuple[str, Text, Any]]:
    remedy = "the columns must have the same names as in training"
    reading = Reading(columns, skip=False, flag="--rows", remedy=remedy, problem_type=problem_type)
    for where, text, label in read_file(file, reading, class_names_beside(file)):
        parts = [text] if not columns.pair else list(text)
        if not all(isinstance(part, str) for part in parts):
            raise UserError(f"{where}: the text is not a string", code="row-unusable")
        if all(part.strip() for part in parts):
            yield where, text, reading.label_of(label)
