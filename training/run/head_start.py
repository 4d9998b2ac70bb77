"""Before the first step: the head is fitted to all that the encoder says of the training rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np

from common.text import counted
from training.config import TrainConfig, model_place
from training.data.prepare import PreparedData
from training.data.tokenized import TokenizedRows
from training.data.unlabelled import WORD, in_sentences
from training.distributed.ranks import Ranks
from training.model.classifier import NewsClassifier, to_fp32
from training.model.pooling import FIRST, MEAN, POOLING_KEY, trained_pooling
from training.monitoring.records import METRICS
from training.run.extend import earlier_head
from training.run.fitted_head import can_be_fitted, fit_head, read_on_all_ranks

# Rows to fit a head to that is only a start: reading them takes a third of an epoch at most.
ROWS_TO_START, ROWS_PER_LABEL = 4_096, 32


@dataclass(frozen=True)
class Start:
    """What a run begins with; see :class:`FittedHead`."""

    pooling: str
    metric: str
    score: float | None
    folds: int
    loss: float
    agreement: float | None = None
    learned_from_texts: bool = False
    num_texts: int = 0

    @property
    def by_folds(self) -> str:
        """What the fitted head is worth on rows that it has not seen, in words; empty if that could not be told."""
        if self.score is None:
            return ""
        return (
            f"{METRICS[self.metric].title} {METRICS[self.metric].shown(self.score)} by "
            f"{self.folds} folds"
        )


def wanted_pooling(config: TrainConfig) -> str:
    """How to load the encoder; with the block of the mean it can be read in both ways."""
    if config.from_model:
        return ""  # as it was trained
    return FIRST if _pooling_of_files(config) == FIRST else MEAN


def start_from_head(
    config: TrainConfig,
    model: NewsClassifier,
    ranks: Ranks,
    data: PreparedData,
    precision: str,
    load: Callable[[], NewsClassifier],
    say: Callable[[str], None],
) -> tuple[NewsClassifier, Start] | None:
    """Choose how to read the encoder, and fit its head; a collective call.

    ``load``: loads the model again, without the block that lets its head read the mean.

    Returns:
        The model, the same on all ranks; None if its head cannot be reached, or its weights are too
        large to be held by every rank.
    """
    if not can_be_fitted(model):
        return None
    to_fp32(model)
    index, texts = _rows_to_read(config, data), _texts_to_read(config, data)
    say(_announcement(config, len(index), len(texts)))
    read = partial(read_on_all_ranks, model, ranks=ranks, precision=precision)
    rows = read(data.tokens.train, index)
    finite = np.all([np.isfinite(states).all(axis=1) for states in rows.values()], axis=0)
    # Without "head" the last layer reads all tokens. And if most of what the encoder says is not
    # finite, there is nothing to fit, which is no error here: training says at which row it is.
    if "head" not in rows or 2 * finite.sum() < len(index):
        return None
    # Reading is a collective call, so each rank must come to the same decision about what is read.
    nothing = {name: states[:0] for name, states in rows.items()}
    names = ranks.broadcast(_names(config, model.label_names, data) if ranks.is_first else None)
    of_names = nothing
    if names is not None:
        of_names = _mean_of_each(names.labels, read(names, np.arange(len(names))))
    of_texts = read(data.tokens.train, texts) if len(texts) else nothing
    head = None
    if ranks.is_first:
        # Without a dataset the rows are the names themselves.
        own = np.flatnonzero(finite) if config.dataset else np.arange(0)
        of_rows = {name: states[own] for name, states in rows.items()}
        head = fit_head(
            model,
            (of_rows, _finite(of_names), _finite(of_texts)),
            data.tokens.train.labels[index[own]],
            trained=MEAN if model.has_own_mean_block else _pooling_of_files(config),
            is_final=config.method == "head",
            seed=config.seed,
            earlier=earlier_head(config) if config.from_model else None,
        )
    # Fitted once and sent to all. Every rank could fit it from the same vectors, but not all
    # machines round alike, and the copies must begin with the same bits.
    head = ranks.broadcast(head)
    assert head is not None
    has_block = getattr(model.config, POOLING_KEY, None) == MEAN
    if has_block and head.pooling != MEAN:  # the block is not needed
        model = load()
        to_fp32(model)
    head.apply_to(model)
    known = {one.name: getattr(head, one.name) for one in fields(Start) if one.name != "num_texts"}
    return model, Start(**known, num_texts=len(texts))


def _announcement(config: TrainConfig, num_rows: int, num_texts: int) -> str:
    what = f"to {counted(num_rows, 'row')}" if config.dataset else "to the names of the labels"
    more = f" and {counted(num_texts, 'text')} without a label" if num_texts else ""
    return f"Fitting the head {what}{more} ..."


def _pooling_of_files(config: TrainConfig) -> str | None:
    return trained_pooling(Path(model_place(config.model)))


def _mean_of_each(labels: np.ndarray, read: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """From what was read of the sentences of all names, (sentences, hidden), to one vector per name."""
    # Labels ascend, so the sentences of a name are neighbours, and begin where the number changes.
    starts = np.flatnonzero(np.diff(labels, prepend=-1))
    counts = np.diff(starts, append=len(labels))[:, None].astype(np.float32)
    return {name: np.add.reduceat(states, starts) / counts for name, states in read.items()}


def _finite(read: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.nan_to_num(states) for name, states in read.items()}


def _rows_to_read(config: TrainConfig, data: PreparedData) -> np.ndarray:
    """All training rows with a label, or where the head is only a start, some, drawn with the seed."""
    index = data.labelled_index
    most = max(ROWS_TO_START, ROWS_PER_LABEL * len(data.tokens.label_names))
    if config.method == "head" or len(index) <= most:
        return index
    return np.sort(np.random.default_rng([config.seed, 13]).permutation(index)[:most])


def _texts_to_read(config: TrainConfig, data: PreparedData) -> np.ndarray:
    """The texts of ``--unlabelled``; of many, a sample that is drawn with the seed."""
    index = np.arange(data.tokens.num_labelled, len(data.tokens.train) if config.unlabelled else 0)
    drawn = np.random.default_rng([config.seed, 17]).permutation(index)[:ROWS_TO_START]
    return np.sort(drawn)


def _names(config: TrainConfig, labels: list[str], data: PreparedData) -> TokenizedRows | None:
    """Sentences about the labels as rows, with the numbers of these; None if a name is no word, or
    rows are pairs, or an earlier model is extended, whose rows say more.
    """
    if config.from_model:
        return None
    if config.dataset and (config.columns.pair or not all(WORD.search(name) for name in labels)):
        return None
    assert data.tokenizer is not None
    texts = [(text, label) for label, name in enumerate(labels) for text in in_sentences(name)]
    found = [
        data.tokenizer(text, truncation=True, max_length=config.max_length)["input_ids"]
        for text, _ in texts
    ]
    offsets = np.cumsum([0, *map(len, found)])
    owners = np.array([label for _, label in texts])
    return TokenizedRows(np.concatenate(found).astype(np.int32), offsets, owners, num_cut=0)
