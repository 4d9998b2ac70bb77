"""Before the first step: the head is fitted to all that the encoder says of the training rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.text import counted
from training.config import TrainConfig, model_place
from training.data.prepare import PreparedNews
from training.data.tokenized import TokenizedRows
from training.model.classifier import NewsClassifier, widen
from training.model.head import fit_head, read_on_all_ranks
from training.model.pooling import MEAN, POOLING_KEY, trained_pooling
from training.monitoring.records import METRICS
from training.parallelism.distributed import Ranks

# Rows to fit a head to that is only a start: reading them takes a third of an epoch at most.
ROWS_TO_START, ROWS_PER_LABEL = 4_096, 32
# Larger models stay in their files until a strategy has shared them out.
MOST_WEIGHTS = 500_000_000
# A name is words if it has three letters in a row.
WORD = re.compile(r"[^\W\d_]{3}")


@dataclass(frozen=True)
class Start:
    """What a run begins with; see :class:`FittedHead`."""

    pooling: str
    metric: str
    score: float | None
    folds: int
    loss: float

    @property
    def by_folds(self) -> str:
        """What the fitted head is worth on rows that it has not seen, in words; empty if that could not be told."""
        if self.score is None:
            return ""
        return f"{METRICS[self.metric].title} {METRICS[self.metric].shown(self.score)} by {self.folds} folds"


def wanted_pooling(config: TrainConfig) -> str:
    """How to load the encoder; with the block of the mean it can be read in both ways."""
    return trained_pooling(Path(model_place(config.model))) or MEAN


def start_from_head(
    config: TrainConfig,
    model: NewsClassifier,
    ranks: Ranks,
    news: PreparedNews,
    precision: str,
    load: Callable[[], NewsClassifier],
    say: Callable[[str], None],
) -> tuple[NewsClassifier, Start] | None:
    """Choose how to read the encoder, and fit its head; a collective call.

    ``load``: loads the model again, without the block that lets its head read the mean.

    Returns:
        The model, the same on all ranks; None if its head cannot be reached, or its weights are too large to be held
        by every rank.
    """
    # A last layer without a bias belongs to a decoder, which reads each row's last token.
    if not model.head or model.network.get_submodule(model.head).bias is None:
        return None
    if sum(parameter.numel() for parameter in model.parameters()) > MOST_WEIGHTS:
        return None
    widen(model)
    names = ranks.broadcast(_names(config, model.label_names, news) if ranks.is_first else None)
    index = _rows_to_read(config, news)
    trained = MEAN if model.has_own_mean_block else trained_pooling(Path(model_place(config.model)))
    say(f"Fitting the head to {counted(len(index), 'row')} ...")
    rows = read_on_all_ranks(model, news.tokens.train, index, ranks, precision)
    if "head" not in rows:
        return None
    of_names = {name: states[:0] for name, states in rows.items()}
    if names is not None:
        of_names = read_on_all_ranks(model, names, np.arange(len(names)), ranks, precision)
    head = None
    finite = np.all([np.isfinite(states).all(axis=1) for states in rows.values()], axis=0)
    if 2 * finite.sum() < len(index):  # training says at which row
        return None
    if ranks.is_first:
        targets = news.tokens.train.labels[index[finite]]
        head = fit_head(
            model,
            {name: states[finite] for name, states in rows.items()},
            {name: np.nan_to_num(states) for name, states in of_names.items()},
            targets,
            trained=trained,
            is_final=config.method == "head",
            seed=config.seed,
        )
    head = ranks.broadcast(head)
    if head.pooling != MEAN and getattr(model.config, POOLING_KEY, None) == MEAN:  # the block is not needed
        model = load()
        widen(model)
    head.apply_to(model)
    return model, Start(head.pooling, head.metric, head.score, head.folds, head.loss)


def _rows_to_read(config: TrainConfig, news: PreparedNews) -> np.ndarray:
    """All training rows with a label, or where the head is only a start, some, drawn with the seed."""
    index = news.labelled_index
    most = max(ROWS_TO_START, ROWS_PER_LABEL * len(news.tokens.label_names))
    if config.method == "head" or len(index) <= most:
        return index
    return np.sort(np.random.default_rng([config.seed, 13]).permutation(index)[:most])


def _names(config: TrainConfig, labels: list[str], news: PreparedNews) -> TokenizedRows | None:
    """The names of the labels as rows; None if they are no words, or rows are pairs."""
    if config.columns.pair or not all(WORD.search(name) for name in labels):
        return None
    assert news.tokenizer is not None
    words = [re.sub(r"[\W_]+", " ", name).strip() for name in labels]
    found = [news.tokenizer(text, truncation=True, max_length=config.max_length)["input_ids"] for text in words]
    offsets = np.cumsum([0, *map(len, found)])
    return TokenizedRows(np.concatenate(found).astype(np.int32), offsets, np.zeros(len(found), np.int64), num_cut=0)
