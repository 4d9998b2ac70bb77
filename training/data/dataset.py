"""Where text comes from: the hub, a local folder or file, or the built-in sample."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ForeseenError, UserError, first_line
from common.rows import (
    AG_NEWS_LABELS,
    FORMATS,
    SAMPLE_NEWS,
    TEXT_AND_LABEL,
    Columns,
    FoundRow,
    Reading,
    UsableRow,
    in_ag_news_layout,
    read_file,
)
from training.data.hub_access import ask_hub, did_you_mean, looks_local, refuse_revision

AG_NEWS = "ag_news"
AG_NEWS_ON_THE_HUB = "fancyzhx/ag_news"
SAMPLE = "sample"
TEST_SHARE = 0.1
# The file and split names under which data sets bring validation rows.
VALIDATION_NAMES = ("validation", "valid", "val", "dev")
# This many labels are not suspicious, however few the rows.
FEW_LABELS = 10
OFFLINE_HINT = "without a network use --dataset sample, or --dataset FOLDER with train.csv and test.csv"


@dataclass(frozen=True)
class Rows:
    """Texts as they were read, with the index of each one's label. ``labels``: int64, (rows,)."""

    texts: list[str]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, index: np.ndarray) -> Rows:
        return Rows([self.texts[i] for i in index], self.labels[index])


@dataclass(frozen=True)
class NewsData:
    """Training and test rows, validation rows if the data has any, and the label names.

    ``left_out``: how many rows are unusable; the last of ``notes`` then names the first of them.
    """

    name: str
    label_names: list[str]
    train: Rows
    test: Rows
    notes: list[str] = field(default_factory=list)
    left_out: int = 0
    validation: Rows | None = None

    @property
    def splits(self) -> dict[str, Rows]:
        validation = {} if self.validation is None else {"validation": self.validation}
        return {"train": self.train, "test": self.test, **validation}


def load_news(
    dataset: str,
    seed: int = 0,
    bad_rows: str = "stop",
    columns: Columns = TEXT_AND_LABEL,
    say: Callable[[str], None] = print,
) -> NewsData:
    """Read a dataset by name (``ag_news``, ``sample``, ``owner/data`` on the hub) or path (a folder or a file).

    ``seed`` decides which rows become the test set if the data has none. ``bad_rows="skip"`` leaves out unusable rows,
    unless they are more than half.

    Raises:
        UserError: no such data, or an unusable row (with file and line).
        HubUnavailable: the hub did not respond.
    """
    path, reading = Path(dataset).expanduser(), Reading(columns, skip=bad_rows == "skip")
    if dataset == SAMPLE:
        return _read_folder(SAMPLE, SAMPLE_NEWS, seed, Reading(TEXT_AND_LABEL, skip=False))
    if dataset == AG_NEWS:
        return _read_hub(AG_NEWS_ON_THE_HUB, seed, reading, say)
    if path.is_dir():
        return _read_folder(str(path), path, seed, reading)
    if path.is_file():
        return _assemble(str(path), {"train": (str(path), read_file(path, reading))}, None, seed, reading)
    if looks_local(dataset):
        raise UserError(f"--dataset {dataset}: no such file or folder", code="data-not-found")
    if "/" in dataset:
        return _read_hub(dataset, seed, reading, say)
    raise UserError(
        f"--dataset {dataset}: no such dataset{did_you_mean(dataset, (AG_NEWS, SAMPLE))}; use ag_news, sample, "
        "a hub name owner/data, or an existing folder or file",
        code="data-not-found",
    )


def default_cleaning(dataset: str, label_names: Sequence[str]) -> str:
    """How the texts of a dataset are cleaned by default: AG News contains markup from its feeds; in other data, what
    looks like markup may be text.
    """
    path = Path(dataset).expanduser()
    file = _find_split(path, "train") if path.is_dir() else path
    is_ag_news = dataset in (SAMPLE, AG_NEWS, AG_NEWS_ON_THE_HUB) or list(label_names) == AG_NEWS_LABELS
    return "news" if is_ag_news or (file and in_ag_news_layout(file)) else "none"


def split_rows(labels: np.ndarray, validation_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions for training and for validation: stratified by label, seeded, each in ascending order.

    Validation gets ``validation_fraction`` of each label's rows, and at least one of a label that has two.
    """
    generator = np.random.default_rng([seed, 1])
    validation: list[np.ndarray] = []
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        count = min(len(rows) - 1, max(1, round(len(rows) * validation_fraction)))
        validation.append(rows[:count])
    chosen = np.sort(np.concatenate(validation))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


def _read_folder(name: str, folder: Path, seed: int, reading: Reading) -> NewsData:
    if (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists():
        return _from_datasets(name, _saved_splits(name, folder, reading), seed, reading)
    train = _find_split(folder, "train")
    if train is None:
        raise UserError(
            f"--dataset {name}: the folder holds no train.csv, train.jsonl or train.parquet", code="data-not-found"
        )
    found = {"train": train, "validation": _find_split(folder, *VALIDATION_NAMES), "test": _find_split(folder, "test")}
    classes = folder / "classes.txt"
    label_names = None
    if classes.exists():
        lines = classes.read_text(encoding="utf-8", errors="replace").splitlines()
        label_names = [line.strip() for line in lines if line.strip()]
    splits = {split: (str(path), read_file(path, reading, label_names)) for split, path in found.items() if path}
    return _assemble(name, splits, None, seed, reading)


def _find_split(folder: Path, *names: str) -> Path | None:
    paths = (folder / (name + suffix) for name in names for suffix in FORMATS)
    return next((path for path in paths if path.is_file()), None)


def _saved_splits(name: str, folder: Path, reading: Reading) -> dict[str, Any]:
    """The splits of a folder saved by `datasets`, from the shards that can be read."""
    from datasets import concatenate_datasets

    listed = folder / "dataset_dict.json"
    try:
        names = json.loads(listed.read_text())["splits"] if listed.exists() else None
        places = {split: folder / split for split in names} if names else {"train": folder}
        return {split: concatenate_datasets(_shards(place, reading)) for split, place in places.items()}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--dataset {name}: {first_line(error)}", code="data-unreadable") from error


def _shards(folder: Path, reading: Reading) -> list[Any]:
    from datasets import Dataset

    readable, unreadable = [], {}
    for file in json.loads((folder / "state.json").read_text())["_data_files"]:
        path = folder / file["filename"]
        try:
            shard = Dataset.from_file(str(path))
            shard.data.validate(full=True)
        except (OSError, ValueError) as error:
            unreadable[path] = first_line(error)
        else:
            readable.append(shard)
    # Shards have equal lengths within one row; the length of an unreadable one is not recorded anywhere else.
    rows = max((len(shard) for shard in readable), default=1)
    for path, why in unreadable.items():
        reading.reject(str(path), f"cannot be read ({why})", rows)
    if len(unreadable) > len(readable):
        raise UserError(
            f"--dataset {folder}: {len(unreadable)} of its shards cannot be read, and {len(readable)} can",
            code="data-unreadable",
        )
    return readable


def _read_hub(name: str, seed: int, reading: Reading, say: Callable[[str], None]) -> NewsData:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    refuse_revision("--dataset", name)
    try:
        found = ask_hub(f"--dataset {name}", lambda: load_dataset(name), say)
    except ForeseenError:
        raise
    except DatasetNotFoundError as error:
        raise UserError(
            f"--dataset {name}: the hub has no such dataset, or it needs a login; {OFFLINE_HINT}", code="hub-not-found"
        ) from error
    except Exception as error:  # the hub's HTTP client has errors of its own, which differ between its versions
        raise UserError(
            f"--dataset {name}: the hub could not be read ({first_line(error)}); {OFFLINE_HINT}", code="hub-unreachable"
        ) from error
    return _from_datasets(name, found, seed, reading)


def _from_datasets(name: str, found: Any, seed: int, reading: Reading) -> NewsData:
    splits = found if isinstance(found, dict) else {"train": found}
    if "train" not in splits:
        raise UserError(f"--dataset {name}: has no train split, only {', '.join(splits)}", code="data-not-found")
    features = splits["train"].features
    text_column, label_column = reading.find_columns(f"--dataset {name}", list(features))
    label_names = getattr(features[label_column], "names", None)

    def rows(split: str) -> Iterator[FoundRow]:
        texts, labels = splits[split][text_column], splits[split][label_column]
        known = label_names is not None
        named = (label_names[label] if known and label is not None and label >= 0 else label for label in labels)
        for i, (text, label) in enumerate(zip(texts, named, strict=True)):
            yield f"{name} {split} row {i}", text, label

    validation = next((split for split in VALIDATION_NAMES if split in splits), None)
    used = {"train": "train", "validation": validation, "test": "test"}
    found_splits = {use: (f"{name} {split}", rows(split)) for use, split in used.items() if split in splits}
    return _assemble(name, found_splits, label_names, seed, reading)


def _assemble(
    name: str,
    splits: Mapping[str, tuple[str, Iterable[FoundRow]]],
    label_names: Sequence[str] | None,
    seed: int,
    reading: Reading,
) -> NewsData:
    """``splits``: the rows of train, and of validation and test if present, under their file names."""
    usable = reading.usable(*splits["train"])
    present = Counter(label for _, label in usable)
    names = list(label_names or _label_names(present))
    if len(present) < 2:
        raise UserError(
            f"--dataset {name}: all training rows have the label {next(iter(present))!r}; two labels are needed",
            code="labels-too-few",
        )
    notes = _notes_on_labels(name, present, known=label_names is not None)
    train, validation = _index(usable, names), None
    if "validation" in splits:
        validation = _index(reading.usable(*splits["validation"], names), names)
        notes.append(f"validation on the {len(validation):,} rows of {splits['validation'][0]}")
    if "test" in splits:
        test = _index(reading.usable(*splits["test"], names), names)
    else:
        kept, held_out = split_rows(train.labels, TEST_SHARE, seed)
        if len(held_out) == 0:
            raise UserError(
                f"--dataset {name}: {len(train)} rows leave none for validation and test; at least 3 rows of each "
                "label are needed, one each to train, validate and test on",
                code="rows-too-few",
            )
        notes.append(
            f"no test rows in the data: {len(held_out)} of the {len(train)} rows were set aside as the test set"
        )
        train, test = train.take(kept), train.take(held_out)
    return NewsData(name, names, train, test, [*notes, *reading.notes], reading.count, validation)


def _notes_on_labels(name: str, labels: Counter[str], *, known: bool) -> list[str]:
    """Reasons to doubt that these labels are classes; ``known``: the data itself declares its classes.

    Raises:
        UserError: most labels occur in a single row.
    """
    num_rows, notes = labels.total(), []
    counts = f"{len(labels):,} different labels in {num_rows:,} rows"
    if len(labels) > FEW_LABELS and 2 * len(labels) > num_rows:
        raise UserError(
            f"--dataset {name}: {counts}; is the label column a number to predict, or free text? "
            "This trains classifiers",
            code="labels-too-many",
        )
    if len(labels) > FEW_LABELS and 10 * len(labels) > num_rows:
        notes.append(f"{counts}: few rows to learn each from; is it the right column?")
    examples = ", ".join(sorted(labels)[:3])
    if not known and _are_fractions(labels):
        notes.append(f"labels look like numbers to predict ({examples}): each value is trained as a class of its own")
    elif not known and (lists := _lists(labels)):
        notes.append(f"labels such as {lists[0]!r} look like lists: each combination is trained as a class of its own")
    return notes


def _are_fractions(labels: Iterable[str]) -> bool:
    """Whether all labels are numbers, at least one of them not an integer."""
    try:
        return not all(float(label).is_integer() for label in labels)
    except ValueError:
        return False


def _lists(labels: Collection[str]) -> list[str]:
    """Labels such as ``a,b`` whose parts are labels too, or parts of several labels."""
    split = {label: re.split(r"\s*[,;|]\s*", label.strip("[]")) for label in labels}
    occurrences = Counter(part for parts in split.values() for part in set(parts))
    return [label for label, parts in split.items() if len(parts) > 1 and any(occurrences[part] > 1 for part in parts)]


def _label_names(labels: Iterable[str]) -> list[str]:
    names = sorted(set(labels))
    if set(names) <= set(AG_NEWS_LABELS):
        return [label for label in AG_NEWS_LABELS if label in names]
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names


def _index(rows: Sequence[UsableRow], names: list[str]) -> Rows:
    index = {name: i for i, name in enumerate(names)}
    return Rows([text for text, _ in rows], np.array([index[label] for _, label in rows], dtype=np.int64))
