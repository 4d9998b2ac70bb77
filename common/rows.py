"""Rows of text and label from CSV, TSV, JSON lines and Parquet; an unusable row is reported with
file and line.

Training reads its data here, and serving reads the rows that an exported model is measured on. From
top to bottom: the columns of text and label, what happens to unusable rows, the file formats, and
labelled rows for an existing model. Files that are too large for memory are read part by part in
:mod:`common.row_parts`, with the functions of this module.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import hashlib
import itertools
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from common.errors import UserError, first_line
from common.escaping import printable, some_of
from common.files import is_lfs_pointer
from common.problem_types import (
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    Label,
    ProblemType,
    UnknownLabel,
    UnusableRow,
)
from common.text import Text, counted
from common.text_files import Lines, TextFile, check_utf8

if TYPE_CHECKING:
    import pyarrow

SAMPLE_NEWS = Path(__file__).with_name("sample_news")
AG_NEWS_LABELS = ["World", "Sports", "Business", "Sci/Tech"]
FORMATS = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
# Each line of such a file is a text; it has no labels.
PLAIN_TEXT_FORMAT = ".txt"
_SEPARATORS = ",;\t"
# The first line that Excel reads, and writes, to name the separator.
_SEPARATOR_LINE = re.compile(r'"?sep=([^"\r\n])"?\s*$', re.IGNORECASE)
# As `datasets` and Spark name the files of one split.
_SHARD = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})")
MOST_NAMED = 10
REPEATED_HEADER = "repeats the header; was another file appended? Delete the line"
_LONGEST_NAME = 30

# A long document is one field; csv's own limit is 131,072 characters.
csv.field_size_limit(2**31 - 1)

# A row before its label is known to be a class: its position, its text or pair of texts, its label
# as found.
FoundRow = tuple[str, Any, Any]
# The positions of the columns of the text, of the label and, of pairs, of the second text.
Positions = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns that hold the text, the label and, of pairs of texts, the second
    text; of texts without labels only the first.

    A text may be in several columns, whose names are separated by commas, such as ``title,body``:
    they are joined. So may the labels of a text: then each column is named as a label, and says
    with 0 or 1 whether it applies.
    """

    text: str = "text"
    label: str = "label"
    pair: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.text, self.label, self.pair)))

    def without_label(self) -> Columns:
        """For texts alone: the reader finds the second text behind the label, so where there is
        one, its column stands for the label, and what it says there is ignored.
        """
        return Columns(self.text, self.pair.partition(",")[0], self.pair)

    def _parts(self, found: Sequence[str]) -> list[list[str]]:
        """The columns of each of :attr:`names`; a single column may have a comma in its name."""
        # The data decides what a comma in a name means, so a column called "title,body" is found
        # too.
        names = [name.strip().lower() for name in found]
        is_one = [name.strip().lower() in names for name in self.names]
        return [
            [name.strip()] if one else [part.strip() for part in name.split(",")]
            for name, one in zip(self.names, is_one, strict=True)
        ]

    def missing(self, found: Sequence[str]) -> str:
        """Which of them are missing from the names found, ignoring case; empty if all are there."""
        names = [name.strip().lower() for name in found]
        missing = [
            name for name in itertools.chain(*self._parts(found)) if name.lower() not in names
        ]
        if not missing:
            return ""
        named = some_of(found, lambda name: printable(name.strip()[:_LONGEST_NAME], keep=""))
        return f"no column {' and no column '.join(missing)} among {named}"

    def among(self, found: Sequence[str]) -> Positions:
        """Their positions among the names found, ignoring case: text, label and, of pairs, the
        second text.

        Raises:
            ValueError: one is missing, or is there twice.
        """
        if missing := self.missing(found):
            raise ValueError(missing)
        names = [name.strip().lower() for name in found]
        for name in itertools.chain(*self._parts(found)):
            if (count := names.count(name.lower())) > 1:
                raise ValueError(f"{count} columns are named {name}; rename one")
        return tuple(
            tuple(names.index(name.lower()) for name in parts) for parts in self._parts(found)
        )


TEXT_AND_LABEL = Columns()


@dataclass(frozen=True, slots=True)
class Layout:
    """How a delimited text file is laid out.

    ``positions``: the positions of text, label and second text in a row, or None for AG News'
    layout (class, title, description), which has no header. ``first``: the line of the header, or
    of the first row if there is none. ``surplus``: how many empty fields each row has behind those
    of the header, because its lines end with a separator. ``spaced``: a space follows each
    separator.
    """

    separator: str
    positions: Positions | None
    header: tuple[str, ...] = ()
    first: int = 0
    surplus: int = 0
    spaced: bool = False
    quotes: bool = True

    @property
    def unused(self) -> tuple[str, ...]:
        """The names of the columns that are not read."""
        used = set(itertools.chain(*(self.positions or ())))
        return tuple(name for i, name in enumerate(self.header) if i not in used and name)

    @property
    def num_named(self) -> int:
        """How many columns there are up to the last one that has a name."""
        return max(i + 1 for i, name in enumerate(self.header) if name)

    @property
    def start(self) -> int:
        """The line at which the rows begin."""
        return self.first + bool(self.positions)

    def cells(self, fields: list[str]) -> list[str]:
        """What a row has under the header: all of it, or it cannot be used.

        Raises:
            UnusableRow: a field too many or too few, text in a column without a name, or the header
                once more.
        """
        width = len(self.header)
        # Files that were appended to each other have the header again in the middle, with the byte
        # order mark of the second file.
        if tuple(field.strip(' \ufeff"').lower() for field in fields[:width]) == tuple(
            map(str.lower, self.header)
        ):
            raise UnusableRow(REPEATED_HEADER)
        quote = f"a text with {self.separator!r} in it needs quotes"
        # A row may be without the columns that have no name, unless the first row shows that each
        # line ends in separators: then one that has fewer was torn apart.
        fewest = width + self.surplus if self.surplus else self.num_named
        if not fewest <= len(fields) <= width + self.surplus:
            expected = f"the header has {width}"
            if self.surplus:
                expected += f" and the first row {width + self.surplus}"
            raise UnusableRow(f"{len(fields)} fields, but {expected}; {quote}")
        if any(field.strip() for field in fields[self.num_named :]):
            raise UnusableRow(f"text in a column that has no name in the header; {quote}")
        return [*fields[:width], *[""] * (width - len(fields))]


def separators(suffix: str) -> str:
    """The possible separators; what is tried first also decides files of one column."""
    return "\t,;" if suffix == ".tsv" else _SEPARATORS


def find_layout(lines: Lines, columns: Columns, suffix: str) -> Layout | None:
    """Find the separator and the columns from a file's first lines; None if it is empty.

    Raises:
        ValueError: it has no such columns, and does not begin with a row in AG News' layout.
    """
    filled = (i for i, line in enumerate(lines) if line.strip())
    first, candidates = next(filled, None), separators(suffix)
    if first is not None and (hint := _SEPARATOR_LINE.match(lines[first])):
        first, candidates = next(filled, None), hint[1]
    if first is None:
        return None
    # From here on the order matters: what quotes mean depends on the separator, whether spaces
    # belong to fields on the quotes, and how many fields a row has on all of them.
    layout = replace(_layout_of(lines[first], columns, candidates), first=first)
    quotes = layout.separator != "\t" or not quotes_are_text(
        lines, first, has_header=bool(layout.positions)
    )
    layout = replace(layout, quotes=quotes)
    layout = replace(layout, spaced=_is_spaced(lines, layout))
    return replace(layout, surplus=_surplus(lines, layout, columns)) if layout.positions else layout


def _is_spaced(lines: Lines, layout: Layout) -> bool:
    """Whether a space follows each separator, as the header or the first row shows.

    It matters for quotes: one behind a space only opens a field if the space is not part of it.
    """
    separator, header = re.escape(layout.separator), lines[layout.first]
    if layout.positions and re.search(rf"{separator} +\S", header):
        return True
    begin = header + next(iter(_lines_from(lines, layout.first + 1)), "")
    return layout.quotes and bool(re.search(rf'{separator} +"', begin))


def _surplus(lines: Lines, layout: Layout, columns: Columns) -> int:
    """How many fields the first row has behind those of the header, if they are all empty."""
    records = csv_records("", lines, layout, Reading(columns, skip=True))
    row = next((fields for _, fields in records if fields), [])
    surplus = row[len(layout.header) :]
    return 0 if any(field.strip() for field in surplus) else len(surplus)


def first_filled(lines: Lines) -> int:
    """The first line that is not blank, of a file that has one."""
    return next(i for i, line in enumerate(lines) if line.strip())


def _layout_of(line: str, columns: Columns, candidates: str) -> Layout:
    """The separator and the columns that a first line names."""
    rows = {
        separator: next(
            csv.reader([line], delimiter=separator, skipinitialspace=separator != "\t"), []
        )
        for separator in candidates
    }
    # The columns are known by name, so the separator that shows all of them is the right one.
    for separator, fields in rows.items():
        if not columns.missing(fields):
            header = tuple(field.strip() for field in fields)
            return Layout(separator, columns.among(fields), header)
    if columns in (Columns(), Columns(label="")) and (separator := _ag_news_separator(rows)):
        return Layout(separator, None)
    check_utf8(line)
    fields = max(rows.values(), key=len)
    hint = ""
    if any(map(_is_no_name, fields)):
        hint = " (the first line must be a header such as text,label)"
    raise ValueError(columns.missing(fields) + hint)


def _ag_news_separator(rows: dict[str, list[str]]) -> str:
    """The separator that makes a line a row of AG News' layout: a class number, then texts."""
    for separator, fields in rows.items():
        if len(fields) > 1 and fields[0].strip().isdecimal():
            # pandas writes such a header for a table whose columns have no names.
            if fields == [str(i) for i in range(len(fields))]:
                raise ValueError(f"the header only numbers the columns: {', '.join(fields)}")
            return separator
    return ""


def _is_no_name(field: str) -> bool:
    """Whether a field of a first line cannot name a column: it is a number, or has many words.

    "no column text among 0.0, a fine lamp" would not say that the header is missing.
    """
    return bool(re.fullmatch(r"-?\d+(\.\d*)?", field.strip())) or len(field.split()) > 3


class Reading:
    """Which columns are read, and what happens to unusable rows: the first one ends the reading, or
    all of them are left out and counted.

    Args:
        columns: of text and label.
        skip: leave out unusable rows.
        flag: the flag that names the file, for error messages.
        remedy: what to do if the columns are missing.
        problem_type: what labels are.
        new_texts: an empty list for the texts of a split, or what takes its place if they do not
            fit into memory.
        keeps_origins: remember where each usable row of a split is.
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
        keeps_origins: bool = False,
    ) -> None:
        self.columns = columns
        self.skip = skip
        self.flag = flag
        self.remedy = remedy
        self.problem_type = problem_type
        self.new_texts = new_texts
        self.keeps_origins = keeps_origins
        self.origins: list[str] = []  # of the usable rows of the split that was read last
        self.unused: dict[str, None] = {}  # names of columns, in the order in which they were met
        self.count = 0
        self.named: list[str] = []
        self.lost: Counter[Label] = Counter()  # how many rows of each label were left out
        # The classes that the first file to declare any declares.
        self.declared: list[str] | None = None
        self.without_header: dict[str, list[str]] = {}  # how their classes are named, and files
        self.hint = ""  # what else to do if a file has no labels

    def reject(self, where: str, why: str, rows: int = 1, *, label: Any = None) -> None:
        """Stop at a row, or leave it out; ``label``: what its cell says, where it could be read."""
        if not self.skip:
            raise UserError(f"{where}: {why}", code="row-unusable")
        self.count += rows
        # A row with an unusable text still shows which class loses a row. Of numbers nothing is
        # lost, because they are no classes.
        with contextlib.suppress(UnusableRow):
            found = self.problem_type.read_label(self.label_of(label))
            if not isinstance(found, float):
                self.lost.update([found] if isinstance(found, str) else found)
        if len(self.named) < MOST_NAMED:
            self.named.append(f"{where}: {why}")

    def usable(
        self, what: str, rows: Iterable[FoundRow], labels: Collection[str] = (), hint: str = ""
    ) -> tuple[Sequence[Text], Sequence[Label]]:
        """The texts and the labels of the usable rows.

        Args:
            what: the file or split they are from.
            rows: as they are read; the format's reader has already rejected what is not a row.
            labels: the allowed labels; empty to allow any.
            hint: what to do if the rows have no labels.

        Raises:
            UserError: there are none, or more were left out than remain, in all or of one label.
        """
        self.hint, self.lost = f"; {hint}" if hint else "", Counter()
        before, usable, self.origins = self.count, self.new_texts(), []
        found: Any = array("d") if self.problem_type is REGRESSION else []
        names: dict[Label, Label] = {}
        for where, text, label in rows:
            if problem := text_problem(_cells_of(text)):
                self.reject(where, problem, label=label)
                continue
            try:
                read = self.problem_type.read_label(self.label_of(label), labels)
            except UnusableRow as error:
                # A label that training does not have is no class that could be lost.
                lost = None if isinstance(error, UnknownLabel) else label
                self.reject(where, str(error) + self.hint, label=lost)
                continue
            usable.append(text)
            if self.keeps_origins:
                self.origins.append(where)
            # One object for all rows that have the label: millions of equal strings would take
            # more memory than the labels are worth.
            found.append(read if isinstance(found, array) else names.setdefault(read, read))
        self._check_enough(what, self.count - before, len(usable))
        self._check_lost(what, found, labels)
        return usable, found

    def _check_enough(self, what: str, left_out: int, used: int) -> None:
        if left_out > used:
            raise UserError(
                f"{self.flag} {what}: {left_out:,} of {left_out + used:,} rows cannot be used, "
                f"which is more than half; {self.named[0]}",
                code="rows-mostly-unusable",
            )
        if not used:
            raise UserError(f"{self.flag} {what}: holds no rows", code="data-empty")

    def _check_lost(self, what: str, found: Sequence[Label], labels: Collection[str]) -> None:
        """Leaving rows out must not change which classes there are."""
        if not self.lost:
            return
        kept = Counter(
            itertools.chain.from_iterable([one] if isinstance(one, str) else one for one in found)
        )
        # As many rows of a label may be lost as are kept: the limit that holds for all rows too.
        # Labels that training does not have are no classes of this run.
        for label, count in self.lost.items():
            if count > kept[label] and (label in labels or not labels):
                raise UserError(
                    f"{self.flag} {what}: {count:,} of the {count + kept[label]:,} rows with the "
                    f"label {label!r} cannot be used, and leaving them out would take most of that "
                    f"class away; {self.named[0]}",
                    code="rows-mostly-unusable",
                )

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
                f"--label_column {self.columns.label}: only --task multi_label reads several "
                "columns of 0 and 1",
                code="flags-conflict",
            )
        names = [name.strip() for name in self.columns.label.split(",")]
        return [name for name, cell in zip(names, found, strict=True) if _applies(name, cell)]

    def find_columns(self, where: str, found: Sequence[str]) -> list[list[str]]:
        """The names of the columns of text, label and second text as written in this file."""
        try:
            positions = self.columns.among(found)
        except ValueError as error:
            raise self.no_columns(where, error) from error
        used = set(itertools.chain(*positions))
        self.unused |= dict.fromkeys(name for i, name in enumerate(found) if i not in used)
        return [[found[position] for position in parts] for parts in positions]

    def note_no_header(self, file: str, class_names: Sequence[str] | None) -> None:
        named = "called by their numbers"
        if class_names:
            named = f"named {', '.join(class_names)} as in AG News"
        self.without_header.setdefault(named, []).append(file)

    def no_columns(self, where: str, error: ValueError) -> UserError:
        hint = self.hint if "no column " + self.columns.label in str(error) else ""
        remedy = "" if "rename" in str(error) else f"; {self.remedy}"
        return UserError(f"{where}: {error}{remedy}{hint}", code="data-columns")

    @property
    def notes(self) -> list[str]:
        """What was read without a header, and which columns were not read; the last note says how
        many rows were left out, and names the first.
        """
        names = [
            f"the file {files[0]} has no header line{' (like others)' * (len(files) > 1)}, so it "
            f"was read as class, title and description, and the classes are {named}; if that is "
            "wrong, give it a header such as "
            "label,text, or a classes.txt next to it that names the classes"
            for named, files in self.without_header.items()
        ]
        unused = [f"columns that are not used: {', '.join(self.unused)}"] if self.unused else []
        more = "" if self.count <= len(self.named) else " ..."
        verb = "was" if self.count == 1 else "were"
        left_out = f"{counted(self.count, 'row')} that cannot be used {verb} left out: "
        left_out += "; ".join(self.named) + more
        return [*names, *unused, *([left_out] if self.count else [])]


def read_file(
    path: Path, reading: Reading, label_names: Sequence[str] | None = None
) -> Iterator[FoundRow]:
    """The rows of a file, one by one.

    Args:
        path: ends in one of :attr:`Reading.formats`.
        reading: which columns are read, and what happens to unusable rows.
        label_names: what the class numbers of a file without a header mean; without them each is a
            name.

    Raises:
        UserError: the file cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix not in reading.formats:
        raise UserError(
            f"{reading.flag} {path}: must end in {', '.join(reading.formats)}; "
            'save a spreadsheet as "CSV UTF-8"',
            code="data-format",
        )
    try:
        if is_lfs_pointer(path):
            what = "is only a pointer of Git LFS to the file; run git lfs pull in its folder"
            raise UserError(f"{reading.flag} {path}: {what}", code="data-unreadable")
        if suffix == ".parquet":
            yield from _parquet_rows(path, reading)
            return
        with path.open("rb") as file:
            lines = Lines(TextFile(str(path), file))
            if suffix in (".csv", ".tsv"):
                yield from _csv_rows(path, lines, reading, label_names)
            else:
                row_of = _plain_row if suffix == PLAIN_TEXT_FORMAT else _json_row
                yield from _line_rows(path, lines, reading, row_of)
    except OSError as error:
        raise UserError(
            f"{reading.flag} {path}: {error.strerror or error}", code="data-unreadable"
        ) from error


def _csv_rows(
    path: Path, lines: Lines, reading: Reading, label_names: Sequence[str] | None
) -> Iterator[FoundRow]:
    layout = _layout_for(path, lines, reading)
    if layout is None:
        return
    reading.unused |= dict.fromkeys(layout.unused)
    if not layout.positions and not path.with_name("classes.txt").is_file():
        reading.note_no_header(path.name, label_names)
    for line, fields in csv_records(path, lines, layout, reading):
        lines.place_after(line)
        if not fields:
            continue
        where, label = f"{path} line {line}", _leading_label(fields, layout.positions)
        try:
            text, label = (
                _headed_row(layout.cells(fields), layout.positions)
                if layout.positions
                else _ag_row(fields, label_names)
            )
            # The columns that are not read count too: scoring passes them on, and one rule says
            # for both which rows can be used.
            check_utf8("".join(fields))
        except UnusableRow as error:
            reading.reject(where, str(error), label=label)
        else:
            yield where, text, label


def _layout_for(path: Path, lines: Lines, reading: Reading) -> Layout | None:
    try:
        layout = find_layout(lines, reading.columns, path.suffix.lower())
    except ValueError as error:
        raise reading.no_columns(f"{path} line {first_filled(lines) + 1}", error) from error
    if layout and layout.positions:
        try:
            check_utf8(lines[layout.first])
        except ValueError as error:
            where = f"{path} line {layout.first + 1}"
            raise UserError(f"{where}: {error}", code="data-unreadable") from error
    return layout


def quotes_are_text(lines: Lines, first: int, *, has_header: bool) -> bool:
    """Whether the quotes in a TSV, whose first row or header is line ``first``, belong to its
    texts.

    Some programs put quotes around fields, as in CSV, others write texts as they are, quotes
    included. The file does not say which, so all of it is read both ways: the right one leaves
    fewer malformed records, or else joins no lines.
    """
    # Most files have no field that begins with a quote, and then they are read only once here.
    num_fields = lines[first].count("\t") + 1
    with lines.from_start() as again:
        for number, line in enumerate(again, start=1):
            again.place_after(number)
            if line.startswith('"') or '\t"' in line:
                break
        else:
            return False

    # Counted and not kept: of a large file, the records of either way may not fit into memory.
    def misfit(*, quotes: bool) -> tuple[int, int]:
        reading, malformed, records = Reading(TEXT_AND_LABEL, skip=True), 0, 0
        with lines.from_start() as again:
            layout = Layout("\t", ((0,),) if has_header else None, first=first, quotes=quotes)
            for line, fields in csv_records("", again, layout, reading):
                again.place_after(line)
                records += bool(fields)
                malformed += bool(fields) and len(fields) != num_fields
        return malformed + reading.count, -records

    return misfit(quotes=False) < misfit(quotes=True)


def csv_records(
    name: Path | str, lines: Sequence[str], layout: Layout, reading: Reading, start: int = 0
) -> Iterator[tuple[int, list[str]]]:
    """The line number at which each record ends, and its fields; blank lines and rejected ones have
    none.

    A record that cannot be parsed only costs its first line, because a stray quote would swallow
    the good rows after it. ``start``: the line to begin at, if it is not the first row's.
    """
    dialect: dict[str, Any] = {
        "delimiter": layout.separator,
        "skipinitialspace": layout.spaced,
        "strict": True,
        "quoting": csv.QUOTE_MINIMAL if layout.quotes else csv.QUOTE_NONE,
    }
    # `strict`, because csv would otherwise accept text behind a closing quote and so join rows
    # without a word.
    start = max(start, layout.start)
    # After an error a new reader begins at the line behind the one where the broken record began:
    # the reader itself has gone on to wherever it found the record's end.
    while True:
        reader, done = csv.reader(_lines_from(lines, start), **dialect), 0
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


def ag_news_classes(path: Path) -> list[str] | None:
    """AG News' classes if a file is one of AG News' own: no header, but class, title and
    description, and exactly the classes 1 to 4. Anything else without a header is other data.
    """
    if path.suffix.lower() not in (".csv", ".tsv"):
        return None
    classes: set[str] = set()
    try:
        with path.open("rb") as file:
            lines = Lines(TextFile(str(path), file))
            layout = find_layout(lines, TEXT_AND_LABEL, path.suffix.lower())
            if layout is None or layout.positions:
                return None
            reading = Reading(TEXT_AND_LABEL, skip=True)
            for line, fields in csv_records(path, lines, layout, reading):
                lines.place_after(line)
                if fields and not _may_be_ag_news(fields):
                    return None
                classes.update(fields[:1] if len(fields) == 3 else ())
    except (OSError, ValueError, UserError):  # reading the rows says it
        return None
    return AG_NEWS_LABELS if len(set(map(str.strip, classes))) == len(AG_NEWS_LABELS) else None


def _may_be_ag_news(fields: list[str]) -> bool:
    return len(fields) <= 3 and fields[0].strip() in ("1", "2", "3", "4")


def class_names_beside(file: Path) -> list[str] | None:
    """What the class numbers of AG News' layout mean, from a ``classes.txt`` beside the file."""
    path = file.with_name("classes.txt")
    if not path.is_file():
        return None
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: must be UTF-8 text ({first_line(error)}); save it as such",
            code="data-unreadable",
        ) from error
    return [line.strip() for line in lines if line.strip()]


def _leading_label(fields: list[str], positions: Positions | None) -> str | None:
    """The label of a row that may be torn apart, if it is in front of the text."""
    if not positions:
        return fields[0]
    if len(positions) < 2 or len(positions[1]) > 1:
        return None
    # Behind the text, all fields have moved by as many columns as it has separators in it.
    position = positions[1][0]
    return fields[position] if position <= min(positions[0]) and position < len(fields) else None


def _headed_row(cells: list[str], positions: Positions) -> tuple[Any, Any]:
    # csv takes a quote behind a space for a character of the field, so the label would be another
    # than the same label without the space.
    for position in positions[1] if len(positions) > 1 else ():
        if cells[position].startswith(" ") and re.fullmatch(
            r'\s*".*"\s*', cells[position], re.DOTALL
        ):
            raise UnusableRow(
                f"a space before the quote of the label {cells[position].strip()}; delete it"
            )
    return text_and_label(*([cells[position] for position in parts] for parts in positions))


def _cells_of(text: Any) -> tuple[Any, ...]:
    """A row's text, or both texts of a pair; they may be something else than strings."""
    return text if isinstance(text, tuple) else (text,)


def text_problem(texts: Sequence[Any]) -> str:
    """What is wrong with the text of a row, or with one of a pair; empty if nothing is."""
    for name, text in zip(("text", "second text"), texts, strict=False):
        if not isinstance(text, str):
            return f"the {name} is not a string"
        if not text.strip():
            return f"the {name} is empty"
    return ""


def text_and_label(*cells: Sequence[Any]) -> tuple[Any, Any]:
    """Text or pair, and label, from the cells of text, label (None without) and second text."""
    text, *pair = [joined(columns) for columns in (*cells[:1], *cells[2:])]
    labels = cells[1] if len(cells) > 1 else [None]
    return ((text, *pair) if pair else text), labels[0] if len(labels) == 1 else tuple(labels)


# pandas makes floats of a column of 0 and 1 that once had gaps.
_YES_AND_NO = {"1": True, "0": False, "true": True, "false": False, "1.0": True, "0.0": False}


def _applies(name: str, cell: Any) -> bool:
    try:
        return _YES_AND_NO[str(cell).strip().lower()]
    except KeyError:
        raise UnusableRow(f"{cell!r} in the column {name} must be 0 or 1") from None


class JoinedText(str):
    """A text of several cells with a space between; it remembers where the first one ends."""

    __slots__ = ("_length",)
    _length: int

    @classmethod
    def of(cls, parts: Sequence[str]) -> JoinedText:
        """Join the parts that are not empty."""
        present = [part for part in parts if part]
        text = cls(" ".join(present))
        text._length = len(present[0]) if present else 0
        return text

    @property
    def first(self) -> str:
        """The first cell that is not empty."""
        return self[: self._length]

    @property
    def rest(self) -> str:
        """The others."""
        return self[self._length + 1 :]


def joined(cells: Sequence[Any]) -> Any:
    """The cells that are not empty as one text; a cell that is no text stands for the whole."""
    if len(cells) == 1:
        return cells[0]
    # A cell that is a number makes the row unusable, as it does if it is the only cell.
    present = [cell for cell in cells if cell is not None]
    not_text = next((cell for cell in present if not isinstance(cell, str)), None)
    return JoinedText.of(present) if not_text is None else not_text


def _ag_row(fields: list[str], names: Sequence[str] | None) -> tuple[str, str]:
    numbers = f" 1-{len(names)}" if names else ""
    expected = f'rows without a header must be "class{numbers}","title","description"'
    if len(fields) < 2:
        raise UnusableRow(f"one field; {expected}")
    label = fields[0].strip()
    if not label.isdecimal():
        raise UnusableRow(f"label {label!r} is not a number; {expected}, so give the file a header")
    if names and not 1 <= int(label) <= len(names):
        raise UnusableRow(
            f"label {label} is out of range 1 to {len(names)}; {expected}, so give the file a "
            "header such as label,text, or a classes.txt next to it that names all classes"
        )
    return JoinedText.of(fields[1:]), names[int(label) - 1] if names else label


def _line_rows(
    path: Path,
    lines: Lines,
    reading: Reading,
    row_of: Callable[[str, Reading], tuple[Any, Any]],
) -> Iterator[FoundRow]:
    for number, line in enumerate(lines, start=1):
        lines.place_after(number)
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            text, label = row_of(line, reading)
        except UnusableRow as error:
            reading.reject(where, str(error))
        else:
            yield where, text, label


def _plain_row(line: str, reading: Reading) -> tuple[str, None]:
    check_utf8(line)
    return line.rstrip("\r\n"), None


def parse_json(line: str) -> Any:
    """What one of the JSON lines holds.

    Raises:
        UnusableRow: it is not JSON, or more than Python can hold.
    """
    check_utf8(line)
    try:
        found = json.loads(line, object_pairs_hook=_without_repeats)
        if _is_header(found):
            raise UnusableRow(REPEATED_HEADER)
        return _with_whole_characters(found) if "\\ud" in line.lower() else found
    except UnusableRow:  # it is a ValueError too, and says more than the last of these
        raise
    except json.JSONDecodeError as error:
        if line.lstrip().startswith("["):
            raise UnusableRow(f"a JSON array over several lines; {_ONE_OBJECT}") from error
        raise UnusableRow(
            f"not valid JSON ({error.msg}); each line must hold one object"
        ) from error
    except RecursionError as error:
        raise UnusableRow("JSON that is nested too deep") from error
    except ValueError as error:
        raise UnusableRow("JSON with a number of too many digits") from error


def _is_header(row: Any) -> bool:
    """Whether each value is its own name, as where a CSV with a header inside was converted."""
    return isinstance(row, dict) and len(row) > 1 and all(key == row[key] for key in row)


def _with_whole_characters(found: Any) -> Any:
    """Half a character, spelt as an escape such as \\ud83d, is text that no file can hold."""
    text = json.dumps(found, ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


_ONE_OBJECT = (
    "each line must hold one object (as pandas writes with "
    "to_json(FILE, orient='records', lines=True), or jq with "
    "-c '.[]')"
)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(
            name for name, count in Counter(name for name, _ in pairs).items() if count > 1
        )
        raise UnusableRow(f"two values are named {twice}; rename one")
    return row


def _json_row(line: str, reading: Reading) -> tuple[Any, Any]:
    row = parse_json(line)
    if not isinstance(row, dict):
        what = (
            f"; it holds a JSON array, but {_ONE_OBJECT}"
            if isinstance(row, list) and len(row) > 1
            else ""
        )
        raise UnusableRow(f"must be an object with text and label{what}")
    try:
        positions = reading.columns.among(names := list(row))
    except ValueError as error:
        raise UnusableRow(str(reading.no_columns("", error)).removeprefix(": ")) from error
    used = set(itertools.chain(*positions))
    reading.unused |= dict.fromkeys(name for i, name in enumerate(names) if i not in used)
    return text_and_label(*([row[names[position]] for position in parts] for parts in positions))


def open_parquet(
    name: Path | str, source: Path | BinaryIO, **options: Any
) -> tuple[pyarrow.parquet.ParquetFile, tuple[type[Exception], ...]]:
    """Open a Parquet file; returns with it what its methods raise if the rest cannot be read.

    Raises:
        UserError: it is no such file, or pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        what = "reading Parquet needs pyarrow: pip install pyarrow"
        raise UserError(f"{name}: {what}", code="data-format") from None
    unreadable = (pyarrow.ArrowException, OSError, UnicodeDecodeError)
    try:
        file = pyarrow.parquet.ParquetFile(source, page_checksum_verification=True, **options)
        _ = file.schema_arrow  # it fails here if the schema is damaged
    except unreadable as error:
        what = f"not a readable Parquet file ({first_line(error)}); copy it again"
        raise UserError(f"{name}: {what}", code="data-unreadable") from error
    return file, unreadable


def _parquet_rows(path: Path, reading: Reading) -> Iterator[FoundRow]:
    file, unreadable = open_parquet(path, path)
    columns = reading.find_columns(str(path), file.schema_arrow.names)
    classes = None
    if reading.columns.label:
        classes = _declared_classes(file.schema_arrow.metadata, columns[1])
    reading.declared = reading.declared or classes
    # One row group at a time, because a file may be larger than memory. A damaged one costs its
    # rows, but the others can still be read.
    first = 1
    for group in range(file.num_row_groups):
        end = first + file.metadata.row_group(group).num_rows
        try:
            cells = _cells_of_group(file, group, columns)
        except unreadable as error:
            where, why = f"{path} rows {first} to {end - 1}", first_line(error)
            reading.reject(where, f"cannot be read ({why})", end - first)
        else:
            for number, row in enumerate(zip(*cells, strict=True), start=first):
                if classes:
                    row = (row[0], [named_class(cell, classes) for cell in row[1]], *row[2:])
                yield f"{path} row {number}", *text_and_label(*row)
        first = end


def _cells_of_group(
    file: pyarrow.parquet.ParquetFile, group: int, columns: list[list[str]]
) -> list[Iterator[tuple[Any, ...]]]:
    """Of each of text, label and second text, the cells of its columns row by row."""
    table = file.read_row_group(group, columns=[*dict.fromkeys(itertools.chain(*columns))])
    return [zip(*(table[name].to_pylist() for name in names), strict=True) for names in columns]


def _declared_classes(
    metadata: dict[bytes, bytes] | None, columns: Sequence[str]
) -> list[str] | None:
    """The class names that `datasets` writes into Parquet for a column of numbers or lists."""
    # Anyone may have written this metadata; if it is not as expected, no classes are declared.
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        feature = features[columns[0]] if len(columns) == 1 else {}
        names = (feature.get("feature", feature) if isinstance(feature, dict) else feature[0]).get(
            "names"
        )
    except (KeyError, ValueError, TypeError, IndexError, AttributeError):
        return None
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if are_names else None


def named_class(label: Any, names: Sequence[str] | None) -> Any:
    """The name of a class number, or of each in a list; -1 is how `datasets` says none."""
    if not names or isinstance(label, list):
        return [named_class(one, names) for one in label] if names else label
    if label == -1 and isinstance(label, int):
        return None
    return names[label] if isinstance(label, int) and 0 <= label < len(names) else label


# What is right for a text: the id of its class, the ids of the labels that apply, or a number.
Target = int | tuple[int, ...] | float


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Texts with what is right for each.

    ``name``: the file they are from. ``texts``: as found, not cleaned; pairs if their columns have
    a second text. ``training_texts``: those of a folder's training rows, if it has others than these.
    """

    name: str
    texts: list[Text]
    targets: list[Target]
    training_texts: list[Text]


def find_rows(model_dataset: str | None, problem_type: ProblemType = SINGLE_LABEL) -> Path:
    """The rows to measure on if none are given: the model's own dataset if it is here, otherwise
    the sample news, which have one label each.

    Raises:
        UserError: neither is available.
    """
    sample = [SAMPLE_NEWS] if problem_type is SINGLE_LABEL else []
    for path in ([Path(model_dataset)] if model_dataset else []) + sample:
        if (path.is_file() and path.suffix in FORMATS) or split_files(path).get("test"):
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

    ``path`` is a file, or a folder with ``test.csv`` (else ``train.csv``), or the same of another
    format. ``limit`` takes so many rows, evenly spread.

    Raises:
        UserError: nothing is there, a row cannot be used, or the model has no such label; with file
            and line.
    """
    files, training_files = _files_to_measure(path)
    class_of = {label: class_id for class_id, label in enumerate(labels)}
    texts: list[Text] = []
    targets: list[Target] = []
    for where, text, cell in _rows_of_model(files, labels, columns, problem_type):
        texts.append(text)
        targets.append(_target(where, cell, class_of, problem_type))
    if not texts:
        raise UserError(f"{files[0]}: holds no labelled text", code="data-empty")
    rows = _rows_of_model(training_files, labels, columns, problem_type)
    training = [text for _, text, _ in rows]
    chosen = evenly_spread(len(texts), limit)
    return LabelledRows(
        str(files[0]), [texts[i] for i in chosen], [targets[i] for i in chosen], training
    )


def read_texts(path: Path, reading: Reading) -> Sequence[Text]:
    """The texts of a file, or of all files in a folder. ``reading`` has columns without a label,
    and PLAIN_TEXT as the problem type.

    Raises:
        UserError: nothing is there, or a row cannot be used; with file and line.
    """
    files = [path]
    if not path.is_file():
        files = sorted(one for one in path.glob("*") if one.suffix in reading.formats)
    if not files:
        what = f"the folder has no file that ends in {', '.join(reading.formats)}"
        what = what if path.is_dir() else "no such file or folder"
        raise UserError(f"{reading.flag} {path}: {what}", code="data-not-found")
    rows = itertools.chain.from_iterable(read_file(file, reading) for file in files)
    return reading.usable(str(path), rows)[0]


def _files_to_measure(path: Path) -> tuple[list[Path], list[Path]]:
    """The files to measure on, and a folder's training files if it has others than these."""
    if path.is_file():
        return [path], []
    splits = split_files(path)
    training = splits.get("train", [])
    files = splits.get("test") or training
    if not files:
        what = "holds no test.csv or test.jsonl" if path.is_dir() else "no such file or folder"
        raise UserError(
            f"{path}: {what}; --rows names a folder with test.csv, a CSV or JSONL file",
            code="data-not-found",
        )
    check_shards("train" if files == training else "test", files)
    return files, [] if files == training else training


@contextlib.contextmanager
def _naming_the_row(where: str) -> Iterator[None]:
    """Say in one line what is wrong with the label of a row to measure, which is never left out."""
    try:
        yield
    except UnknownLabel as error:
        what = str(error).replace("the training labels", "the model's labels")
        raise UserError(f"{where}: {what}", code="label-unknown") from error
    except UnusableRow as error:
        raise UserError(f"{where}: {error}", code="row-unusable") from error


def _target(where: str, cell: Any, class_of: dict[str, int], problem_type: ProblemType) -> Target:
    with _naming_the_row(where):
        label = problem_type.read_label(cell, class_of)
    if isinstance(label, float):
        return label
    return class_of[label] if isinstance(label, str) else tuple(class_of[name] for name in label)


def hash_of(rows: Iterable[Sequence[Any]]) -> str:
    """SHA-256 of rows in their order, one JSON list per line: the text or texts, and what is right
    if that is known.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, ensure_ascii=True).encode() + b"\n")
    return digest.hexdigest()


def public_name(dataset: str) -> str:
    """Of a path only the end: the folder above it is nobody's business in a published model."""
    return "/".join(Path(dataset).parts[-2:])


def evenly_spread(count: int, limit: int | None) -> list[int]:
    """The positions of at most ``limit`` of so many rows, evenly spread; None takes all."""
    wanted = min(count, limit or count)
    return [i * count // wanted for i in range(wanted)]


def split_files(folder: Path, formats: Sequence[str] = FORMATS) -> dict[str, list[Path]]:
    """A folder's files of rows by the names of their splits, which are those of the files without
    suffix. Several files make up a split if they are its shards, such as
    ``train-00000-of-00002.csv``.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*")):
        if path.suffix in formats and path.name != "classes.txt" and path.is_file():
            found.setdefault(
                shard[1] if (shard := _SHARD.fullmatch(path.stem)) else path.stem, []
            ).append(path)
    return found


def check_shards(split: str, paths: Sequence[Path]) -> None:
    """Refuse a split of several files that are not all of its shards.

    Raises:
        UserError: a shard is missing, or the split is there in two formats.
    """
    is_one_file = len(paths) == 1 and not _SHARD.fullmatch(paths[0].stem)
    if not is_one_file and not _are_all_shards(paths):
        raise UserError(
            f"{paths[0].parent}: of the split {split} it has "
            f"{some_of([path.name for path in paths])}, which is not one file, nor all shards in "
            "one format; name the file that you mean, or complete the shards",
            code="data-unreadable",
        )


def _are_all_shards(paths: Sequence[Path]) -> bool:
    shards = [shard for path in paths if (shard := _SHARD.fullmatch(path.stem))]
    numbers = {(int(shard[2]), int(shard[3])) for shard in shards}
    expected = {(i, len(paths)) for i in range(len(paths))}
    return numbers == expected and len({path.suffix for path in paths}) == 1


def other_shards(path: Path) -> list[Path]:
    """The files that hold the rest of the split of which a file is one shard."""
    if not (shard := _SHARD.fullmatch(path.stem)):
        return []
    return [
        one for one in path.parent.glob(f"{glob.escape(shard[1])}-*-of-{shard[3]}.*") if one != path
    ]


def _rows_of_model(
    files: Sequence[Path], labels: Sequence[str], columns: Columns, problem_type: ProblemType
) -> Iterator[tuple[str, Text, Any]]:
    remedy = "the columns must have the same names as in training"
    reading = Reading(columns, skip=False, flag="--rows", remedy=remedy, problem_type=problem_type)
    # Numbers without a header mean AG News' classes to a model that answers with these.
    names = AG_NEWS_LABELS if labels and set(labels) <= set(AG_NEWS_LABELS) else None
    rows = itertools.chain.from_iterable(
        read_file(file, reading, class_names_beside(file) or names) for file in files
    )
    for where, text, label in rows:
        parts = _cells_of(text)
        if not all(isinstance(part, str) for part in parts):
            raise UserError(f"{where}: the text is not a string", code="row-unusable")
        if all(part.strip() for part in parts):
            with _naming_the_row(where):
                label = reading.label_of(label)
            yield where, text, label
