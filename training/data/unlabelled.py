"""Texts without labels (``--distill_texts``), which join the training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.problem_types import PLAIN_TEXT
from common.rows import Columns, Reading, read_file
from common.text import Text
from training.config import TrainConfig
from training.data.dataset import NewsData, Rows, texts_on_disk
from training.data.duplicates import Repeats
from training.data.stored_texts import ChosenTexts, JoinedTexts


def add_unlabelled(data: NewsData, config: TrainConfig, cache_dir: Path) -> NewsData:
    """``data`` with the texts of ``--distill_texts`` behind its training rows, whose labels there mean nothing.

    A text that any row has already is left out: in the validation or test rows it would make their scores too good, and
    among the training rows it would say nothing new.

    Raises:
        UserError: no such file or folder, an unusable row, or no new text.
    """
    place = Path(config.distill_texts).expanduser()
    # Columns of a second text stand behind that of a label. There is none to read, so a column of the text takes its
    # place, and what it says there is ignored.
    columns = Columns(config.columns.text, config.columns.pair.partition(",")[0], config.columns.pair)
    reading = Reading(
        columns,
        skip=config.bad_rows == "skip",
        flag="--distill_texts",
        remedy="name yours with --text_column",
        problem_type=PLAIN_TEXT,
        new_texts=partial(texts_on_disk, cache_dir),
    )
    files = [place] if place.is_file() else sorted(one for one in place.glob("*") if one.suffix in reading.formats)
    if not files:
        what = f"the folder has no file that ends in {', '.join(reading.formats)}"
        what = what if place.is_dir() else "no such file or folder"
        raise UserError(f"--distill_texts {config.distill_texts}: {what}", code="data-not-found")
    texts, _ = reading.usable(str(place), chain.from_iterable(read_file(file, reading) for file in files))

    num_labelled = len(data.train)
    joined = replace(data, train=_joined(data.train, texts))
    repeats = Repeats(joined, near=False)
    known, new = np.split(repeats.rows["train"], [num_labelled])
    others = [rows for split, rows in repeats.rows.items() if split != "train"]
    fresh = new[repeats.partners(new, np.concatenate([known, *others])) < 0]
    fresh = fresh[repeats.partners(fresh) < 0]
    if not len(fresh):
        raise UserError(
            f"--distill_texts {config.distill_texts}: all of its texts are already in the data", code="data-empty"
        )
    note = f"{len(fresh):,} texts without a label from {place}"
    if left_out := len(new) - len(fresh):
        note += f"; {left_out:,} are left out, because the data or an earlier line has the same text"
    return replace(
        data,
        train=_joined(data.train, ChosenTexts(texts, fresh - num_labelled)),
        notes=[note, *data.notes, *(reading.notes[-1:] if reading.count else [])],
        left_out=data.left_out + reading.count,
        num_unlabelled=len(fresh),
    )


def _joined(rows: Rows, texts: Sequence[Text]) -> Rows:
    labels = np.zeros((len(texts), *rows.labels.shape[1:]), rows.labels.dtype)
    return Rows(JoinedTexts(rows.texts, texts), np.concatenate([rows.labels, labels]))
