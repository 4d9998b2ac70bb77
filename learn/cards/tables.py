"""Tables of numbers: the iris data next to this file, CSV files, CSV from an address."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import torch

from common.errors import UserError, first_line
from common.rows import TEXT_AND_LABEL, Layout, Reading, csv_records
from common.text_files import check_utf8, text_lines

READ_TIMEOUT = 30.0  # seconds
MAX_BYTES = 20 * 10**6
# Fisher's measurements of 150 irises of three species (1936), in the public domain, as scikit-learn
# ships them: from sklearn.datasets import load_iris; iris = load_iris(as_frame=True)
# iris.data.assign(species=iris.target_names[iris.target]).to_csv("learn/cards/iris.csv",
# index=False)
IRIS = Path(__file__).with_name("iris.csv")


@dataclass(frozen=True)
class Row:
    """The cells of a row, as text, and the line that it ends on."""

    line: int
    cells: list[str]


@dataclass(frozen=True)
class Table:
    """Rows of as many cells as there are columns; ``name`` is where they came from."""

    name: str
    columns: list[str]
    rows: list[Row]

    def features(self, row: Row, target: int) -> list[float]:
        """A row's numbers without the target's column.

        Raises:
            UserError: a cell is not a finite number (with line and column).
        """
        numbers = []
        for column, (name, cell) in enumerate(zip(self.columns, row.cells, strict=True)):
            if column == target:
                continue
            if not is_number(cell):
                raise UserError(
                    f"{self.name} line {row.line}, column {name}: {cell!r} is not a finite number "
                    "in fp32",
                    code="table-unusable",
                )
            numbers.append(float(cell))
        return numbers


def read_table(source: str, seconds: float = READ_TIMEOUT, max_bytes: int = MAX_BYTES) -> Table:
    """Read a table: ``iris``, a path, or an http, https or file address of a CSV.

    If all cells but one of its first line are numbers, as in UCI's files, there is no header, and
    the columns are numbered.

    Raises:
        UserError: it cannot be read, or is not a table (with the line).
    """
    where = str(IRIS) if source == "iris" else source
    rows = _read_csv(source, _fetch(where, seconds, max_bytes))
    # A header has names. One number among them may be a name, too, and one name may be a class.
    header, width = rows[0].cells, len(rows[0].cells)
    if sum(is_number(cell) for cell in header) >= max(1, width - 1):
        header = [f"column {number}" for number in range(width)]
    else:
        rows = rows[1:]
    for row in rows:
        if len(row.cells) != width:
            raise UserError(
                f"{source} line {row.line}: {len(row.cells)} cells, but the first line has {width}",
                code="table-unusable",
            )
    if not rows:
        raise UserError(f"{source}: holds no rows", code="table-unusable")
    return Table(source, [name.strip() for name in header], rows)


def is_address(source: str) -> bool:
    """Whether it is an address and not a path."""
    return source.startswith(("http://", "https://", "file://"))


def _fetch(source: str, seconds: float, max_bytes: int) -> bytes:
    reading: Future[bytes] = Future()

    def read() -> None:
        try:
            with (
                urlopen(source, timeout=seconds)
                if is_address(source)
                else Path(source).open("rb") as file
            ):
                # One byte more than allowed is enough to know that it is too large.
                reading.set_result(file.read(max_bytes + 1))
        except Exception as error:
            reading.set_exception(error)

    # A pipe that nothing is written to, or a server that sends a byte now and then, never ends, and
    # a timeout of the socket does not notice the latter. So the read has its own thread, which is
    # left behind when the time is up.
    threading.Thread(target=read, daemon=True).start()
    try:
        data = reading.result(seconds)
    except TimeoutError as error:
        problem = f"cannot be read (not complete within {seconds:g} s)"
        raise UserError(f"source_url {source}: {problem}", code="data-unreadable") from error
    except (OSError, HTTPException, ValueError) as error:
        problem = f"cannot be read ({first_line(error)})"
        raise UserError(f"source_url {source}: {problem}", code="data-unreadable") from error
    if len(data) > max_bytes:
        raise UserError(
            f"source_url {source}: has more than {max_bytes // 10**6} MB; use only some of its "
            "rows",
            code="table-unusable",
        )
    return data


def _read_csv(source: str, data: bytes) -> list[Row]:
    reading = Reading(TEXT_AND_LABEL, skip=False, flag="source_url")
    rows = []
    for line, cells in csv_records(source, text_lines(source, data), Layout(",", None), reading):
        try:
            check_utf8("".join(cells))
        except ValueError as error:
            raise UserError(f"{source} line {line}: {error}", code="table-unusable") from error
        # Blank lines at the end of a file are no rows.
        if any(cell.strip() for cell in cells):
            rows.append(Row(line, cells))
    if not rows:
        raise UserError(f"{source}: is empty", code="table-unusable")
    return rows


def is_number(cell: str) -> bool:
    """Whether it is a finite number in fp32."""
    # In fp32, because that is what the model computes in: 1e39 would become infinite there.
    try:
        return abs(float(cell)) <= torch.finfo(torch.float32).max
    except ValueError:
        return False
