"""``--from MODEL``: the rows that an earlier model was trained on, read again beside the new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ForeseenError, UserError
from common.escaping import some_of
from common.model_folder import SavedModel, read_saved_model
from common.problem_types import SINGLE_LABEL
from common.rows import Columns
from common.text import counted, folded
from training.config import Selection, TrainConfig
from training.data.dataset import LoadOptions, Rows, TextData, load_data
from training.data.stored_texts import JoinedTexts

# Rows of the earlier data that are read again: enough to hold what is known, and read in seconds.
ROWS_AGAIN, ROWS_AGAIN_PER_LABEL = 4_096, 32


def read_earlier(config: TrainConfig) -> SavedModel:
    """The model that ``--from`` names.

    Raises:
        UserError: it is none, or not one that gives single texts one label.
    """
    path = Path(config.from_model).expanduser()
    if not path.is_dir():
        raise UserError(
            f"--from {config.from_model}: no folder of that name", code="model-not-found"
        )
    saved = read_saved_model(path)
    what = ""
    if saved.weights is None:
        what = (
            "has only the exported artefact, without weights that could be trained; name the "
            "folder that training wrote"
        )
    elif saved.problem_type is not SINGLE_LABEL or saved.reads_pairs or saved.windows:
        what = (
            "only a model that gives single texts one label can learn more; train on all rows "
            "instead"
        )
    if what:
        raise UserError(f"--from {config.from_model}: {what}", code="model-unusable")
    return saved


def with_earlier_settings(config: TrainConfig) -> TrainConfig:
    """The configuration with what the earlier model fixes: how texts are cut and cleaned."""
    saved = read_earlier(config)
    kept = {"max_length": saved.max_length, "clean": saved.cleaning}
    return config.model_copy(
        update={name: value for name, value in kept.items() if not config.gives(name)}
    )


def with_earlier_rows(config: TrainConfig, say: Callable[[str], None]) -> TextData:
    """The new rows, and behind them rows of the data that the earlier model was trained on, with
    the labels of both.

    No row that the earlier model was trained on becomes a test row, and no test row of its own is
    trained on.

    Raises:
        UserError: the earlier data is gone, and the new rows do not have all of its labels.
    """
    saved = read_earlier(config)
    options = replace(LoadOptions.of(config), labels=saved.labels, more_labels=True)
    new = load_data(config.dataset, options, say)
    if added := new.label_names[len(saved.labels) :]:
        note = f"{some_of(added)}: new to {config.from_model}, which knows {some_of(saved.labels)}"
        new = replace(new, notes=[note, *new.notes])
    try:
        old = _read_again(config, saved, new.label_names, say)
    except ForeseenError as error:
        counts = np.bincount(new.train.labels, minlength=len(new.label_names))
        missing = [name for name, count in zip(saved.labels, counts, strict=False) if not count]
        if missing:
            raise UserError(
                f"--from {config.from_model}: the rows that it learned {some_of(missing)} from "
                "cannot be read again "
                f"({error}); give rows of these labels too",
                code="data-not-found",
            ) from error
        what = f"the data that {config.from_model} was trained on cannot be read again ({error})"
        note = f"{what}, so the new rows stand for all"
        return replace(new, notes=[note, *new.notes])
    # A text counts as the same if only case and white space differ. What the earlier model has
    # learned by heart would be an easy test row, and its own test rows must stay unseen.
    was_trained, was_tested = (
        {folded(text) for text in rows.texts} for rows in (old.train, old.test)
    )
    trained = _without(new.train, was_tested)
    tested = _without(new.test, was_trained | was_tested)
    again = _drawn(config, old.train, len(saved.labels))
    note = (
        f"{counted(len(again), 'row')} of {old.name}, on which {config.from_model} was trained, "
        f"{'is' if len(again) == 1 else 'are'} read again"
    )
    return replace(
        new,
        train=_both(trained, again),
        test=_both(old.test, tested),
        validation=None,
        notes=[note, *new.notes],
        left_out=new.left_out + old.left_out,
        has_test_rows=True,
    )


def _read_again(
    config: TrainConfig, saved: SavedModel, labels: Sequence[str], say: Callable[[str], None]
) -> TextData:
    found: list[TextData] = []
    for about in sources_of(saved):
        if "dataset" not in about:
            raise UserError("it does not say which", code="data-not-found")
        columns = Columns(
            str(about.get("text_column", "text")), str(about.get("label_column", "label")), ""
        )
        selection = {
            field.name: str(about[field.name])
            for field in fields(Selection)
            if about.get(field.name)
        }
        # With the flags of that time, its seed above all: then the rows that it set aside are set
        # aside again, and test rows are still test rows.
        options = LoadOptions(
            seed=about.get("seed", config.seed),
            bad_rows=str(about.get("bad_rows", "stop")),
            columns=columns,
            selection=Selection(**selection),
            texts_in=config.cache_folder,
            labels=labels,
        )
        data = load_data(about["dataset"], options, say)
        if found:
            joined = {
                "train": _both(found[0].train, data.train),
                "test": _both(found[0].test, data.test),
            }
            data = replace(data, name=f"{found[0].name} and {data.name}", **joined)
        found = [data]
    return found[0]


def sources_of(saved: SavedModel) -> list[dict[str, Any]]:
    """How the data is read that a model has learned from: its own, then that of the models which it extends."""
    names = (
        "dataset",
        "text_column",
        "label_column",
        "seed",
        "bad_rows",
        *(field.name for field in fields(Selection)),
    )
    own = {name: saved.metadata[name] for name in names if name in saved.metadata}
    return [own, *saved.metadata.get("learned_before", [])]


def _without(rows: Rows, known: set[Any]) -> Rows:
    kept = np.array([folded(text) not in known for text in rows.texts], dtype=bool)
    return rows if kept.all() else rows.take(np.flatnonzero(kept))


def _drawn(config: TrainConfig, rows: Rows, num_labels: int) -> Rows:
    most = max(ROWS_AGAIN, ROWS_AGAIN_PER_LABEL * num_labels)
    if len(rows) <= most:
        return rows
    return rows.take(
        np.sort(np.random.default_rng([config.seed, 31]).permutation(len(rows))[:most])
    )


def _both(first: Rows, second: Rows) -> Rows:
    return Rows(
        JoinedTexts(first.texts, second.texts), np.concatenate([first.labels, second.labels])
    )
