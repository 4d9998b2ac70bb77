"""Tables of numbers: the iris data that scikit-learn ships, CSV files, CSV from an address."""

from __future__ import annotations

import csv
import io
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import torch

from common.errors import UserError, first_line

SECONDS_TO_READ = 30.0
MOST_BYTES = 20 * 10**6


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
            UserError: a cell is no finite number; it is named by line and column.
        """
        cells = zip(self.columns, row.cells, strict=True)
        return [self._number(row, name, cell) for i, (name, cell) in enumerate(cells) if i != target]

    def _number(self, row: Row, column: str, cell: str) -> float:
        if not is_number(cell):
            raise UserError(
                f"{self.name} line {row.line}, column {column}: {cell!r} is not a finite number in fp32",
                code="table-unusable",
            )
        return float(cell)


def read_table(source: str) -> Table:
    """Read a table.

    Args:
        source: ``iris``, a path, or an http, https or file address of a CSV. Where every cell but one of its first
            line is a number, as in UCI's files, there is no header, and the columns are numbered.

    Raises:
        UserError: it cannot be had, or is no table; the line is named.
    """
    if source == "iris":
        return _iris()
    rows = _read_csv(source, _text_of(source))
    header, width = rows[0].cells, len(rows[0].cells)
    if sum(is_number(cell) for cell in header) >= max(1, width - 1):
        header = [f"column {number}" for number in range(width)]
    else:
        rows = rows[1:]
    for row in rows:
        if len(row.cells) != width:
            raise UserError(
                f"{source} line {row.line}: {len(row.cells)} cells, where the first line has {width}",
                code="table-unusable",
            )
    if not rows:
        raise UserError(f"{source}: holds no rows", code="table-unusable")
    return Table(source, [name.strip() for name in header], rows)


def _iris() -> Table:
    """Fisher's iris measurements (1936), 150 rows of three species."""
    try:
        from sklearn.datasets import load_iris
    except ImportError as error:
        raise UserError(
            "source_url iris: the data comes with scikit-learn, which is not installed: "
            'pip install "distrinews[teach]", or name a CSV file',
            code="package-missing",
        ) from error
    iris = load_iris()
    rows = [
        Row(line, [*map(str, features), str(iris.target_names[label])])
        for line, (features, label) in enumerate(zip(iris.data, iris.target, strict=True), start=1)
    ]
    return Table("iris", [*iris.feature_names, "species"], rows)


def _text_of(source: str) -> str:
    reading: Future[bytes] = Future()
    # A pipe that nobody writes to, or a server that sends a byte now and then, has no end: the thread is left behind.
    threading.Thread(target=_read, args=(source, reading), daemon=True).start()
    try:
        data = reading.result(SECONDS_TO_READ)
        if len(data) > MOST_BYTES:
            raise UserError(
                f"source_url {source}: has more than {MOST_BYTES // 10**6} MB; take some of its rows",
                code="table-unusable",
            )
        return data.decode("utf-8-sig")
    except TimeoutError as error:
        raise UserError(
            f"source_url {source}: cannot be read (no end within {SECONDS_TO_READ:g} s)", code="data-unreadable"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"source_url {source}: is not UTF-8 text (byte {error.start})", code="table-unusable"
        ) from error
    except (OSError, HTTPException, ValueError) as error:
        raise UserError(f"source_url {source}: cannot be read ({first_line(error)})", code="data-unreadable") from error


def _read(source: str, reading: Future[bytes]) -> None:
    try:
        is_address = source.startswith(("http://", "https://", "file://"))
        with urlopen(source, timeout=SECONDS_TO_READ) if is_address else Path(source).open("rb") as file:
            reading.set_result(file.read(MOST_BYTES + 1))
    except Exception as error:
        reading.set_exception(error)


def _read_csv(source: str, text: str) -> list[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)  # Unicode knows more ends of lines than CSV
    try:
        rows = [Row(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise UserError(f"{source} line {reader.line_num}: not valid CSV ({error})", code="table-unusable") from error
    if not rows:
        raise UserError(f"{source}: is empty", code="table-unusable")
    return rows


def is_number(cell: str) -> bool:
    """Whether it is a finite number in fp32."""
    try:
        return abs(float(cell)) <= torch.finfo(torch.float32).max
    except ValueError:
        return False
