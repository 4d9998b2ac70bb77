"""A small encoder made of a large one: fewer words, and narrower hidden states.

The result needs training before it is of any use, but it is a far better start than random weights:
it knows words and how to look at them, so distillation needs minutes instead of hours. The hidden
states of a transformer are a sum of what the embeddings and all blocks have written, in one space.
Its main directions, found in the word embeddings, are what the small encoder keeps: what reads
hidden states is restricted to them, and what writes is projected onto them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedModel

from common.encoders import DISTILBERT, EncoderFamily


def count_ids(tokenizer: Tokenizer, chunks: Iterable[list[str]]) -> Counter[int]:
    """How often each id occurs in the texts of all chunks, without the special ones around them."""
    counts: Counter[int] = Counter()
    for chunk in chunks:
        for encoding in tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
            counts.update(encoding.ids)
    return counts


def choose_ids(tokenizer: Tokenizer, counts: Counter[int], size: int) -> list[int]:
    """The ids of a smaller vocabulary: special tokens, single letters, then the most frequent ones.

    With all letters every word can be spelled, so a WordPiece tokenizer needs ``[UNK]`` as seldom
    as before.
    """
    pieces = tokenizer.get_vocab()
    added = tokenizer.get_added_tokens_decoder().items()
    special = sorted(id_ for id_, token in added if token.special)
    # At the start of a word and, as ##x, within one.
    letters = {id_: piece for piece, id_ in pieces.items() if len(piece.removeprefix("##")) == 1}
    ascii_letters = sorted(id_ for id_, letter in letters.items() if letter.isascii())
    seen = sorted(id_ for id_ in letters if counts[id_])
    frequent = sorted(counts, key=lambda id_: (-counts[id_], id_))
    return list(dict.fromkeys([*special, *ascii_letters, *seen, *frequent]))[:size]


def smaller_tokenizer(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The tokenizer.json of a WordPiece tokenizer that knows only these ids, numbered in their
    order.
    """
    parts = json.loads(tokenizer.to_str())
    names = {id_: piece for piece, id_ in tokenizer.get_vocab().items()}
    number = {names[id_]: i for i, id_ in enumerate(ids)}
    parts["model"]["vocab"] = number
    parts["padding"] = parts["truncation"] = None
    parts["added_tokens"] = [
        token | {"id": number[token["content"]]}
        for token in parts["added_tokens"]
        if token["content"] in number
    ]
    after = parts["post_processor"]
    for name, token in after.get("special_tokens", {}).items():  # TemplateProcessing
        token["ids"] = [number[name]]
    for which in ("sep", "cls"):  # BertProcessing
        if which in after:
            after[which][1] = number[after[which][0]]
    return json.dumps(parts, ensure_ascii=False)


@torch.no_grad()
def shrink(
    network: PreTrainedModel,
    family: EncoderFamily,
    ids: Sequence[int],
    counts: Counter[int],
    width: int,
) -> DistilBertForSequenceClassification:
    """A DistilBERT of ``width`` that begins as a part of ``network``, with a new head.

    Args:
        ids: the words that it keeps, in the order of its own numbers.
        counts: how often each word occurs: the directions are those of frequent words.
        width: a multiple of the width of the network's heads, the first of which are taken over.
    """

    def weight(name: str) -> torch.Tensor:
        return network.get_submodule(name).weight.float()

    words = weight(family.word_embeddings)[list(ids)]  # (words, hidden)
    frequency = torch.tensor([counts[id_] + 1.0 for id_ in ids])
    frequency /= frequency.sum()
    # Centred and weighted by the root of the frequency, the rows' singular vectors are the
    # principal directions of words as they occur in texts: rare ones hardly count.
    centred = (words - frequency @ words) * frequency[:, None].sqrt()
    # Signs of singular vectors differ between libraries; the product with them does not matter, but
    # the weights would.
    _, _, directions = torch.linalg.svd(centred.double(), full_matrices=False)
    largest = directions.abs().argmax(dim=1, keepdim=True)
    directions = directions * directions.gather(1, largest).sign()
    directions = directions[:width].float().T  # (hidden, width)

    positions = weight(family.position_embeddings)
    # DistilBERT has no token types. Of a single text all tokens have the first, a constant that the
    # positions can take up.
    if family.token_type_embeddings:
        positions = positions + weight(family.token_type_embeddings)[0]
    head_width = words.shape[1] // getattr(network.config, family.num_heads_key)
    num_heads = width // head_width
    small = DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=len(ids),
            dim=width,
            hidden_dim=4 * width,
            n_layers=len(network.get_submodule(family.blocks)),
            n_heads=num_heads,
            max_position_embeddings=len(positions),
            pad_token_id=0,
        )
    )
    encoder = small.distilbert
    encoder.embeddings.word_embeddings.weight.copy_(words @ directions)
    encoder.embeddings.position_embeddings.weight.copy_(positions @ directions)

    pairs = zip(encoder.transformer.layer, network.get_submodule(family.blocks), strict=True)
    for target, source in pairs:
        _shrink_block(source, target, family, directions, heads=slice(0, width))
    return small


def _shrink_block(
    source: nn.Module,
    target: nn.Module,
    family: EncoderFamily,
    directions: torch.Tensor,
    heads: slice,
) -> None:
    def layers(own: str, new: str) -> tuple[nn.Linear, nn.Linear]:
        return source.get_submodule(own), target.get_submodule(new)

    for name in ("query", "key", "value"):  # the first heads
        old, new = layers(getattr(family, name), getattr(DISTILBERT, name))
        new.weight.copy_((old.weight @ directions)[heads])
        new.bias.copy_(old.bias[heads])
    old, new = layers(family.attention_output, DISTILBERT.attention_output)
    new.weight.copy_((directions.T @ old.weight)[:, heads])
    new.bias.copy_(directions.T @ old.bias)

    # Of the features in the middle of the feed-forward layers those with the largest weights.
    (read, new_read), (write, new_write) = (
        layers(getattr(family, name), getattr(DISTILBERT, name))
        for name in ("intermediate", "output")
    )
    reading = read.weight @ directions
    strength = reading.norm(dim=1) * write.weight.norm(dim=0)
    strongest = strength.topk(new_read.out_features).indices.sort().values
    new_read.weight.copy_(reading[strongest])
    new_read.bias.copy_(read.bias[strongest])
    new_write.weight.copy_((directions.T @ write.weight)[:, strongest])
    new_write.bias.copy_(directions.T @ write.bias)
