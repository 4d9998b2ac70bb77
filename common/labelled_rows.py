"""Labelled texts to measure a model on: an AG News folder, a CSV or TSV file or JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.delimited import Columns, check_utf8, find_layout, utf8_bytes

SAMPLE_NEWS = Path(__file__).with_name("sample_news")
AG_NEWS_LABELS = ("World", "Sports", "Business", "Sci/Tech")
SUFFIXES = (".csv", ".tsv", ".jsonl", ".json")
TEXT_AND_LABEL = Columns()


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Texts with the class id of each.

    Attributes:
        name: Where they were read, for the record.
        texts: As found, not yet cleaned.
        class_ids: The right class of each text.
        calibration_texts: Texts that no accuracy is measured on where there are any: a folder's training rows.
    """

    name: str
    texts: list[str]
    class_ids: list[int]
    calibration_texts: list[str]


def find_rows(model_dataset: str | None) -> Path:
    """Return where rows are when none are named: the model's own dataset if it is here, else the sample news.

    Args:
        model_dataset: What the model's ``metrics.json`` names as its dataset.

    Raises:
        ValueError: Neither is there.
    """
    if model_dataset and _holds_rows(Path(model_dataset)):
        return Path(model_dataset)
    if _holds_rows(SAMPLE_NEWS):
        return SAMPLE_NEWS
    raise ValueError("no labelled rows to measure on; name some with --rows (a folder with test.csv, or a file)")


def read_rows(
    path: Path, labels: Sequence[str], limit: int | None = None, columns: Columns = TEXT_AND_LABEL
) -> LabelledRows:
    """Read labelled rows.

    Args:
        path: A folder with ``test.csv`` (else ``train.csv``), a CSV or TSV file with a header that names the columns or
            in AG News' layout (class from 1, title, description), or JSON lines.
        labels: The model's class names, by class id.
        limit: Take this many rows, evenly spread; None takes all.
        columns: Those that the model was trained on.

    Raises:
        ValueError: Nothing is there, a row cannot be used, or a label is none of the model's; with file and line.
    """
    file = _rows_file(path)
    class_of = {label: class_id for class_id, label in enumerate(labels)}
    texts: list[str] = []
    class_ids: list[int] = []
    for where, text, label in _read(file, columns):
        if label not in class_of:
            raise ValueError(f"{where}: label {label!r} is none of the model's labels {', '.join(labels[:10])}")
        if text.strip():
            texts.append(text)
            class_ids.append(class_of[label])
    if not texts:
        raise ValueError(f"{file}: holds no labelled text")
    chosen = evenly_spread(len(texts), limit)
    training_file = next((path / f"train{suffix}" for suffix in SUFFIXES if (path / f"train{suffix}").is_file()), file)
    calibration = (
        texts if training_file == file else [text for _, text, _ in _read(training_file, columns) if text.strip()]
    )
    return LabelledRows(str(file), [texts[i] for i in chosen], [class_ids[i] for i in chosen], calibration)


def evenly_spread(count: int, limit: int | None) -> list[int]:
    """Return the positions of at most ``limit`` of so many rows, evenly spread; None takes all."""
    wanted = min(count, limit or count)
    return [i * count // wanted for i in range(wanted)]


def _holds_rows(path: Path) -> bool:
    return (path.is_file() and path.suffix in SUFFIXES) or any(
        (path / f"test{suffix}").is_file() for suffix in SUFFIXES
    )


def _rows_file(path: Path) -> Path:
    names = [f"{split}{suffix}" for split in ("test", "train") for suffix in SUFFIXES]
    file = next((path / name for name in names if (path / name).is_file()), path) if path.is_dir() else path
    if not file.is_file():
        what = "holds no test.csv or test.jsonl" if path.is_dir() else "no such file or folder"
        raise ValueError(f"{path}: {what}; --rows names a folder with test.csv, a CSV or JSONL file")
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file}: must end in {', '.join(SUFFIXES)}")
    return file


def _read(file: Path, columns: Columns) -> Iterator[tuple[str, str, str]]:
    try:
        lines = utf8_bytes(file.read_bytes()).splitlines(keepends=True)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    texts = [line.decode(errors="surrogateescape") for line in lines]
    for number, line in enumerate(texts, start=1):
        try:
            check_utf8(line)
        except ValueError as error:
            raise ValueError(f"{file} line {number}: {error}") from error
    yield from (_read_json_lines if file.suffix in (".jsonl", ".json") else _read_csv)(file, texts, columns)


def _read_csv(file: Path, lines: list[str], columns: Columns) -> Iterator[tuple[str, str, str]]:
    classes = file.parent / "classes.txt"
    names = classes.read_text(encoding="utf-8").split("\n") if classes.is_file() else AG_NEWS_LABELS
    names = [name.strip() for name in names if name.strip()]
    first = next((i for i, line in enumerate(lines) if line.strip()), None)
    if first is None:
        return
    try:
        layout = find_layout(lines[first], columns)
    except ValueError as error:
        raise ValueError(f"{file} line {first + 1}: {error}; the columns must have the names of training's") from error
    start = first + 1 if layout.places else first
    reader = csv.reader(lines[start:], delimiter=layout.separator)
    for fields in reader:
        where = f"{file} line {start + reader.line_num}"
        if fields:
            yield where, *(_headed(where, fields, layout.places) if layout.places else _ag_news(where, fields, names))


def _headed(where: str, fields: list[str], columns: tuple[int, int]) -> tuple[str, str]:
    if len(fields) <= max(columns):
        raise ValueError(f"{where}: {len(fields)} fields, but the header names text and label further right")
    return fields[columns[0]], fields[columns[1]].strip()


def _ag_news(where: str, fields: list[str], names: Sequence[str]) -> tuple[str, str]:
    number = fields[0].strip()
    if len(fields) < 2 or not number.isdecimal() or not 1 <= int(number) <= len(names):
        raise ValueError(f'{where}: rows without a header are "class 1-{len(names)}","title","description"')
    # Title and description become one text exactly as in training.
    return " ".join(part for part in fields[1:] if part), names[int(number) - 1]


def _read_json_lines(file: Path, lines: list[str], columns: Columns) -> Iterator[tuple[str, str, str]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file} line {number}"
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not valid JSON; one object a line is read") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: must be an object with text and label")
        if missing := columns.missing(list(row)):
            raise ValueError(f"{where}: {missing}; the columns must have the names of training's")
        text, label = (list(row.values())[place] for place in columns.among(list(row)))
        if not isinstance(text, str):
            raise ValueError(f"{where}: the text is no text")
        yield where, text, str(label).strip()
