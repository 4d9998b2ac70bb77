"""Texts without labels (--unlabelled, --distill_texts) and labels without texts (--labels)."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.problem_types import PLAIN_TEXT
from common.rows import Reading, read_texts
from common.text import Text
from training.config import TrainConfig
from training.data.dataset import Rows, TextData, texts_on_disk
from training.data.duplicates import Repeats
from training.data.stored_texts import ChosenTexts, JoinedTexts

# A name is words if it has three letters in a row.
WORD = re.compile(r"[^\W\d_]{3}")
# Sci/Tech is two names; w/o and and/or are one.
BETWEEN_WORDS = re.compile(rf"(?<={WORD.pattern})\s*/\s*(?={WORD.pattern})")


def names_of_labels(labels: str) -> list[str]:
    """What ``--labels`` names.

    Raises:
        UserError: fewer than two names, or one twice.
    """
    try:
        lines = Path(labels).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):  # no file, so these are the names; quotes keep a comma within one
        lines = next(csv.reader([labels], skipinitialspace=True))
    names = [name.strip() for name in lines if name.strip()]
    if len(set(names)) < max(2, len(names)):
        what = f"names {names[0]!r} only" if len(set(names)) == 1 else "names one label twice"
        what = what if names else "is empty"
        raise UserError(
            f"--labels {labels}: {what}; give two or more, separated by commas",
            code="labels-too-few",
        )
    return names


def in_sentences(name: str) -> list[str]:
    """A label's name as texts of that label, which are closer to its texts than the bare words: one
    for each of the names that slashes separate, since "Sci/Tech" reads like neither science nor
    technology.
    """
    found = [re.sub(r"[\W_]+", " ", part).strip() for part in BETWEEN_WORDS.split(name)]
    return [f"This is about {words}." if words.isascii() else words for words in found]


def rows_of_names(names: Sequence[str]) -> TextData:
    """Data without rows: each label's name is the one training row that it has.

    Raises:
        UserError: a name without a letter, which means nothing.
    """
    if numbers := [name for name in names if not any(map(str.isalpha, name))]:
        raise UserError(
            f"--labels: {numbers[0]!r} says nothing of the texts it stands for; give names in "
            "words, or rows with --dataset",
            code="labels-too-few",
        )
    # A row has one text. It only stands for its label: the head reads all sentences, see
    # run/head_start.py.
    texts, labels = [in_sentences(name)[0] for name in names], np.arange(len(names))
    return TextData("the labels' names", list(names), Rows(texts, labels), Rows([], labels[:0]))


def add_unlabelled(data: TextData, config: TrainConfig, cache_dir: Path) -> TextData:
    """``data`` with the texts of ``--unlabelled`` or ``--distill_texts`` behind its training rows,
    whose labels there mean nothing.

    Raises:
        UserError: no such file or folder, an unusable row, or no new text.
    """
    flag = "unlabelled" if config.unlabelled else "distill_texts"
    asked = f"--{flag} {getattr(config, flag)}"
    path = Path(getattr(config, flag)).expanduser()
    reading = Reading(
        config.columns.without_label(),
        skip=config.bad_rows == "skip",
        flag=f"--{flag}",
        remedy="name yours with --text_column",
        problem_type=PLAIN_TEXT,
        new_texts=partial(texts_on_disk, cache_dir),
    )
    texts = read_texts(path, reading)

    num_labelled = len(data.train)
    # A text that any row has already is left out: in the validation or test rows it would make
    # their scores too good, and among the training rows it would say nothing new.
    fresh, num_new = _fresh_rows(replace(data, train=_joined(data.train, texts)), num_labelled)
    if not len(fresh):
        raise UserError(f"{asked}: all of its texts are already in the data", code="data-empty")
    note = f"{len(fresh):,} texts without a label from {path}"
    if left_out := num_new - len(fresh):
        why = "because the data or an earlier line has the same text"
        note += f"; {left_out:,} are left out, {why}"
    return replace(
        data,
        train=_joined(data.train, ChosenTexts(texts, fresh - num_labelled)),
        notes=[note, *data.notes, *(reading.notes[-1:] if reading.count else [])],
        left_out=data.left_out + reading.count,
        num_unlabelled=len(fresh),
    )


def _fresh_rows(joined: TextData, num_labelled: int) -> tuple[np.ndarray, int]:
    """The training rows behind the labelled ones that have a new text, and how many there are."""
    repeats = Repeats(joined, near=False)
    known, new = np.split(repeats.rows["train"], [num_labelled])
    others = [rows for split, rows in repeats.rows.items() if split != "train"]
    fresh = new[repeats.partners(new, np.concatenate([known, *others])) < 0]
    # Then of those that repeat each other the first.
    return fresh[repeats.partners(fresh) < 0], len(new)


def _joined(rows: Rows, texts: Sequence[Text]) -> Rows:
    # Any label would do, because nobody reads it; zeros have the shape that the task wants.
    labels = np.zeros((len(texts), *rows.labels.shape[1:]), rows.labels.dtype)
    return Rows(JoinedTexts(rows.texts, texts), np.concatenate([rows.labels, labels]))
