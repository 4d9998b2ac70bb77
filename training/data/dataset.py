"""Where text comes from: the hub, a local folder or file, or the built-in sample."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ForeseenError, UserError, first_line
from common.escaping import some_of
from common.problem_types import SINGLE_LABEL, Label, ProblemType
from common.rows import (
    AG_NEWS_LABELS,
    SAMPLE_NEWS,
    TEXT_AND_LABEL,
    Columns,
    FoundRow,
    Reading,
    ag_news_classes,
    check_shards,
    class_names_beside,
    named_class,
    other_shards,
    read_file,
    split_files,
    text_and_label,
)
from common.text import Text, counted
from training.config import Selection, TrainConfig
from training.data.hub_access import ask_hub, did_you_mean, refuse_missing, refuse_revision
from training.data.kept import writing_to
from training.data.stored_texts import ChosenTexts, StoredTexts
from training.tasks import TASKS, Classification, Task

AG_NEWS = "ag_news"
AG_NEWS_ON_THE_HUB = "fancyzhx/ag_news"
SAMPLE = "sample"
TEST_SHARE = 0.1
# The file and split names under which data sets bring validation rows.
VALIDATION_NAMES = ("validation", "valid", "val", "dev")
SPLIT_FLAGS = ("train_split", "validation_split", "test_split")
HUB_FLAGS = ("dataset_config", "dataset_revision")
TEST_HINT = (
    "if these rows have no labels, test on others with --test_split, "
    "or give --dataset the training file"
)
OFFLINE_HINT = (
    "without a network use --dataset sample, or --dataset FOLDER with train.csv and test.csv"
)


@dataclass(frozen=True)
class Rows:
    """Texts as they were read, with labels, (rows, ...), as their task takes them."""

    texts: Sequence[Text]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, index: np.ndarray) -> Rows:
        # Texts in files stay there: only the numbers of the chosen rows take memory.
        in_memory = isinstance(self.texts, list)
        texts = [self.texts[i] for i in index] if in_memory else ChosenTexts(self.texts, index)
        return Rows(texts, self.labels[index])


@dataclass(frozen=True)
class TextData:
    """Training and test rows, validation rows if the data has any, and the label names.

    ``left_out``: how many rows are unusable; the last of ``notes`` then names the first of them.
    ``num_unlabelled``: how many of the last training rows have no label. ``has_test_rows``: the
    data brings them; else they are some of its training rows. ``origins``: of each split where each
    row is, such as ``news.csv line 3``, if they were asked for.
    """

    name: str
    label_names: list[str]
    train: Rows
    test: Rows
    notes: list[str] = field(default_factory=list)
    left_out: int = 0
    validation: Rows | None = None
    num_unlabelled: int = 0
    has_test_rows: bool = True
    origins: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def splits(self) -> dict[str, Rows]:
        validation = {} if self.validation is None else {"validation": self.validation}
        return {"train": self.train, "test": self.test, **validation}


@dataclass(frozen=True)
class LoadOptions:
    """How the rows of a dataset are read.

    ``seed`` decides which rows become the test set if the data has none. ``bad_rows="skip"`` leaves
    out unusable rows, unless they are more than half. ``texts_in``: a folder for a temporary file
    of the texts, so that they need not fit into memory. ``validation_fraction``: of the texts of a
    language model that are set aside, if the data brings none.
    ``class_names``: what the classes of a file without a header are called, if the file's folder
    does not say it.
    ``labels``: those that there are, also without rows; with ``more_labels`` others of the training
    rows come behind them; unset = those of the training rows.
    ``as_found``: with the place of each row, and no row is moved to another split.
    """

    seed: int = 0
    bad_rows: str = "stop"
    columns: Columns = TEXT_AND_LABEL
    selection: Selection = field(default_factory=Selection)
    task: type[Task] = Classification
    texts_in: Path | None = None
    validation_fraction: float = 0.0
    class_names: Sequence[str] | None = None
    labels: Sequence[str] = ()
    more_labels: bool = False
    as_found: bool = False

    @classmethod
    def of(cls, config: TrainConfig) -> LoadOptions:
        return cls(
            seed=config.seed,
            bad_rows=config.bad_rows,
            columns=config.columns,
            selection=config.selection,
            task=TASKS[config.task],
            texts_in=config.cache_folder,
            validation_fraction=config.validation_fraction,
        )

    def reading(self) -> Reading:
        """For one dataset: it counts the rows that are left out."""
        labelled = " and --label_column" if self.task.has_labels else ""
        return Reading(
            self.columns,
            skip=self.bad_rows == "skip",
            remedy=f"name yours with --text_column{labelled}",
            problem_type=self.task.problem_type,
            new_texts=partial(texts_on_disk, self.texts_in) if self.texts_in else list,
            keeps_origins=self.as_found,
        )


def load_data(
    dataset: str, options: LoadOptions = LoadOptions(), say: Callable[[str], None] = print
) -> TextData:
    """Read a dataset by name (``ag_news``, ``sample``, ``owner/data`` on the hub) or path.

    Raises:
        UserError: no such data, or an unusable row (with file and line).
        HubUnavailable: the hub did not respond.
    """
    path, selection = Path(dataset).expanduser(), options.selection
    if dataset == SAMPLE:
        _check_unused(dataset, selection, "it is built in", *SPLIT_FLAGS, *HUB_FLAGS)
        # Its columns have their usual names, whatever those of the user's other data are called.
        label = Columns().label if options.columns.label else ""
        columns = Columns(label=label, pair=options.columns.pair)
        options = replace(options, columns=columns, bad_rows="stop", class_names=None)
        return _read_folder(SAMPLE, SAMPLE_NEWS, options)
    if dataset == AG_NEWS:
        return _read_hub(AG_NEWS_ON_THE_HUB, options, say)
    if path.is_dir():
        _check_unused(dataset, selection, "only datasets on the hub have it", *HUB_FLAGS)
        return _read_folder(str(path), path, options)
    if path.is_file():
        _check_unused(dataset, selection, "it is a single file", *SPLIT_FLAGS, *HUB_FLAGS)
        return _read_single(path, options)
    refuse_missing(dataset)
    if "/" in dataset:
        return _read_hub(dataset, options, say)
    raise UserError(
        f"--dataset {dataset}: no such dataset{did_you_mean(dataset, (AG_NEWS, SAMPLE))}; use "
        "ag_news, sample, a hub name owner/data, or an existing folder or file",
        code="data-not-found",
    )


def texts_on_disk(folder: Path) -> StoredTexts:
    with writing_to(folder):
        return StoredTexts.temporary(folder)


def _check_unused(dataset: str, selection: Selection, why: str, *flags: str) -> None:
    for flag in flags:
        value = getattr(selection, flag)
        if value != getattr(Selection(), flag):
            raise UserError(
                f"--{flag} {value} and --dataset {dataset}: {why}; drop --{flag}",
                code="flags-conflict",
            )


def default_cleaning(dataset: str, label_names: Sequence[str], train_split: str = "train") -> str:
    """How the texts of a dataset are cleaned by default."""
    # AG News has markup from its feeds; in other data, what looks like markup may be text.
    if dataset in (SAMPLE, AG_NEWS, AG_NEWS_ON_THE_HUB) or list(label_names) == AG_NEWS_LABELS:
        return "news"
    if label_names:
        return "none"
    path = Path(dataset).expanduser()  # texts of a language model, whose labels were not read
    files = split_files(path).get(train_split, []) if path.is_dir() else [path]
    return "news" if files and ag_news_classes(files[0]) else "none"


def cleaning_of_data(config: TrainConfig, data: TextData) -> str:
    """``--clean``, or what auto means for this data."""
    if config.clean != "auto":
        return config.clean
    return default_cleaning(config.dataset, data.label_names, config.train_split)


def row_numbers(count: int) -> np.ndarray:
    """0 to ``count`` - 1, in four bytes each if they fit."""
    return np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)


def split_rows(
    labels: np.ndarray, validation_fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Positions for training and validation, (rows,): stratified by label, seeded, ascending.

    Validation gets ``validation_fraction`` of each label's rows, and at least one of a label that
    has two.
    """
    # The 1 gives this use of the seed a stream of its own, apart from the order of batches.
    generator = np.random.default_rng([seed, 1])
    numbers, is_chosen = row_numbers(len(labels)), np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = generator.permutation(numbers[labels == label])
        # At least one row of a label is held out, so that its score is known, and at least one is
        # kept, so that it is learned.
        count = min(len(rows) - 1, max(1, round(len(rows) * validation_fraction)))
        is_chosen[rows[:count]] = True
    return numbers[~is_chosen], numbers[is_chosen]


def _read_single(path: Path, options: LoadOptions) -> TextData:
    reading = options.reading()
    # The folder knows best, then the caller; that AG News' numbers mean its classes is a guess.
    classes = class_names_beside(path) or options.class_names
    classes = classes or _ag_news_classes(path, reading.problem_type)
    splits = {"train": (str(path), read_file(path, reading, classes))}
    data = _assemble(str(path), splits, None, reading, options)
    if not (others := other_shards(path)):
        return data
    note = (
        f"the file {path.name} is one of {len(others) + 1} shards; "
        f"--dataset {path.parent} reads all"
    )
    return replace(data, notes=[note, *data.notes])


def _read_folder(name: str, folder: Path, options: LoadOptions) -> TextData:
    reading, selection = options.reading(), options.selection
    if is_saved_by_datasets(folder):
        return _from_datasets(name, _saved_splits(name, folder, reading), reading, options)
    files = split_files(folder, reading.formats)
    if selection.train_split == "train" and "train" not in files:
        more = " or train.parquet" if reading.columns.label else ", train.parquet or train.txt"
        raise UserError(
            f"--dataset {name}: the folder holds no train.csv, train.jsonl{more}; name another "
            "file with --train_split, without its suffix",
            code="data-not-found",
        )
    used = _splits_used(name, files, selection)
    for split in used.values():
        check_shards(split, files[split])
    # What the numbers in the training rows mean, they mean in the others.
    classes = options.class_names or _ag_news_classes(files[used["train"]][0], reading.problem_type)

    def rows(paths: Sequence[Path]) -> Iterator[FoundRow]:
        for path in paths:
            yield from read_file(path, reading, class_names_beside(path) or classes)

    splits = {}
    for use, split in used.items():
        paths = files[split]
        splits[use] = (str(paths[0] if len(paths) == 1 else folder / split), rows(paths))
    return _assemble(name, splits, None, reading, options)


def _ag_news_classes(path: Path, problem_type: ProblemType) -> list[str] | None:
    return ag_news_classes(path) if problem_type is SINGLE_LABEL else None


def is_saved_by_datasets(folder: Path) -> bool:
    return (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists()


def _splits_used(name: str, present: Collection[str], selection: Selection) -> dict[str, str]:
    """Which of a dataset's splits is for training, for validation and for the test."""
    used = _splits_asked(name, present, selection)
    # A split that is used under its own name is not used twice: the validation split may be the one
    # to test on.
    free = [split for split in present if split not in used.values()]
    for use, names in (("validation", VALIDATION_NAMES), ("test", ("test",))):
        if found := [split for split in names if split in free]:
            used.setdefault(use, found[0])
    return used


def _splits_asked(name: str, present: Collection[str], selection: Selection) -> dict[str, str]:
    asked = {
        "train": selection.train_split,
        "validation": selection.validation_split,
        "test": selection.test_split,
    }
    asked = {use: split for use, split in asked.items() if split}
    for use, split in asked.items():
        if split not in present:
            raise UserError(
                f"--dataset {name}: has no {split} split, only "
                f"{some_of(sorted(present)) or 'none'}; name one of them with --{use}_split",
                code="data-not-found",
            )
    return asked


def _saved_splits(name: str, folder: Path, reading: Reading) -> dict[str, Any]:
    """The splits of a folder saved by `datasets`, from the shards that can be read."""
    from datasets import concatenate_datasets

    listed = folder / "dataset_dict.json"
    try:
        names = json.loads(listed.read_text())["splits"] if listed.exists() else None
        origins = {split: folder / split for split in names} if names else {"train": folder}
        return {
            split: concatenate_datasets(_shards(part, reading)) for split, part in origins.items()
        }
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
    # Shards have equal lengths within one row; the length of an unreadable one is not recorded
    # anywhere else.
    rows = max((len(shard) for shard in readable), default=1)
    for path, why in unreadable.items():
        reading.reject(str(path), f"cannot be read ({why})", rows)
    if len(unreadable) > len(readable):
        raise UserError(
            f"--dataset {folder}: {len(unreadable)} of its shards cannot be read, and "
            f"{len(readable)} can",
            code="data-unreadable",
        )
    return readable


def _read_hub(name: str, options: LoadOptions, say: Callable[[str], None]) -> TextData:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    refuse_revision("--dataset", name)
    selection = options.selection
    config, revision = selection.dataset_config or None, selection.dataset_revision or None
    try:
        found = ask_hub(
            f"--dataset {name}", lambda: load_dataset(name, config, revision=revision), say
        )
    except ForeseenError:
        raise
    except DatasetNotFoundError as error:
        which = f"dataset, or none of --dataset_revision {revision}" if revision else "dataset"
        raise UserError(
            f"--dataset {name}: the hub has no such {which}, or it needs a login; {OFFLINE_HINT}",
            code="hub-not-found",
        ) from error
    # The hub's HTTP client has errors of its own, which differ between its versions.
    except Exception as error:
        # Perhaps one of several configurations must be named: the hub is asked which there are.
        if isinstance(error, ValueError):
            _check_configuration(name, selection)
        raise UserError(
            f"--dataset {name}: the hub could not be read ({first_line(error)}); {OFFLINE_HINT}",
            code="hub-unreachable",
        ) from error
    return _from_datasets(name, found, options.reading(), options)


def _check_configuration(name: str, selection: Selection) -> None:
    """Once a dataset could not be read, find out whether that is because of its configurations.

    Raises:
        UserError: it has several and none was chosen, or not the one that was.
    """
    from datasets import get_dataset_config_names

    try:
        names = get_dataset_config_names(name, revision=selection.dataset_revision or None)
    except Exception:  # then the first error says more
        return
    asked = selection.dataset_config
    if (asked and asked not in names) or (not asked and len(names) > 1):
        what = f"has no configuration {asked}" if asked else "has several configurations"
        raise UserError(
            f"--dataset {name}: {what}; choose one with --dataset_config: {some_of(names)}",
            code="data-configuration",
        )


def _from_datasets(name: str, found: Any, reading: Reading, options: LoadOptions) -> TextData:
    splits = found if isinstance(found, dict) else {"train": found}
    used = _splits_used(name, splits, options.selection)

    def columns_of(split: str) -> list[list[str]]:
        return reading.find_columns(f"--dataset {name} {split}", list(splits[split].features))

    def names_of(split: str, columns: list[list[str]]) -> list[str] | None:
        """Of a column of class numbers or lists of them; splits may number theirs differently."""
        if not reading.columns.label or len(columns[1]) != 1:
            return None
        feature = splits[split].features[columns[1][0]]
        return getattr(feature, "names", None) or getattr(
            getattr(feature, "feature", None), "names", None
        )

    def rows(split: str) -> Iterator[FoundRow]:
        columns = columns_of(split)
        names = names_of(split, columns)
        cells = [
            zip(*(splits[split][column] for column in joined), strict=True) for joined in columns
        ]
        for i, (text, *others) in enumerate(zip(*cells, strict=True)):
            if others:
                labels, *pair = others
                others = [[named_class(label, names) for label in labels], *pair]
            yield f"{name} {split} row {i}", *text_and_label(text, *others)

    label_names = names_of(used["train"], columns_of(used["train"]))
    found_splits = {use: (f"{name} {split}", rows(split)) for use, split in used.items()}
    return _assemble(name, found_splits, label_names, reading, options)


def _assemble(
    name: str,
    splits: Mapping[str, tuple[str, Iterable[FoundRow]]],
    label_names: Sequence[str] | None,
    reading: Reading,
    options: LoadOptions,
) -> TextData:
    """``splits``: by what they are for, their names for people and their rows."""
    task, origins = options.task, {}

    def read(use: str, *allowed: Any) -> tuple[Sequence[Text], Sequence[Label]]:
        found = reading.usable(*splits[use], *allowed)
        if options.as_found:
            origins[use] = reading.origins
        return found

    def rows_of(use: str, *allowed: Any) -> Rows:
        texts, labels = read(use, names, *allowed)
        return Rows(texts, task.targets(labels, names))

    # The training rows first: they decide which labels there are, which the others are checked by.
    texts, labels = read("train", () if options.more_labels else options.labels)
    names, notes = _name_labels(name, labels, label_names, reading, options)
    train, validation = Rows(texts, task.targets(labels, names)), None
    # Of many rows, the labels as they were read need more memory than what became of them.
    del texts, labels
    if "validation" in splits:
        validation = rows_of("validation")
        count = counted(len(validation), "row")
        notes.append(f"validation on the {count} of {splits['validation'][0]}")
    if "test" in splits:
        test = rows_of("test", TEST_HINT)
    elif options.as_found:
        test = train.take(np.array([], dtype=np.int64))
    else:
        train, test = _set_test_aside(name, train, options)
        notes.append(
            f"no test rows in the data: {len(test)} of the {len(train) + len(test)} rows "
            "were set aside as the test set"
        )
    fraction = 0.0 if options.as_found else options.validation_fraction
    if task.is_language_model and validation is None and fraction:
        # Set aside here, as whole texts: a text that is cut into blocks could be in two splits.
        rest, held_out = _set_aside(train, fraction, options)
        if len(held_out):
            train, validation = rest, held_out
    return TextData(
        name,
        names,
        train,
        test,
        [*notes, *reading.notes],
        reading.count,
        validation,
        has_test_rows="test" in splits,
        origins=origins,
    )


def _name_labels(
    name: str,
    found: Sequence[Label],
    declared: Sequence[str] | None,
    reading: Reading,
    options: LoadOptions,
) -> tuple[list[str], list[str]]:
    """The names of all labels, and reasons to doubt them; ``found``: of the training rows."""
    labels = options.labels
    if labels:
        more = {str(label) for label in found} - set(labels) if options.more_labels else ()
        return [*labels, *sorted(more)], []
    known, column = declared or reading.declared, reading.columns.label
    try:
        return options.task.name_labels(name, found, known, column)
    except UserError as error:
        if not reading.without_header:
            raise
        raise UserError(f"{error}; {reading.notes[0]}", code=error.code) from error


def _set_test_aside(name: str, rows: Rows, options: LoadOptions) -> tuple[Rows, Rows]:
    train, test = _set_aside(rows, TEST_SHARE, options)
    if len(test) == 0:
        raise UserError(
            f"--dataset {name}: {len(rows)} rows leave none for validation and test; at least 3 "
            "rows of each label are needed, one each to train, validate and test on",
            code="rows-too-few",
        )
    return train, test


def _set_aside(rows: Rows, share: float, options: LoadOptions) -> tuple[Rows, Rows]:
    kept, held_out = split_rows(options.task.strata(rows.labels), share, options.seed)
    return rows.take(kept), rows.take(held_out)
