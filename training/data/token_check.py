"""Whether the tokenizer of ``--model`` can read the texts, and whether any row is left empty."""

from __future__ import annotations

import json
from itertools import chain

import numpy as np
from tokenizers import Tokenizer

from common.errors import UserError
from common.rows import evenly_spread
from common.text import cleaner, texts_in
from training.config import TrainConfig
from training.data.dataset import TextData
from training.data.tokenized import TokenizedData, TokenizedRows

TEXTS_TRIED, CHARS_TRIED = 1000, 2000
# Of the characters; a tokenizer for another language or alphabet knows less than half.
MOST_UNKNOWN = 0.5
WORTH_A_NOTE = 0.05


def check_tokens(
    config: TrainConfig, tokenizer_json: str, cleaning: str, texts: TextData, tokens: TokenizedData
) -> list[str]:
    """Lines about unknown words and rows without tokens, for the user.

    Raises:
        UserError: most of the texts cannot be read.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    # Special tokens, which each row has in addition to those of its text.
    frame = tokenizer.num_special_tokens_to_add(bool(config.columns.pair))
    splits = {"training": tokens.train, "validation": tokens.validation, "test": tokens.test}
    lines = [] if config.is_language_model else _check_empty(config, splits, frame)
    share = _unknown_share(tokenizer, cleaning, texts)
    which = f"the tokenizer of --model {config.model}"
    what = f"{share:.0%} of the characters of the training texts are unknown to {which}"
    if share > MOST_UNKNOWN:
        raise UserError(
            f"{what}; use a model for the language of the texts, with the tokenizer that it was "
            "trained with",
            code="tokenizer-unlike",
        )
    if share >= WORTH_A_NOTE:
        lines.append(f"{what}, so words with them all look the same to it")
    return lines


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
    # A few empty rows are the data's fault; if most are, it is the tokenizer's.
    if 2 * len(empty["training"]) > len(splits["training"] or ()):
        raise UserError(
            f"{what}; --model {config.model} needs the tokenizer that it was trained with, and "
            "texts that it can read",
            code="tokenizer-unlike",
        )
    if frame == 0:
        raise UserError(
            f"{what}, and a row without a single token cannot be computed; remove them from the "
            "data",
            code="row-unusable",
        )
    return [f"{what}, so the model reads nothing of their texts"]


def _unknown_share(tokenizer: Tokenizer, cleaning: str, texts: TextData) -> float:
    """The share of characters in unknown tokens, in some of the training texts."""
    unknown = _unknown_id(tokenizer)
    if unknown is None:
        return 0.0  # a tokenizer of bytes knows every character
    tokenizer.no_truncation()
    tokenizer.no_padding()
    rows, clean = texts.train.texts, cleaner(cleaning)
    some = (texts_in(rows[i]) for i in evenly_spread(len(rows), TEXTS_TRIED))
    cut = [clean(part)[:CHARS_TRIED] for part in chain.from_iterable(some)]
    # Characters are counted and not tokens: one unknown token may be a letter or a whole word.
    num_chars = num_unknown = 0
    for encoding in tokenizer.encode_batch(cut, add_special_tokens=False):
        for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            num_chars += end - start
            num_unknown += (end - start) * (id_ == unknown)
    return num_unknown / max(1, num_chars)


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    model = tokenizer.model
    if hasattr(model, "unk_token"):
        return tokenizer.token_to_id(model.unk_token) if model.unk_token else None
    # Unigram has such a token too, but its Python class does not show it.
    return json.loads(tokenizer.to_str())["model"].get("unk_id")
