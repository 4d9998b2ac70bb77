"""Rows with their answers as CSV, JSON lines or Parquet: parts, and the file that they become."""

from __future__ import annotations

import base64
import csv
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError, first_line
from common.problem_types import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ProblemType
from common.row_parts import JsonLinesParts, ParquetParts, Part, PartReader
from inference.engines.answering import NOTHING_MORE, Answering, Wanted

if TYPE_CHECKING:
    import pyarrow

FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
# The last digits of a float64 say nothing about a model, and would differ between processors. Of a
# number, whose unit may be anything, so many digits are kept from its first one on.
DIGITS, NUMBER_DIGITS = 6, 7
# The columns that each kind of model adds.
_DECIDED = {
    SINGLE_LABEL.name: ("label", "confidence"),
    MULTI_LABEL.name: ("labels",),
    REGRESSION.name: ("value",),
}
# A row group of the finished Parquet file: large enough to be read fast, small enough to be held.
_GROUP_ROWS, _GROUP_BYTES = 65_536, 32 * 2**20


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers, (rows, labels) with NaN for rows without one, and why these have none; how familiar
    the text of each row is, None where that is not known.
    """

    values: NDArray[np.float64]
    problems: dict[int, str]
    familiarity: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Added:
    """The columns that are added to those of the input: what their names begin with, whether each
    label's probability is one, whether rows may lack an answer, which then has a column for the
    reason, and what is asked for beside the answers.
    """

    prefix: str
    probabilities: bool
    errors: bool
    wanted: Wanted = NOTHING_MORE


class RowsOut:
    """Writes one input file's rows in one format.

    Args:
        name: of the input, for messages.
        suffix: of the output, one of `FORMATS`.
        reader: of the input.
        answering: of the model.
        columns: those that are added.
    """

    def __init__(
        self, name: str, suffix: str, reader: PartReader, answering: Answering, columns: Added
    ) -> None:
        self._name, self._suffix, self._answering = name, suffix, answering
        prefix, labels = columns.prefix, answering.labels if columns.probabilities else []
        self._wanted = columns.wanted
        # Without the prefix, the names of what an answer says.
        self._fields = [
            *_DECIDED[answering.problem_type.name],
            *_asked(columns.wanted, answering.problem_type),
        ]
        self._decided = [f"{prefix}{one}" for one in self._fields]
        self._prefix, self._error, self._object = prefix, f"{prefix}error", f"{prefix}probabilities"
        # Of the added columns those with text; the others hold numbers.
        names = ("label", "labels", "set", "abstained", "error")
        self._texts = {f"{prefix}{one}" for one in names}
        self._flat = [f"{prefix}probability_{label}" for label in labels]
        # JSON has objects, so there the probabilities are one field, as in the server's answer.
        flat = [self._object] if suffix == ".jsonl" and columns.probabilities else self._flat
        self.added = [*self._decided, *flat, *([self._error] if columns.errors else [])]
        self._columns = reader.columns
        self._refuse_taken(reader.columns)
        self._schema = self._schema_of(reader) if suffix == ".parquet" else None

    def _refuse_taken(self, names: Iterable[str]) -> None:
        if taken := [column for column in names if column in self.added]:
            what = f"has a column {taken[0]} already"
            remedy = "name the added ones with --prefix, such as predicted_"
            raise UserError(f"{self._name}: {what}; {remedy}", code="data-columns")

    def _schema_of(self, reader: PartReader) -> pyarrow.Schema:
        try:
            import pyarrow
        except ImportError:
            remedy = "pip install pyarrow, or name OUT .csv or .jsonl"
            message = f"writing Parquet needs pyarrow: {remedy}"
            raise UserError(message, code="data-format") from None
        if isinstance(reader, ParquetParts):
            return reader.schema.remove_metadata()
        fields = [(name, pyarrow.string()) for name in reader.columns]
        if isinstance(reader, JsonLinesParts):
            try:
                found = pyarrow.Table.from_pylist(reader.first_rows).schema
            except (pyarrow.ArrowException, TypeError, OverflowError) as error:
                raise self._no_table(error) from error
            # A column that is null in all of the first rows has no type yet; text is the likeliest.
            kinds = {
                field.name: pyarrow.string() if pyarrow.types.is_null(field.type) else field.type
                for field in found
            }
            fields = [(name, kinds[name]) for name in reader.columns]
        return pyarrow.schema(fields)

    def _no_table(self, error: Exception) -> UserError:
        what = f"rows of different kinds cannot be one table ({first_line(error)})"
        return UserError(f"{self._name}: {what}; name OUT .jsonl", code="row-unusable")

    def part(self, part: Part, answers: Answers) -> bytes:
        """A part's rows with their answers, to be kept until all parts are there."""
        if self._suffix == ".parquet":
            return self._parquet_part(part, answers)
        try:
            return self._text_part(part, answers)
        except (ValueError, OverflowError, RecursionError) as error:
            # Parquet can hold what Python cannot: a year above 9999, nanoseconds, text in another
            # encoding.
            last = part.end.rows
            which = f"rows {last - len(answers.values) + 1:,} to {last:,}"
            what = f"cannot all be written as {self._suffix} ({first_line(error)})"
            remedy = "leave them out" if isinstance(part.rows, list) else "name OUT .parquet"
            message = f"{self._name} {which}: {what}; {remedy}"
            raise UserError(message, code="row-unusable") from error

    def _text_part(self, part: Part, answers: Answers) -> bytes:
        rows = part.rows if isinstance(part.rows, list) else part.rows.to_pylist()
        added = self._answer_columns(answers)
        columns = list(zip(*added.values(), strict=True))
        if self._suffix == ".jsonl":
            # The first rows need not show all names: each row may have fields of its own.
            self._refuse_taken(itertools.chain(*rows))
            return "".join(
                _json({**row, **self._answer(dict(zip(added, answer, strict=True)))}) + "\n"
                for row, answer in zip(rows, columns, strict=True)
            ).encode()
        self._refuse_other_columns(rows)
        return self._csv(
            [*(_cell(row.get(name)) for name in self._columns), *map(_cell, answer)]
            for row, answer in zip(rows, columns, strict=True)
        )

    def _csv(self, rows: Iterable[list[Any]]) -> bytes:
        text, separator = io.StringIO(), "\t" if self._suffix == ".tsv" else ","
        minimal, quoted = (
            csv.writer(text, delimiter=separator, lineterminator="\n", quoting=quoting)
            for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
        )
        for row in rows:
            # Readers take a carriage return for the end of a row, but the writer only quotes its
            # own line end.
            has_return = any(isinstance(cell, str) and "\r" in cell for cell in row)
            (quoted if has_return else minimal).writerow(row)
        return text.getvalue().encode()

    def _answer(self, flat: dict[str, Any]) -> dict[str, Any]:
        """One row's answer as an object, like the server's; without one, the reason."""
        if flat.get(self._error) is not None:
            return {self._error: flat[self._error]}
        answer = {name: flat[name] for name in self._decided}
        if self._flat:
            named = zip(self._answering.labels, self._flat, strict=True)
            answer[self._object] = {label: flat[name] for label, name in named}
        return answer

    def _answer_columns(self, answers: Answers) -> dict[str, list[Any]]:
        answered = ~np.isnan(answers.values).any(axis=1)
        columns = self._decided_columns(answers.values, answered)
        if self._wanted is not NOTHING_MORE:
            columns = self._with_asked(columns, answers, answered)
        if self._suffix != ".jsonl":
            for name in {"labels", "set"} & columns.keys():
                joined = self._answering.joined
                columns[name] = [None if one is None else joined(one) for one in columns[name]]
        cells = {f"{self._prefix}{name}": columns[name] for name in self._fields}
        for number, name in enumerate(self._flat):
            cells[name] = _cells(np.round(answers.values[:, number], DIGITS).tolist(), answered)
        if self._error in self.added:
            cells[self._error] = [answers.problems.get(i) for i in range(len(answered))]
        return cells

    def _decided_columns(
        self, values: NDArray[np.float64], answered: NDArray[np.bool_]
    ) -> dict[str, list[Any]]:
        answering = self._answering
        if answering.problem_type is REGRESSION:
            return {"value": _cells(map(_number, values[:, 0].tolist()), answered)}
        if answering.problem_type is MULTI_LABEL:
            given = [[label for label, _ in answering.given(row)] for row in values.tolist()]
            return {"labels": _cells(given, answered)}
        # argmax takes NaN for the highest; those rows are blanked below.
        known = np.nan_to_num(values)
        labels = [answering.labels[label] for label in known.argmax(axis=1).tolist()]
        return {
            "label": _cells(labels, answered),
            "confidence": _cells(np.round(known, DIGITS).max(axis=1).tolist(), answered),
        }

    def _with_asked(
        self, columns: dict[str, list[Any]], answers: Answers, answered: NDArray[np.bool_]
    ) -> dict[str, list[Any]]:
        """The columns, and those that are asked for beside them; some change, such as the label
        where the model abstains.
        """
        # One row at a time, by the code that every other way to ask goes through: 4 microseconds,
        # while the forward pass of a text takes a thousand.
        rows = [
            self._answering.honest(values, familiarity, self._wanted) if is_answered else {}
            for values, familiarity, is_answered in zip(
                answers.values.tolist(), answers.familiarity, answered.tolist(), strict=True
            )
        ]
        for row in rows:
            if interval := row.get("interval"):
                row["interval_low"], row["interval_high"] = map(_number, interval)
        plain = {name: columns.get(name, [None] * len(rows)) for name in self._fields}
        found = {
            name: [row.get(name, cell) for row, cell in zip(rows, column, strict=True)]
            for name, column in plain.items()
        }
        for name in {"confidence", "familiarity"} & found.keys():
            rounded = np.round(np.array(found[name], dtype=np.float64), DIGITS)
            found[name] = _cells(rounded.tolist(), answered)
        return found

    def _refuse_other_columns(self, rows: Iterable[dict[str, Any]]) -> None:
        known = set(self._columns)
        for row in rows:
            if not row.keys() <= known:
                other = next(name for name in row if name not in known)
                what = f"a row has the field {other}, which the first rows lack"
                what += ", so there is no column for it"
                raise UserError(f"{self._name}: {what}; name OUT .jsonl", code="row-unusable")

    def _parquet_part(self, part: Part, answers: Answers) -> bytes:
        import pyarrow
        import pyarrow.parquet

        if isinstance(part.rows, list):
            self._refuse_other_columns(part.rows)
            try:
                table = pyarrow.Table.from_pylist(part.rows, schema=self._schema)
            except (pyarrow.ArrowException, TypeError, OverflowError) as error:
                raise self._no_table(error) from error
        else:
            table = part.rows.replace_schema_metadata()
        for name, column in self._answer_columns(answers).items():
            kind = pyarrow.string() if name in self._texts else pyarrow.float64()
            table = table.append_column(name, pyarrow.array(column, kind))
        data = io.BytesIO()
        pyarrow.parquet.write_table(table, data, compression="zstd")
        return data.getvalue()

    def assemble(self, parts: Iterable[bytes], file: BinaryIO) -> None:
        """Write the parts, in order, as one file; only a few of them are held at a time."""
        if self._suffix == ".parquet":
            _join_parquet(parts, file)
            return
        if self._suffix != ".jsonl":
            file.write(self._csv([[*self._columns, *self.added]]))
        for part in parts:
            file.write(part)


def _asked(wanted: Wanted, problem_type: ProblemType) -> Iterator[str]:
    """The names of the columns that are asked for beside the answers."""
    if wanted.rule is not None:
        is_number = problem_type is REGRESSION
        yield from ("interval_low", "interval_high") if is_number else ("set",)
    if wanted.point is not None:
        yield "abstained"
    if wanted.familiarity:
        yield "familiarity"


def _number(value: float) -> float:
    return float(f"{value:.{NUMBER_DIGITS}g}")


def _cells(column: Iterable[Any], answered: NDArray[np.bool_]) -> list[Any]:
    return [
        value if is_answered else None
        for value, is_answered in zip(column, answered.tolist(), strict=True)
    ]


def _join_parquet(parts: Iterable[bytes], file: BinaryIO) -> None:
    import pyarrow
    import pyarrow.parquet

    # A part has some 2,000 rows. As row groups of their own, each would be compressed and later
    # read on its own, so several are written as one.
    writer, held = None, []
    try:
        for data in parts:
            held.append(pyarrow.parquet.read_table(io.BytesIO(data), use_threads=False))
            writer = writer or pyarrow.parquet.ParquetWriter(
                file, held[0].schema, compression="zstd"
            )
            rows, size = sum(table.num_rows for table in held), sum(table.nbytes for table in held)
            if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
                writer.write_table(pyarrow.concat_tables(held), row_group_size=rows)
                held = []
        if writer and held:
            writer.write_table(pyarrow.concat_tables(held), row_group_size=_GROUP_ROWS)
    finally:
        if writer:
            writer.close()


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # dates, bytes or NaN, which JSON has not
        return json.dumps(_for_json(value), ensure_ascii=False, allow_nan=False)


def _for_json(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _for_json(one) for key, one in value.items()}
        case list() | tuple():
            return [_for_json(one) for one in value]
        case float():
            return value if math.isfinite(value) else None
        case bytes():
            return base64.b64encode(value).decode()
        case None | bool() | int() | str():
            return value
    return str(value)


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        return _json(value)
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
