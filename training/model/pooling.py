"""What the head of an encoder reads of a text: the first token, or the mean of all tokens.

Sentence encoders were trained so that the mean of a text's tokens says what it is about; their
first token says less. transformers' classifiers only read the first one. So the mean is not
computed in another head, which every engine, strategy and exporter would have to learn, but in one
more block like the others, which starts as a plain average:

    attention   query and key are 0, so each token attends to all tokens alike; the value is the
    token itself output      `MEAN_WEIGHT` times the mean, which outweighs the token that the
    residual connection adds feed-forward adds 0

The first token of that block is the mean, normalised. Everything that computes blocks computes it,
plain transformers included, and fine-tuning may turn the average into a better one. Since only the
first token of a last block is computed, it costs a sixth of a block, besides the rest of the block
below.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from training.model.layers import FAMILY_OF

# Where sentence-transformers says how an encoder's tokens are pooled.
POOLING_FILE = "1_Pooling/config.json"
# The third one is the first token through the dense layer behind it, where that was trained with
# the encoder.
MEAN, FIRST, POOLER = "mean", "first", "pooler"
# In config.json: how our own encoders were trained; "mean" in a model that has the block and needs
# no other one.
POOLING_KEY = "pooling"
MEAN_WEIGHT = 32.0


def trained_pooling(folder: Path) -> str | None:
    """How the texts of the encoder in this folder were pooled when it was trained, if its files say
    so.
    """
    if _read(folder / "config.json").get(POOLING_KEY) == POOLER:
        return POOLER
    about = _read(folder / POOLING_FILE)
    if about.get("pooling_mode_cls_token"):
        return FIRST
    return MEAN if about.get("pooling_mode_mean_tokens") else None


def _read(file: Path) -> dict[str, Any]:
    """Empty if there is no such file, or no object in it: whoever loads the model says what is
    wrong with it.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def can_have_mean_block(network: nn.Module) -> bool:
    """Whether the blocks are known well enough to add one, and there is none yet."""
    family = FAMILY_OF.get(type(network).__name__)
    if family is None or not isinstance(network, PreTrainedModel):
        return False
    if getattr(network.config, POOLING_KEY, None) == MEAN:
        return False
    # A bias by distance would give near tokens more weight; a norm before the block is not one that
    # follows the mean.
    stands_in_the_way = family.relative_positions or family.final_norm or family.gate
    return bool(family.pooler) and not stands_in_the_way


@torch.no_grad()
def add_mean_block(network: PreTrainedModel) -> None:
    """Add the block, in place; before the last block learns to compute a single token."""
    family = FAMILY_OF[type(network).__name__]
    blocks = network.get_submodule(family.blocks)
    block = copy.deepcopy(blocks[-1])

    def part(name: str) -> nn.Module:
        return block.get_submodule(name)

    # With queries and keys of 0, all scores are 0, so softmax gives every token the same weight.
    for name in (family.query, family.key, family.output):
        nn.init.zeros_(part(name).weight)
        nn.init.zeros_(part(name).bias)
    nn.init.eye_(part(family.value).weight)
    nn.init.eye_(part(family.attention_output).weight).mul_(MEAN_WEIGHT)
    for name in (family.value, family.attention_output):
        nn.init.zeros_(part(name).bias)
    for name in (family.attention_norm, family.output_norm):
        nn.init.ones_(part(name).weight)
        nn.init.zeros_(part(name).bias)
    blocks.append(block)
    network.config.num_hidden_layers = len(blocks)
    setattr(network.config, POOLING_KEY, MEAN)
