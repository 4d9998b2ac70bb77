"""Widen a trained BERT classifier to twice its width without changing what it computes.

`python -m benchmarks.serving.widen checkpoints/minilm_agnews checkpoints/minilm_widened` turns the
384 channels of a MiniLM into the 768 of DistilBERT-base (12 heads of 64, feed-forward 3072, as many
parameters), so that serving can be timed at that size without access to the Hub. Every channel is
duplicated and every matrix product halves the sum of the two copies, so each layer outputs the
narrow layer's values twice: the same logits for nearly four times the work.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import Parser
from common.errors import UserError, positive, run_command

MODULE = "benchmarks.serving.widen"
COPIED = ("tokenizer.json", "tokenizer_config.json", "metrics.json")


def main() -> None:
    parser = Parser(MODULE, __doc__)
    parser.add_argument(
        "source", type=Path, help="a model folder of a BertForSequenceClassification"
    )
    parser.add_argument(
        "target", type=Path, help="the folder to write; an existing one is overwritten"
    )
    parser.add_argument(
        "--blocks",
        type=positive,
        help="blocks of the target; those of the source are repeated or left out (default: all, once)",
    )
    options = parser.parse_args()
    widen_folder(options.source, options.target, options.blocks)
    print(f"Written: {options.target}")


def widen_folder(source: Path, target: Path, blocks: int | None = None) -> None:
    """Write the widened model of ``source`` into ``target``, with this many blocks (None: as many as the source has).

    Raises:
        UserError: ``source`` is not the folder of a BERT classifier.
    """
    try:
        config = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{source}: no readable config.json ({error})", code="benchmark-input"
        ) from error
    if (found := config.get("architectures")) != ["BertForSequenceClassification"]:
        message = f"{source}: architectures must be BertForSequenceClassification, got {found}"
        raise UserError(message, code="benchmark-input")
    narrow = load_file(source / "model.safetensors")
    if blocks:
        narrow = _repeat_blocks(narrow, config["num_hidden_layers"], blocks)
        config["num_hidden_layers"] = blocks
    heads = config["num_attention_heads"]
    wide = {name: _widen(name, tensor, heads).contiguous() for name, tensor in narrow.items()}
    target.mkdir(parents=True, exist_ok=True)
    save_file(wide, target / "model.safetensors", metadata={"format": "pt"})
    for name in ("hidden_size", "intermediate_size"):
        config[name] *= 2
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def _repeat_blocks(
    tensors: dict[str, torch.Tensor], found: int, wanted: int
) -> dict[str, torch.Tensor]:
    """Block ``i`` of ``wanted`` is a copy of block ``i`` modulo ``found``."""
    repeated = {}
    for name, tensor in tensors.items():
        block = re.search(r"(?<=\.layer\.)\d+(?=\.)", name)
        if block is None:
            repeated[name] = tensor
            continue
        for number in range(int(block[0]), wanted, found):
            # Copies, because a file cannot hold two names of one tensor.
            repeated[f"{name[: block.start()]}{number}{name[block.end() :]}"] = tensor.clone()
    return repeated


def _widen(name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The wide counterpart of a parameter. A weight is (outputs, inputs)."""
    part = name.split(".")
    # Mean and variance of doubled channels are those of the channels, so norms need no scaling.
    if "embeddings" in part or "LayerNorm" in part:
        return _twice(tensor, -1)
    # The head reads every channel twice, so half of each weight gives the same sum; its outputs are
    # labels, which are not doubled.
    if "classifier" in part:
        return _twice(tensor, 1) / 2 if part[-1] == "weight" else tensor
    if {"query", "key", "value"} & set(part):
        wide = _twice(tensor, 0, heads)
        # q·k sums over twice the channels, and attention divides by the root of twice the head
        # size: the scores would be 2 / sqrt(2) = sqrt(2) times too large.
        wide = wide / math.sqrt(2) if "query" in part else wide
        return _twice(wide, 1) / 2 if part[-1] == "weight" else wide
    wide = _twice(tensor, 0)
    if part[-1] != "weight":
        return wide
    # Heads grow from 32 to 64 channels, each head's copy right beside it, whereas other layers have
    # the copy of the whole vector behind it. The projection after attention reads the heads' order.
    reads_heads = part[-4:-1] == ["attention", "output", "dense"]
    return _twice(wide, 1, heads if reads_heads else 1) / 2


def _twice(tensor: torch.Tensor, dim: int, groups: int = 1) -> torch.Tensor:
    """Double an axis: each of its ``groups`` twice in a row."""
    chunks = tensor.chunk(groups, dim)
    return torch.cat([chunk for chunk in chunks for _ in range(2)], dim)


if __name__ == "__main__":
    run_command(main)
