"""Labelled texts to measure a model on: an AG News folder, a CSV file or JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLE_NEWS = Path(__file__).resolve().parents[1] / "training" / "sample_news"
AG_NEWS_LABELS = ("World", "Sports", "Business", "Sci/Tech")
SUFFIXES = (".csv", ".jsonl", ".json")


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


def read_rows(path: Path, labels: Sequence[str], limit: int | None = None) -> LabelledRows:
    """Read labelled rows.

    Args:
        path: A folder with ``test.csv`` (else ``train.csv``), a CSV file with a header that names text and label or
            in AG News' layout (class from 1, title, description), or JSON lines with text and label.
        labels: The model's class names, by class id.
        limit: Take this many rows, evenly spread; None takes all.

    Raises:
        ValueError: Nothing is there, a row cannot be used, or a label is none of the model's; with file and line.
    """
    file = _rows_file(path)
    class_of = {label: class_id for class_id, label in enumerate(labels)}
    texts: list[str] = []
    class_ids: list[int] = []
    for where, text, label in _read(file):
        if label not in class_of:
            raise ValueError(f"{where}: label {label!r} is none of the model's labels {', '.join(labels[:10])}")
        if text.strip():
            texts.append(text)
            class_ids.append(class_of[label])
    if not texts:
        raise ValueError(f"{file}: holds no labelled text")
    chosen = evenly_spread(len(texts), limit)
    training_file = next((path / f"train{suffix}" for suffix in SUFFIXES if (path / f"train{suffix}").is_file()), file)
    calibration = texts if training_file == file else [text for _, text, _ in _read(training_file) if text.strip()]
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


def _read(file: Path) -> Iterator[tuple[str, str, str]]:
    try:
        yield from _read_csv(file) if file.suffix == ".csv" else _read_json_lines(file)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text at byte {error.start}") from error


def _read_csv(file: Path) -> Iterator[tuple[str, str, str]]:
    classes = file.parent / "classes.txt"
    names = classes.read_text(encoding="utf-8").split("\n") if classes.is_file() else AG_NEWS_LABELS
    names = [name.strip() for name in names if name.strip()]
    with file.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.reader(lines)
        columns: tuple[int, int] | None = None
        for number, fields in enumerate(reader):
            where = f"{file} line {reader.line_num}"
            header = [field.strip().lower() for field in fields]
            if number == 0 and {"text", "label"} <= set(header):
                columns = header.index("text"), header.index("label")
            elif fields:
                yield where, *(_headed(where, fields, columns) if columns else _ag_news(where, fields, names))


def _headed(where: str, fields: list[str], columns: tuple[int, int]) -> tuple[str, str]:
    if len(fields) <= max(columns):
        raise ValueError(f"{where}: {len(fields)} fields, but the header names text and label further right")
    return fields[columns[0]], fields[columns[1]].strip()


def _ag_news(where: str, fields: list[str], names: Sequence[str]) -> tuple[str, str]:
    number = fields[0].strip()
    if len(fields) < 2 or not number.isdecimal() or not 1 <= int(number) <= len(names):
        layout = f'"class 1-{len(names)}","title","description"'
        raise ValueError(f"{where}: not in AG News' layout {layout}, and no header names text and label")
    # Title and description become one text exactly as in training.
    return " ".join(part for part in fields[1:] if part), names[int(number) - 1]


def _read_json_lines(file: Path) -> Iterator[tuple[str, str, str]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file} line {number}"
            try:
                row: Any = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not valid JSON; one object a line is read") from error
            if not isinstance(row, dict) or not isinstance(row.get("text"), str) or "label" not in row:
                raise ValueError(f"{where}: must be an object with text and label")
            yield where, row["text"], str(row["label"]).strip()
