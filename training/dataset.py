"""Where text comes from: the hub, a local folder or file, or the built-in sample."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from training.errors import UserError

AG_NEWS = "ag_news"
AG_NEWS_ON_THE_HUB = "fancyzhx/ag_news"
AG_NEWS_LABELS = ["World", "Sports", "Business", "Sci/Tech"]
SAMPLE = "sample"
SAMPLE_FOLDER = Path(__file__).parent / "sample_news"
TEST_SHARE = 0.1
OFFLINE_HINT = "without a network use --dataset sample, or --dataset FOLDER with train.csv and test.csv"
FORMATS = (".csv", ".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Rows:
    """Texts as they were found, with the index of each one's label. ``labels``: int64, (rows,)."""

    texts: list[str]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, index: np.ndarray) -> Rows:
        """The rows at these positions."""
        return Rows([self.texts[i] for i in index], self.labels[index])


@dataclass(frozen=True)
class NewsData:
    """Training and test rows, and the names of their labels."""

    name: str
    label_names: list[str]
    train: Rows
    test: Rows
    notes: list[str] = field(default_factory=list)


# A row before its label is known to be one of the classes: where it stands, its text, its label as found.
FoundRow = tuple[str, str, Any]


def load_news(dataset: str, seed: int = 0) -> NewsData:
    """Read a dataset by name or path.

    Args:
        dataset: ``ag_news``, ``sample``, a hub name ``owner/data``, or a local folder or file.
        seed: decides which rows become the test set where the data brings none.

    Raises:
        UserError: no such data, the hub is out of reach, or a row cannot be used (with file and line).
    """
    path = Path(dataset).expanduser()
    if dataset == SAMPLE:
        return _read_folder(SAMPLE, SAMPLE_FOLDER, seed)
    if dataset == AG_NEWS:
        return _read_hub(AG_NEWS_ON_THE_HUB, seed)
    if path.is_dir():
        return _read_folder(str(path), path, seed)
    if path.is_file():
        return _assemble(str(path), _read_file(path), None, None, seed)
    if dataset.count("/") == 1 and not dataset.startswith((".", "/", "~")):
        return _read_hub(dataset, seed)
    raise UserError(
        f"--dataset {dataset}: no such dataset; use ag_news, sample, a hub name owner/data, "
        "or an existing folder or file"
    )


def split_rows(labels: np.ndarray, validation_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions for training and for validation: stratified by label, seeded, each in rising order.

    Args:
        labels: int64, (rows,).
        validation_fraction: the share of each label's rows that validation gets (at least one row of a
            label that has two).
        seed: the same seed draws the same rows.
    """
    generator = np.random.default_rng([seed, 1])
    validation: list[np.ndarray] = []
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        count = min(len(rows) - 1, max(1, round(len(rows) * validation_fraction)))
        validation.append(rows[:count])
    chosen = np.sort(np.concatenate(validation))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


def _read_folder(name: str, folder: Path, seed: int) -> NewsData:
    if (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists():
        from datasets import load_from_disk

        try:
            return _from_datasets(name, load_from_disk(str(folder)), seed)
        except (OSError, ValueError) as error:
            raise UserError(f"--dataset {name}: {_first_line(error)}") from error
    train = _find_split(folder, "train")
    if train is None:
        raise UserError(f"--dataset {name}: the folder holds no train.csv, train.jsonl or train.parquet")
    test = _find_split(folder, "test")
    classes = folder / "classes.txt"
    label_names = None
    if classes.exists():
        lines = classes.read_text(encoding="utf-8", errors="replace").splitlines()
        label_names = [line.strip() for line in lines if line.strip()]
    return _assemble(name, _read_file(train, label_names), _read_file(test, label_names) if test else None, None, seed)


def _find_split(folder: Path, split: str) -> Path | None:
    return next((folder / (split + suffix) for suffix in FORMATS if (folder / (split + suffix)).is_file()), None)


def _read_file(path: Path, label_names: Sequence[str] | None = None) -> list[FoundRow]:
    readers = {
        ".csv": _read_csv,
        ".jsonl": _read_json_lines,
        ".json": _read_json_lines,
        ".parquet": _read_parquet,
    }
    if path.suffix not in readers:
        raise UserError(f"--dataset {path}: must end in {', '.join(FORMATS)}")
    try:
        rows = list(_read_csv(path, label_names) if path.suffix == ".csv" else readers[path.suffix](path))
    except OSError as error:
        raise UserError(f"--dataset {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}") from error
    if not rows:
        raise UserError(f"--dataset {path}: holds no rows")
    return rows


def _read_csv(path: Path, label_names: Sequence[str] | None = None) -> Iterator[FoundRow]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        columns: tuple[int, int] | None = None
        try:
            for number, fields in enumerate(reader):
                line = reader.line_num
                if number == 0:
                    columns = _header(fields)
                    if columns:
                        continue
                if not fields:
                    continue
                where = f"{path} line {line}"
                yield _headed_row(where, fields, columns) if columns else _ag_row(where, fields, label_names)
        except csv.Error as error:
            raise UserError(f"{path} line {reader.line_num}: not valid CSV ({error})") from error


def _header(fields: list[str]) -> tuple[int, int] | None:
    names = [name.strip().lower() for name in fields]
    return (names.index("text"), names.index("label")) if {"text", "label"} <= set(names) else None


def _headed_row(where: str, fields: list[str], columns: tuple[int, int]) -> FoundRow:
    if len(fields) <= max(columns):
        raise UserError(f"{where}: {len(fields)} fields, but the header names text and label further right")
    return where, fields[columns[0]], fields[columns[1]]


def _ag_row(where: str, fields: list[str], label_names: Sequence[str] | None) -> FoundRow:
    names = label_names or AG_NEWS_LABELS
    if len(fields) < 2:
        raise UserError(f'{where}: one field; AG News\' layout is "label 1-{len(names)}","title","description"')
    label = fields[0].strip()
    if not label.isdecimal():
        raise UserError(
            f"{where}: label {label!r} is no number; use AG News' layout with no header, "
            "or a header line with text and label"
        )
    if not 1 <= int(label) <= len(names):
        raise UserError(f"{where}: label {label} is out of range 1 to {len(names)}")
    return where, " ".join(part for part in fields[1:] if part), names[int(label) - 1]


def _read_json_lines(path: Path) -> Iterator[FoundRow]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not valid JSON ({error.msg}); one object a line is read") from error
            if not isinstance(row, dict) or "text" not in row or "label" not in row:
                raise UserError(f"{where}: must be an object with text and label")
            yield where, row["text"], row["label"]


def _read_parquet(path: Path) -> Iterator[FoundRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path, columns=["text", "label"])
        texts, labels = table["text"].to_pylist(), table["label"].to_pylist()
    except (pyarrow.ArrowException, KeyError) as error:
        raise UserError(f"{path}: no Parquet file with text and label ({_first_line(error)})") from error
    for number, (text, label) in enumerate(zip(texts, labels, strict=True), start=1):
        yield f"{path} row {number}", text, label


def _read_hub(name: str, seed: int) -> NewsData:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        found = load_dataset(name)
    except DatasetNotFoundError as error:
        raise UserError(
            f"--dataset {name}: the hub has no such dataset, or it needs a login; {OFFLINE_HINT}"
        ) from error
    except Exception as error:  # the hub's HTTP client has errors of its own, which differ between its versions
        raise UserError(
            f"--dataset {name}: the hub could not be read ({_first_line(error)}); {OFFLINE_HINT}"
        ) from error
    return _from_datasets(name, found, seed)


def _from_datasets(name: str, found: Any, seed: int) -> NewsData:
    splits = found if isinstance(found, dict) else {"train": found}
    if "train" not in splits:
        raise UserError(f"--dataset {name}: has no train split, only {', '.join(splits)}")
    features = splits["train"].features
    if not {"text", "label"} <= set(features):
        raise UserError(f"--dataset {name}: needs columns text and label, has {', '.join(features)}")
    label_names = getattr(features["label"], "names", None)

    def rows(split: str) -> list[FoundRow]:
        texts, labels = splits[split]["text"], splits[split]["label"]
        known = label_names is not None
        named = (label_names[label] if known and label is not None and label >= 0 else label for label in labels)
        return [
            (f"{name} {split} row {i}", text, label) for i, (text, label) in enumerate(zip(texts, named, strict=True))
        ]

    return _assemble(name, rows("train"), rows("test") if "test" in splits else None, label_names, seed)


def _assemble(
    name: str,
    train: list[FoundRow],
    test: list[FoundRow] | None,
    label_names: Sequence[str] | None,
    seed: int,
) -> NewsData:
    checked = [_checked(row) for row in train]
    names = list(label_names or _label_names(label for _, _, label in checked))
    present = {label for _, _, label in checked}
    if len(present) < 2:
        raise UserError(f"--dataset {name}: all training rows have the label {present.pop()!r}; two labels are needed")
    rows = _index(checked, names)
    if test is not None:
        return NewsData(name, names, rows, _index([_checked(row) for row in test], names))
    kept, held_out = split_rows(rows.labels, TEST_SHARE, seed)
    note = f"no test rows in the data: {len(held_out)} of the {len(rows)} rows were set aside as the test set"
    return NewsData(name, names, rows.take(kept), rows.take(held_out), [note])


def _checked(row: FoundRow) -> tuple[str, str, str]:
    where, text, label = row
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: the text is {'empty' if isinstance(text, str) else 'no text'}")
    if isinstance(label, bool | float) or not isinstance(label, str | int) or not str(label).strip():
        raise UserError(f"{where}: label {label!r} must be a name or a whole number")
    if isinstance(label, int) and label < 0:
        raise UserError(f"{where}: label {label} is out of range (unlabelled rows cannot be trained on)")
    return where, text, str(label).strip()


def _label_names(labels: Iterable[str]) -> list[str]:
    names = sorted(set(labels))
    if set(names) <= set(AG_NEWS_LABELS):
        return [label for label in AG_NEWS_LABELS if label in names]
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names


def _index(rows: list[tuple[str, str, str]], names: list[str]) -> Rows:
    index = {name: i for i, name in enumerate(names)}
    for where, _, label in rows:
        if label not in index:
            raise UserError(f"{where}: label {label!r} is none of the training labels {', '.join(names[:10])}")
    return Rows([text for _, text, _ in rows], np.array([index[label] for _, _, label in rows], dtype=np.int64))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
