"""Whole rows of a file, part by part: all columns, from any place on, in memory that does not grow
with the file.

Training wants every row's text and label at once, which `common.rows` reads. Scoring passes all
columns on, and several processes take different parts of one file. So a part is a function of the
file alone: whoever reads it, and from wherever it was resumed, it has the same rows.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from common.errors import UserError, first_line
from common.problem_types import UnusableRow
from common.rows import (
    Columns,
    Layout,
    Reading,
    csv_records,
    find_layout,
    first_filled,
    joined,
    open_parquet,
    parse_json,
    text_problem,
)
from common.text import Text
from common.text_files import Lines, Place, TextFile, check_utf8

if TYPE_CHECKING:
    import pyarrow

# Enough rows to find many of equal length; few enough that a lost process costs seconds of work.
ROWS_PER_PART = 2048
# For long documents: the memory of a run is a handful of parts.
BYTES_PER_PART = 8 * 2**20
AG_NEWS_COLUMNS = ("class", "title", "description")


@dataclass(slots=True)
class Part:
    """Consecutive rows with all their columns.

    ``texts``: of each row, a pair if there is a second column; None if it cannot be used, and
    ``problems`` then says why, by the row's position in the part.
    """

    rows: list[dict[str, Any]] | pyarrow.Table
    texts: list[Text | None]
    problems: dict[int, str] = field(default_factory=dict)
    end: Place = field(default_factory=Place)


class PartReader:
    """Reads a file's parts; not for several threads at once.

    Attributes:
        columns: the names of all columns, for JSON lines those of the first rows.
        num_rows: of Parquet, where the file says so; otherwise None.
    """

    columns: list[str]
    num_rows: int | None = None

    def read(self, place: Place) -> Part:
        """The part that begins at a place; without rows at the end of the file."""
        raise NotImplementedError


def open_parts(
    name: str,
    suffix: str,
    file: BinaryIO,
    text_column: str,
    part_rows: int = ROWS_PER_PART,
    pair_column: str = "",
) -> PartReader:
    """A reader for an open file that can seek.

    Args:
        name: of the file, for messages.
        suffix: one of `common.rows.FORMATS`.
        file: it is left open.
        text_column: the column that is classified; case does not matter.
        part_rows: the most rows of a part.
        pair_column: the column of the second text, for a model that reads pairs.

    Raises:
        UserError: it is not such a file, has no such column or no rows.
    """
    readers: dict[str, Callable[[str, BinaryIO, Columns, int], PartReader]] = {
        ".csv": CsvParts,
        ".tsv": TsvParts,
        ".parquet": ParquetParts,
    }
    return readers.get(suffix, JsonLinesParts)(
        name, file, Columns(text_column, "", pair_column), part_rows
    )


def _no_column(name: str, columns: Columns, error: ValueError) -> NoReturn:
    flags = "--text_column and --pair_column" if columns.pair else "--text_column"
    remedy = "" if "rename" in str(error) else f"; name yours with {flags}"
    raise UserError(f"{name}: {error}{remedy}", code="data-columns") from error


def refuse_repeats(where: str, names: Sequence[str]) -> None:
    """Each row would lose what one of two columns of one name holds.

    Raises:
        UserError: two columns have one name.
    """
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise UserError(f"{where}: two columns are called {twice}; rename one", code="data-columns")


class _Collecting(Reading):
    """Collects lines that are no rows as rows of their own, in the order in which they are read."""

    def __init__(self, columns: Columns, part: Part) -> None:
        super().__init__(columns, skip=True)
        self._part = part

    # An empty row takes the place of the line, so every later row keeps its number.
    def reject(self, where: str, why: str, rows: int = 1) -> None:
        assert isinstance(self._part.rows, list)
        self._part.problems[len(self._part.texts)] = f"{where}: {why}"
        self._part.rows.append({})
        self._part.texts.append(None)


class _TextParts(PartReader):
    """What CSV and JSON lines share: lines, and parts that end after so many rows or bytes."""

    def __init__(self, name: str, file: BinaryIO, wanted: Columns, part_rows: int) -> None:
        # The first part is read at once, so that a file that cannot be scored at all is refused
        # before the model is asked.
        self._name, self._wanted, self._part_rows = name, wanted, part_rows
        self._file = TextFile(name, file)
        self._find_columns()
        if not self.read(Place()).texts:
            raise UserError(f"{name}: holds no rows", code="data-empty")

    def _find_columns(self) -> None:
        raise NotImplementedError

    def _records(self, lines: Lines, start: int, part: Part) -> Iterator[int]:
        """Add the rows to a part one by one; yields the number of lines up to the end of each."""
        raise NotImplementedError

    def read(self, place: Place) -> Part:
        part = Part([], [], end=place)
        lines = Lines(self._file, place)
        for number in self._records(lines, place.lines, part):
            part.end = lines.place_after(number)
            if (
                len(part.texts) >= self._part_rows
                or part.end.offset - place.offset >= BYTES_PER_PART
            ):
                break
        else:
            part.end = lines.end()  # lines that were rejected last are part of it
        part.end = replace(part.end, rows=place.rows + len(part.texts))
        return part

    def _add(
        self, part: Part, line: int, row: dict[str, Any], texts: Sequence[Any], problem: str = ""
    ) -> None:
        assert isinstance(part.rows, list)
        problem = problem or text_problem(texts)
        if problem:
            part.problems[len(part.texts)] = f"{self._name} line {line}: {problem}"
        part.rows.append(row)
        part.texts.append(None if problem else _text_of(texts))


def _text_of(texts: Sequence[str]) -> Text:
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


class CsvParts(_TextParts):
    """CSV and TSV with a header, or in AG News' layout without one."""

    _layout: Layout
    _suffix = ".csv"

    def _find_columns(self) -> None:
        lines = Lines(self._file)
        try:
            layout = find_layout(lines, self._wanted, self._suffix)
        except ValueError as error:
            layout = self._without_text_column(error)
        if layout is None:
            raise UserError(f"{self._name}: holds no rows", code="data-empty")
        self._layout = layout
        if layout.positions:
            self.columns = [name or f"column_{i + 1}" for i, name in enumerate(layout.header)]
            refuse_repeats(f"{self._name} line {layout.first + 1}", self.columns)
        else:
            width = len(next(csv.reader([lines[layout.first]], delimiter=layout.separator)))
            self.columns = [*AG_NEWS_COLUMNS, *(f"column_{i + 1}" for i in range(3, width))][:width]

    def _without_text_column(self, error: ValueError) -> Layout | None:
        """The layout of AG News, if this file has it."""
        if "UTF-8" in str(error):
            raise UserError(f"{self._name}: {error}", code="data-unreadable") from error
        with contextlib.suppress(ValueError):
            layout = find_layout(Lines(self._file), Columns(), self._suffix)
            if self._wanted == Columns(label="") and layout and not layout.positions:
                return layout
        line = first_filled(Lines(self._file)) + 1
        _no_column(f"{self._name} line {line}", self._wanted, error)

    def _records(self, lines: Lines, start: int, part: Part) -> Iterator[int]:
        collecting, layout = _Collecting(self._wanted, part), self._layout
        # A rejected line adds its row to the part on its own, before the next record is yielded.
        for line, fields in csv_records(self._name, lines, layout, collecting, start):
            if fields:
                self._add(part, line, *self._row(fields))
            yield line

    def _row(self, fields: list[str]) -> tuple[dict[str, str], list[Any], str]:
        """A row by the names of its columns, its texts, and why it cannot be used."""
        # An unusable row stays in the output with its columns, so that the output has as many rows
        # as the input. If it is too short or too long, it is filled up or cut.
        problem, width, positions = "", len(self.columns), self._layout.positions
        try:
            check_utf8("".join(fields))
        except ValueError as error:
            problem, fields = str(error), _as_utf8(fields)
        if positions:
            try:
                self._layout.cells(fields)
            except UnusableRow as error:
                problem = problem or str(error)
        padded = [*fields[:width], *[""] * (width - len(fields))]
        if positions:
            texts = [joined([padded[i] for i in text]) for text in positions]
        else:
            texts = [" ".join(field for field in fields[1:] if field)]
        return dict(zip(self.columns, padded, strict=True)), texts, problem


def _as_utf8(cells: list[str]) -> list[str]:
    # A row that cannot be used is passed on with its problem, and the output has to be UTF-8.
    return [cell.encode(errors="surrogateescape").decode(errors="replace") for cell in cells]


class TsvParts(CsvParts):
    """The same, where a single column is not split at commas."""

    _suffix = ".tsv"


class JsonLinesParts(_TextParts):
    """One JSON object per line; each may have other fields, so each has columns of its own."""

    def _find_columns(self) -> None:
        self.columns = []
        self._names: list[str] = []
        self._keys: list[list[str]] = []
        # What a table gets its columns from, if the rows are written as one.
        self.first_rows: list[dict[str, Any]] = []
        first = self.read(Place())
        assert isinstance(first.rows, list)
        self.first_rows = [row for row in first.rows if row]
        self.columns = list(dict.fromkeys(name for row in self.first_rows for name in row))
        if self.columns and (missing := self._wanted.missing(self.columns)):
            _no_column(self._name, self._wanted, ValueError(missing))
        if not self.columns and first.problems:
            raise UserError(first.problems[min(first.problems)], code="data-unreadable")

    def _records(self, lines: Lines, start: int, part: Part) -> Iterator[int]:
        number = start
        while True:
            try:
                line = lines[number]
            except IndexError:
                return
            number += 1
            if line.strip():
                row, problem = _json_object(line)
                problem = problem or self._look_for_columns(list(row))
                texts = (
                    [] if problem else [joined([row[key] for key in text]) for text in self._keys]
                )
                self._add(part, number, row, texts, problem)
            yield number

    def _look_for_columns(self, names: list[str]) -> str:
        """Find the keys of a row's texts, mostly the last row's; returns what is missing."""
        if names != self._names:
            try:
                positions = self._wanted.among(names)
            except ValueError as error:
                return str(error)
            self._names = names
            self._keys = [[names[i] for i in text] for text in positions]
        return ""


def _json_object(line: str) -> tuple[dict[str, Any], str]:
    try:
        row = parse_json(line)
    except UnusableRow as error:
        return {}, str(error)
    if not isinstance(row, dict):
        return {}, "must be an object"
    # Python reads NaN and Infinity, but most other readers of JSON do not, and writing null instead
    # would change a column that is only passed on.
    if _has_non_finite_number(row):
        numbers = "NaN, Infinity or above 1.8e308"
        return {}, f"has a number that JSON cannot hold ({numbers}); write null, or quote it"
    return row, ""


def _has_non_finite_number(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(
            map(_has_non_finite_number, value.values() if isinstance(value, dict) else value)
        )
    return isinstance(value, float) and not math.isfinite(value)


class ParquetParts(PartReader):
    """Parquet: row groups of any size are read in slices."""

    def __init__(self, name: str, file: BinaryIO, wanted: Columns, part_rows: int) -> None:
        # Without a buffer of its own, a column of a row group would be read whole.
        self._file, self._unreadable = open_parquet(name, file, buffer_size=2**20, pre_buffer=False)
        import pyarrow  # it is there, because the file was opened with it

        self._pyarrow, self._name, self.schema = pyarrow, name, self._file.schema_arrow
        self.columns = self.schema.names
        refuse_repeats(name, self.columns)
        try:
            self._texts = wanted.among(self.columns)
        except ValueError as error:
            _no_column(name, wanted, error)
        self._refuse_other_kinds(itertools.chain(*self._texts))
        self.num_rows = self._file.metadata.num_rows
        if not self.num_rows:
            raise UserError(f"{name}: holds no rows", code="data-empty")
        groups = [self._file.metadata.row_group(i) for i in range(self._file.num_row_groups)]
        self._group_rows = [group.num_rows for group in groups]
        # These sizes are of uncompressed columns, so a part is about as large in memory.
        bytes_per_row = max(1, sum(group.total_byte_size for group in groups) // self.num_rows)
        self.rows_per_part = max(1, min(part_rows, BYTES_PER_PART // bytes_per_row))
        # The cursor of `_take`: the next row, and what was decoded of the rows from there on.
        self._slices: Iterator[pyarrow.Table] = iter(())
        self._left: pyarrow.Table = self.schema.empty_table()
        self._row = -1

    def _refuse_other_kinds(self, positions: Iterable[int]) -> None:
        """Refuse a column of numbers or lists: no row of it is a text."""
        for place in positions:
            kind = self.schema.types[place]
            kind = kind.value_type if self._pyarrow.types.is_dictionary(kind) else kind
            if str(kind) not in ("string", "large_string", "string_view"):
                what = f"the column {self.columns[place]} holds {kind} and not text"
                raise UserError(f"{self._name}: {what}", code="data-columns")

    def read(self, place: Place) -> Part:
        num_rows = max(0, min(self.rows_per_part, self.num_rows - place.offset))
        end = Place(place.offset + num_rows, 0, place.offset + num_rows)
        try:
            self._go_to(place.offset)
            table = self._take(num_rows)
            columns = [
                zip(*(table.column(i).cast("string").to_pylist() for i in text), strict=True)
                for text in self._texts
            ]
        except self._unreadable as error:
            where = f"{self._name} rows {place.offset + 1} to {end.offset}"
            what = f"cannot be read ({first_line(error)}); copy the file again"
            raise UserError(f"{where}: {what}", code="data-unreadable") from error
        part = Part(table, [], end=end)
        for position, cells in enumerate(zip(*columns, strict=True)):
            texts = [joined(text) for text in cells]
            if problem := text_problem(texts):
                where = f"{self._name} row {place.offset + position + 1}"
                part.problems[position] = f"{where}: {problem}"
            part.texts.append(None if problem else _text_of(texts))
        return part

    def _go_to(self, row: int) -> None:
        # Parts are mostly read one after another, and then the cursor is there already. A row group
        # is only decoded from its start on, so earlier rows of one have to be passed, but the row
        # groups before it are skipped.
        group = self._group_of(row)
        is_ahead = self._row < 0 or row < self._row
        if is_ahead or group > self._group_of(self._row):
            self._row = sum(self._group_rows[:group])
            self._left, self._slices = self.schema.empty_table(), self._slices_from(group)
        while self._row < row:  # in steps, because a row group may be too large for memory
            self._take(min(self.rows_per_part, row - self._row))

    def _group_of(self, row: int) -> int:
        for group, rows in enumerate(self._group_rows):
            if row < rows:
                return group
            row -= rows
        return len(self._group_rows)

    def _slices_from(self, first: int) -> Iterator[pyarrow.Table]:
        for group in range(first, len(self._group_rows)):
            # On this thread: the cores belong to the model.
            for batch in self._file.iter_batches(
                self.rows_per_part, row_groups=[group], use_threads=False
            ):
                yield self._pyarrow.Table.from_batches([batch], schema=self.schema)

    def _take(self, num_rows: int) -> pyarrow.Table:
        """The next rows; the cursor moves behind them."""
        # Slices share the memory of the decoded batch; only the concatenation at the end copies.
        taken = [self._left.slice(0, min(num_rows, self._left.num_rows))]
        missing = num_rows - taken[0].num_rows
        self._left = self._left.slice(taken[0].num_rows)
        while missing:
            table = next(self._slices, None)
            if table is None:
                raise OSError("it has fewer rows than its footer says")
            taken.append(table.slice(0, missing))
            self._left = table.slice(taken[-1].num_rows)
            missing -= taken[-1].num_rows
        self._row += num_rows
        return self._pyarrow.concat_tables(taken)
