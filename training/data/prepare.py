"""Before the first step: texts, tokens, splits and the model, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import yaml

from common.errors import UserError, first_line
from common.text import TextTokenizer
from training.config import TINY, TrainConfig
from training.data.dataset import SAMPLE, NewsData, default_cleaning, load_news, split_rows
from training.data.hub_access import cache_is_shared, download_once
from training.data.tokenized import (
    TokenizedNews,
    TokenizedRows,
    cache_key,
    check_model_name,
    load_from,
    load_tokenizer,
    read_tokens,
    write_tokens,
)
from training.model.classifier import PROBE_PADDING, NewsClassifier, try_unknown_family
from training.model.layers import check_depths, freeze_layers
from training.model.own import NOTHING_OWN, Own
from training.parallelism.distributed import Ranks
from training.tasks import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_TO_TRY = 4


@dataclass(frozen=True)
class PreparedNews:
    """Tokens, and which rows are used for training and for validation.

    ``train_index``: row numbers of the training split, ascending; ``validation_index``: of :attr:`validation_rows`.
    ``cleaning``: how texts were cleaned, ``news`` or ``none``. ``texts`` and ``tokenizer`` are only on the first rank
    of each machine.
    """

    tokens: TokenizedNews
    train_index: np.ndarray
    validation_index: np.ndarray
    cleaning: str
    texts: NewsData | None
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def validation_rows(self) -> TokenizedRows:
        return self.tokens.validation or self.tokens.train


def prepare_news(config: TrainConfig, ranks: Ranks, say: Callable[[str], None]) -> PreparedNews:
    """Read and tokenize on the first rank of each machine, then map the cached tokens on every rank.

    Raises:
        UserError: the data or the tokenizer cannot be found, or there are too few rows.
    """
    cache_dir = config.cache_dir.expanduser()
    loaded: tuple[NewsData, PreTrainedTokenizerBase] | None = None

    def read() -> tuple[str, str]:
        nonlocal loaded
        # The texts of a large dataset fit into memory once per machine, not once per rank.
        if ranks.local_rank != 0:
            return "", ""
        check_model_name(config.model)
        say(f"Reading {config.dataset} ...")
        data = load_news(config.dataset, config.seed, config.bad_rows, config.columns, say, TASKS[config.task])
        for note in data.notes:
            say(note[0].upper() + note[1:])
        is_chosen = config.clean != "auto"
        cleaning = config.clean if is_chosen else default_cleaning(config.dataset, data.label_names)
        tokenizer = load_tokenizer(config.model, data.train.texts, config.max_length, say, cleaning)
        tokenizer_json = tokenizer.backend_tokenizer.to_str()
        # The key covers everything that the tokens depend on, so a cached file never has to be checked against its
        # source.
        key = cache_key(data, tokenizer_json, config.max_length, cleaning)
        write_tokens(cache_dir, key, data, TextTokenizer.from_json(tokenizer_json, config.max_length, cleaning), say)
        loaded = data, tokenizer
        return key, cleaning

    asks_hub = not (_is_local(config.dataset) and _is_local(config.model))
    shared = ranks.any(asks_hub) and cache_is_shared(ranks)
    key, cleaning = ranks.broadcast(download_once(ranks, read, shared=shared))
    # Memory-mapped: all ranks of a machine share the same pages.
    tokens = read_tokens(cache_dir, key)
    train, validation = ranks.run_on_all_ranks(lambda: _split(config, tokens, ranks.world_size))
    texts, tokenizer = loaded or (None, None)
    if texts and (repeated := _repeated_rows(texts, train, validation)):
        say(repeated)
        tokens = replace(tokens, notes=[*tokens.notes, repeated])
    return PreparedNews(tokens, train, validation, cleaning, texts, tokenizer)


def class_weights_of(
    config: TrainConfig, news: PreparedNews, began: Sequence[float] | None = None
) -> np.ndarray | None:
    """What a training row of each label weighs in the loss, float64 (labels,); None if all weigh the same.

    With auto, the rows of all labels together weigh the same (King & Zeng, 2001, "Logistic regression in rare events
    data"), and a row weighs 1 on average. ``began``: what a run that is resumed began with, which it keeps.

    Raises:
        UserError: the file cannot be read, or does not give each label a positive number.
    """
    names = news.tokens.label_names
    if config.class_weights == "none":
        return None
    if began is not None:
        return np.array(began)
    if config.class_weights == "auto":
        counts = np.bincount(news.tokens.train.labels[news.train_index], minlength=len(names))
        # A label without training rows gets any weight: no row asks for it.
        return len(news.train_index) / (np.count_nonzero(counts) * np.maximum(counts, 1))
    try:
        given = yaml.safe_load(Path(config.class_weights).expanduser().read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise _wrong_weights(config, f"cannot be read ({first_line(error)})") from error
    if not isinstance(given, dict):
        raise _wrong_weights(config, f"must hold a weight for each label, such as `{names[0]}: 2.5`")
    given = {str(name): weight for name, weight in given.items()}
    if unknown := sorted(given.keys() - set(names)):
        raise _wrong_weights(config, f"{unknown[0]!r} is not a label of the data, which has {', '.join(names)}")
    if missing := [name for name in names if name not in given]:
        raise _wrong_weights(config, f"has no weight for the label {missing[0]!r}")
    for name, weight in given.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (is_number and 0 < weight < math.inf):
            raise _wrong_weights(config, f"the weight of {name!r} is {weight!r}; it must be a number above 0")
    return np.array([float(given[name]) for name in names])


def _wrong_weights(config: TrainConfig, what: str) -> UserError:
    return UserError(
        f"--class_weights {config.class_weights}: {what}; give none, auto or a YAML or JSON file", code="class-weights"
    )


def _is_local(name: str) -> bool:
    return name in (SAMPLE, TINY) or Path(name).expanduser().exists()


def _split(config: TrainConfig, tokens: TokenizedNews, world_size: int) -> tuple[np.ndarray, np.ndarray]:
    labels = TASKS[config.task].strata(tokens.train.labels)
    chosen = np.arange(len(labels))
    if 0 < config.max_train_rows < len(labels):
        # A seeded sample, in ascending order; the 3 gives it a stream of its own, apart from the other uses of the
        # seed.
        chosen = np.sort(np.random.default_rng([config.seed, 3]).permutation(chosen)[: config.max_train_rows])
    if tokens.validation:
        train, validation = chosen, np.arange(len(tokens.validation))
    else:
        kept, held_out = split_rows(labels[chosen], config.validation_fraction, config.seed)
        train, validation = chosen[kept], chosen[held_out]
    if len(validation) == 0:
        raise UserError(
            f"--dataset {config.dataset}: no label has two rows, so none can be kept for validation; bring more rows, "
            "or validation rows of their own (validation.csv beside train.csv)",
            code="rows-too-few",
        )
    if len(train) < world_size:
        raise UserError(
            f"{world_size} ranks for {len(train)} training rows: start fewer processes", code="rows-too-few"
        )
    return train, validation


def _repeated_rows(data: NewsData, train: np.ndarray, validation: np.ndarray) -> str:
    """How many validation and test texts are also training texts, in words; empty if none are."""
    known = {data.train.texts[row] for row in train}
    held_out = (data.validation or data.train).take(validation)
    counts = [
        f"{count:,} of {len(rows):,} {split} rows"
        for split, rows in (("validation", held_out), ("test", data.test))
        if (count := sum(text in known for text in rows.texts))
    ]
    return f"{' and '.join(counts)} repeat the text of a training row, so their scores are too good" if counts else ""


def prepare_model(
    config: TrainConfig, ranks: Ranks, news: PreparedNews, say: Callable[[str], None], own: Own = NOTHING_OWN
) -> NewsClassifier:
    """Build or load the model, downloaded once per machine, or once in all if the machines share the hub's cache.

    Raises:
        UserError: no such model, it has fewer positions than ``max_length``, or not the layers that flags speak of.
    """
    tokens = news.tokens

    def load() -> NewsClassifier:
        if own.network:
            task = TASKS[config.task](tokens.label_names)
            model = NewsClassifier.around(own.network(tokens.vocab_size, len(tokens.label_names)), task)
        else:
            model = load_stored()
        if config.max_length > model.max_positions:
            raise UserError(
                f"--max_length {config.max_length}: --model {config.model} has positions for "
                f"{model.max_positions} tokens",
                code="max-length",
            )
        check_depths(model.network, config)
        head = model.network.get_submodule(model.head) if model.head else None
        targets = tokens.train.labels[news.train_index]
        model.task.fit(targets, head)
        own.apply_to(model.task, targets[:ROWS_TO_TRY])
        row = int(np.argmin(tokens.train.lengths))
        start, end = tokens.train.offsets[row], tokens.train.offsets[row + 1]
        if end - start + PROBE_PADDING <= model.max_positions:
            ids = torch.from_numpy(tokens.train.ids[start:end].astype(np.int64))[None]
            flag = "--network" if own.network else f"--model {config.model}"
            if unused := try_unknown_family(model, flag, ids):
                say(f"{len(unused)} parameters that no answer depends on are left as they are ({unused[0]}, ...)")
        freeze_layers(model.network, config)
        return model

    def load_stored() -> NewsClassifier:
        return load_from(
            config.model,
            lambda: NewsClassifier(
                len(tokens.label_names),
                config.model,
                tokens.label_names,
                vocab_size=tokens.vocab_size,
                as_stored=True,
                task=TASKS[config.task],
            ),
            say,
        )

    if not ranks.any(not _is_local(config.model)):
        return ranks.run_on_all_ranks(load)
    return download_once(ranks, load, shared=cache_is_shared(ranks))
