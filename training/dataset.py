"""Where text comes from: the hub, a local folder or file, or the built-in sample."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from training.errors import UserError, first_line
from training.row_files import AG_NEWS_LABELS, FORMATS, BadRows, FoundRow, UsableRow, in_ag_news_layout, read_file

AG_NEWS = "ag_news"
AG_NEWS_ON_THE_HUB = "fancyzhx/ag_news"
SAMPLE = "sample"
SAMPLE_FOLDER = Path(__file__).parent / "sample_news"
TEST_SHARE = 0.1
OFFLINE_HINT = "without a network use --dataset sample, or --dataset FOLDER with train.csv and test.csv"


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
    """Training and test rows, and the names of their labels.

    ``left_out``: how many rows cannot be used; the last of ``notes`` then names the first of them.
    """

    name: str
    label_names: list[str]
    train: Rows
    test: Rows
    notes: list[str] = field(default_factory=list)
    left_out: int = 0


def load_news(dataset: str, seed: int = 0, bad_rows: str = "stop") -> NewsData:
    """Read a dataset by name or path.

    Args:
        dataset: ``ag_news``, ``sample``, a hub name ``owner/data``, or a local folder or file.
        seed: decides which rows become the test set where the data brings none.
        bad_rows: ``skip`` leaves out rows that cannot be used, unless they are more than half.

    Raises:
        UserError: no such data, the hub is out of reach, or a row cannot be used (with file and line).
    """
    path, bad = Path(dataset).expanduser(), BadRows(skip=bad_rows == "skip")
    if dataset == SAMPLE:
        return _read_folder(SAMPLE, SAMPLE_FOLDER, seed, bad)
    if dataset == AG_NEWS:
        return _read_hub(AG_NEWS_ON_THE_HUB, seed, bad)
    if path.is_dir():
        return _read_folder(str(path), path, seed, bad)
    if path.is_file():
        return _assemble(str(path), [(str(path), read_file(path, bad))], None, seed, bad)
    if dataset.count("/") == 1 and not dataset.startswith((".", "/", "~")):
        return _read_hub(dataset, seed, bad)
    raise UserError(
        f"--dataset {dataset}: no such dataset; use ag_news, sample, a hub name owner/data, "
        "or an existing folder or file"
    )


def default_cleaning(dataset: str, label_names: Sequence[str]) -> str:
    """How the texts of a dataset are cleaned unless it is said: AG News has markup of its feeds in it, other data may
    mean what looks like it.

    Args:
        dataset: as for :func:`load_news`.
        label_names: of the dataset.

    Returns:
        ``news`` or ``none``.
    """
    path = Path(dataset).expanduser()
    file = _find_split(path, "train") if path.is_dir() else path
    is_ag_news = dataset in (SAMPLE, AG_NEWS, AG_NEWS_ON_THE_HUB) or list(label_names) == AG_NEWS_LABELS
    return "news" if is_ag_news or (file and in_ag_news_layout(file)) else "none"


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


def _read_folder(name: str, folder: Path, seed: int, bad: BadRows) -> NewsData:
    if (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists():
        return _from_datasets(name, _saved_splits(name, folder, bad), seed, bad)
    train = _find_split(folder, "train")
    if train is None:
        raise UserError(f"--dataset {name}: the folder holds no train.csv, train.jsonl or train.parquet")
    test = _find_split(folder, "test")
    classes = folder / "classes.txt"
    label_names = None
    if classes.exists():
        lines = classes.read_text(encoding="utf-8", errors="replace").splitlines()
        label_names = [line.strip() for line in lines if line.strip()]
    splits = [(str(path), read_file(path, bad, label_names)) for path in (train, test) if path]
    return _assemble(name, splits, None, seed, bad)


def _find_split(folder: Path, split: str) -> Path | None:
    return next((folder / (split + suffix) for suffix in FORMATS if (folder / (split + suffix)).is_file()), None)


def _saved_splits(name: str, folder: Path, bad: BadRows) -> dict[str, Any]:
    """The splits of a folder saved by `datasets`, of those of their shards that can be read."""
    from datasets import concatenate_datasets

    listed = folder / "dataset_dict.json"
    try:
        names = json.loads(listed.read_text())["splits"] if listed.exists() else None
        places = {split: folder / split for split in names} if names else {"train": folder}
        return {split: concatenate_datasets(_shards(place, bad)) for split, place in places.items()}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--dataset {name}: {first_line(error)}") from error


def _shards(folder: Path, bad: BadRows) -> list[Any]:
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
    # Shards are of equal length, but for a row; what an unreadable one held is not written elsewhere.
    rows = max((len(shard) for shard in readable), default=1)
    for path, why in unreadable.items():
        bad.reject(str(path), f"cannot be read ({why})", rows)
    if len(unreadable) > len(readable):
        raise UserError(f"--dataset {folder}: {len(unreadable)} of its shards cannot be read, and {len(readable)} can")
    return readable


def _read_hub(name: str, seed: int, bad: BadRows) -> NewsData:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        found = load_dataset(name)
    except DatasetNotFoundError as error:
        raise UserError(
            f"--dataset {name}: the hub has no such dataset, or it needs a login; {OFFLINE_HINT}"
        ) from error
    except Exception as error:  # the hub's HTTP client has errors of its own, which differ between its versions
        raise UserError(f"--dataset {name}: the hub could not be read ({first_line(error)}); {OFFLINE_HINT}") from error
    return _from_datasets(name, found, seed, bad)


def _from_datasets(name: str, found: Any, seed: int, bad: BadRows) -> NewsData:
    splits = found if isinstance(found, dict) else {"train": found}
    if "train" not in splits:
        raise UserError(f"--dataset {name}: has no train split, only {', '.join(splits)}")
    features = splits["train"].features
    if not {"text", "label"} <= set(features):
        raise UserError(f"--dataset {name}: needs columns text and label, has {', '.join(features)}")
    label_names = getattr(features["label"], "names", None)

    def rows(split: str) -> Iterator[FoundRow]:
        texts, labels = splits[split]["text"], splits[split]["label"]
        known = label_names is not None
        named = (label_names[label] if known and label is not None and label >= 0 else label for label in labels)
        for i, (text, label) in enumerate(zip(texts, named, strict=True)):
            yield f"{name} {split} row {i}", text, label

    found_splits = [(f"{name} {split}", rows(split)) for split in ("train", "test") if split in splits]
    return _assemble(name, found_splits, label_names, seed, bad)


def _assemble(
    name: str,
    splits: Sequence[tuple[str, Iterable[FoundRow]]],
    label_names: Sequence[str] | None,
    seed: int,
    bad: BadRows,
) -> NewsData:
    """``splits``: training rows, then test rows if the data has any, each under the name of its file or split."""
    usable = bad.usable(*splits[0])
    names = list(label_names or _label_names(label for _, label in usable))
    present = {label for _, label in usable}
    if len(present) < 2:
        raise UserError(f"--dataset {name}: all training rows have the label {present.pop()!r}; two labels are needed")
    rows, notes = _index(usable, names), []
    if len(splits) > 1:
        tested = _index(bad.usable(*splits[1], names), names)
    else:
        kept, held_out = split_rows(rows.labels, TEST_SHARE, seed)
        notes = [f"no test rows in the data: {len(held_out)} of the {len(rows)} rows were set aside as the test set"]
        rows, tested = rows.take(kept), rows.take(held_out)
    return NewsData(name, names, rows, tested, [*notes, *([bad.note] if bad.count else [])], bad.count)


def _label_names(labels: Iterable[str]) -> list[str]:
    names = sorted(set(labels))
    if set(names) <= set(AG_NEWS_LABELS):
        return [label for label in AG_NEWS_LABELS if label in names]
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names


def _index(rows: Sequence[UsableRow], names: list[str]) -> Rows:
    index = {name: i for i, name in enumerate(names)}
    return Rows([text for text, _ in rows], np.array([index[label] for _, label in rows], dtype=np.int64))
