"""Whether the tokenizer of ``--model`` can read the texts: what it does not know, and rows of which nothing is left."""

from __future__ import annotations

import json

import numpy as np
from tokenizers import Tokenizer

from common.errors import UserError
from common.rows import evenly_spread
from common.text import cleaner
from training.config import TrainConfig
from training.data.dataset import NewsData
from training.data.tokenized import TokenizedNews, TokenizedRows

TEXTS_TRIED, CHARS_TRIED = 1000, 2000
MOST_UNKNOWN = (
    0.5  # of the characters; a tokenizer for another language or alphabet knows less than half
)
WORTH_A_NOTE = 0.05


def check_tokens(
    config: TrainConfig, tokenizer_json: str, cleaning: str, texts: NewsData, tokens: TokenizedNews
) -> list[str]:
    """Lines about unknown words and rows without tokens, for the user.

    Raises:
        UserError: most of the texts cannot be read.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    frame = tokenizer.num_special_tokens_to_add(
        bool(config.columns.pair)
    )  # that each row has in addition
    splits = {"training": tokens.train, "validation": tokens.validation, "test": tokens.test}
    lines = [] if config.is_language_model else _check_empty(config, splits, frame)
    share = _unknown_share(tokenizer, cleaning, texts)
    what = f"{share:.0%} of the characters of the training texts are unknown to the tokenizer of --model {config.model}"
    if share > MOST_UNKNOWN:
        raise UserError(
            f"{what}; use a model for the language of the texts, with the tokenizer that it was trained with",
            code="tokenizer-unlike",
        )
    return [
        *lines,
        *([f"{what}, so words with them all look the same to it"] if share >= WORTH_A_NOTE else []),
    ]


def _check_empty(
    config: TrainConfig, splits: dict[str, TokenizedRows | None], frame: int
) -> list[str]:
    empty = {name: np.flatnonzero(rows.lengths <= frame) for name, rows in splits.items() if rows}
    found = {name: rows for name, rows in empty.items() if len(rows)}
    if not found:
        return []
    counts = " and ".join(
        f"{len(rows):,} {name} row{'s' * (len(rows) > 1)}" for name, rows in found.items()
    )
    name, rows = next(iter(found.items()))
    what = (
        f"{counts} (first: {name} row {rows[0] + 1:,}) have no token"
        + " besides the special ones" * (frame > 0)
    )
    if 2 * len(empty["training"]) > len(splits["training"] or ()):
        raise UserError(
            f"{what}; --model {config.model} needs the tokenizer that it was trained with, and texts that it can read",
            code="tokenizer-unlike",
        )
    if frame == 0:
        raise UserError(
            f"{what}, and a row without a single token cannot be computed; remove them from the data",
            code="row-unusable",
        )
    return [f"{what}, so the model reads nothing of their texts"]


def _unknown_share(tokenizer: Tokenizer, cleaning: str, texts: NewsData) -> float:
    """The share of characters in unknown tokens, in some of the training texts."""
    model = tokenizer.model
    if hasattr(model, "unk_token"):
        unknown = tokenizer.token_to_id(model.unk_token) if model.unk_token else None
    else:  # Unigram, which does not show its own
        unknown = json.loads(tokenizer.to_str())["model"].get("unk_id")
    if unknown is None:
        return 0.0  # a tokenizer of bytes knows every character
    tokenizer.no_truncation()
    tokenizer.no_padding()
    rows, clean = texts.train.texts, cleaner(cleaning)
    chosen = [rows[i] for i in evenly_spread(len(rows), TEXTS_TRIED)]
    parts = [part for text in chosen for part in ((text,) if isinstance(text, str) else text)]
    cut = [clean(part)[:CHARS_TRIED] for part in parts]
    places = [
        (id_ == unknown, end - start)
        for encoding in tokenizer.encode_batch(cut, add_special_tokens=False)
        for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
    ]
    return sum(size for is_unknown, size in places if is_unknown) / max(
        1, sum(size for _, size in places)
    )
