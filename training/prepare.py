"""Before the first step: texts, tokens, splits and the model, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from inference.tokenization import TextTokenizer
from training.config import TINY, TrainConfig
from training.dataset import NewsData, default_cleaning, load_news, split_rows
from training.distributed import Ranks
from training.errors import UserError
from training.model import NewsClassifier
from training.tokenized import (
    TokenizedNews,
    cache_key,
    load_tokenizer,
    model_errors,
    read_tokens,
    write_tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreparedNews:
    """Tokens, and which training rows are trained on and which validate.

    ``train_index``, ``validation_index``: row numbers of the training split, rising. ``cleaning``: how texts were
    cleaned, ``news`` or ``none``. ``texts`` and ``tokenizer`` are on the first rank of each machine only.
    """

    tokens: TokenizedNews
    train_index: np.ndarray
    validation_index: np.ndarray
    cleaning: str
    texts: NewsData | None
    tokenizer: PreTrainedTokenizerBase | None


def prepare_news(config: TrainConfig, ranks: Ranks, say: Callable[[str], None]) -> PreparedNews:
    """Read and tokenise on the first rank of each machine, then map the cached tokens on every rank.

    Raises:
        UserError: the data or the model's tokenizer cannot be had, or there are too few rows.
    """
    cache_dir = config.cache_dir.expanduser()
    loaded: tuple[NewsData, PreTrainedTokenizerBase] | None = None

    def read() -> tuple[str, str]:
        nonlocal loaded
        if ranks.local_rank != 0:
            return "", ""
        say(f"Reading {config.dataset} ...")
        data = load_news(config.dataset, config.seed, config.bad_rows)
        if data.left_out:
            say(data.notes[-1])
        is_chosen = config.clean != "auto"
        cleaning = config.clean if is_chosen else default_cleaning(config.dataset, data.label_names)
        tokenizer = load_tokenizer(config.model, data.train.texts, config.max_length, cleaning)
        tokenizer_json = tokenizer.backend_tokenizer.to_str()
        key = cache_key(data, tokenizer_json, config.max_length, cleaning)
        write_tokens(cache_dir, key, data, TextTokenizer.from_json(tokenizer_json, config.max_length, cleaning), say)
        loaded = data, tokenizer
        return key, cleaning

    key, cleaning = ranks.broadcast(ranks.together(read))
    tokens = read_tokens(cache_dir, key)
    train, validation = ranks.together(lambda: _split(config, tokens, ranks.world_size))
    texts, tokenizer = loaded or (None, None)
    return PreparedNews(tokens, train, validation, cleaning, texts, tokenizer)


def _split(config: TrainConfig, tokens: TokenizedNews, world_size: int) -> tuple[np.ndarray, np.ndarray]:
    labels = tokens.train.labels
    chosen = np.arange(len(labels))
    if 0 < config.max_train_rows < len(labels):
        chosen = np.sort(np.random.default_rng([config.seed, 3]).permutation(chosen)[: config.max_train_rows])
    train, validation = split_rows(labels[chosen], config.validation_fraction, config.seed)
    if len(validation) == 0:
        raise UserError(f"--dataset {config.dataset}: no label has two rows, so none can be kept for validation")
    if len(train) < world_size:
        raise UserError(f"{world_size} ranks for {len(train)} training rows: start fewer processes")
    return chosen[train], chosen[validation]


def prepare_model(config: TrainConfig, ranks: Ranks, tokens: TokenizedNews) -> NewsClassifier:
    """Build or load the model, once downloaded on each machine.

    Raises:
        UserError: no such model, or it has fewer positions than ``max_length``.
    """

    def load() -> NewsClassifier:
        with model_errors(config.model):
            model = NewsClassifier(
                len(tokens.label_names), config.model, tokens.label_names, vocab_size=tokens.vocab_size
            )
        if config.max_length > model.max_positions:
            raise UserError(
                f"--max_length {config.max_length}: --model {config.model} has positions for "
                f"{model.max_positions} tokens"
            )
        return model

    is_local = config.model == TINY or Path(config.model).expanduser().is_dir()
    return ranks.together(load) if is_local else ranks.first_then_rest(load)
