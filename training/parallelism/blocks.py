"""What is done to each block alone, whatever the strategy: float8, activation checkpointing, then compilation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from training.config import TrainConfig
from training.dropout import DropoutStream
from training.errors import UserError
from training.model import NewsClassifier
from training.parallelism.activation_checkpointing import apply_activation_checkpointing
from training.parallelism.float8 import apply_float8

# Batches get one of few lengths where each new one costs a compilation, or would not be cut evenly.
FEW_LENGTHS = 16


def length_multiple(config: TrainConfig, device: str) -> int:
    """What lengths are rounded up to, tokens; ``device``: ``cpu`` or ``cuda``."""
    if config.compile or config.sequence_parallel:
        return FEW_LENGTHS
    # GPUs multiply matrices of such sides fastest. On the CPU a row's dropout masks depend on its padded length.
    return 1 if device == "cpu" else 8


def apply_to_blocks(model: NewsClassifier, config: TrainConfig) -> None:
    """Treat the blocks as the configuration asks; before they are wrapped for any data parallelism.

    Raises:
        UserError: the network has no repeated blocks.
    """
    if config.activation_checkpointing == "none" and not config.compile and not config.float8:
        return
    if not model.blocks:
        raise UserError(f"--model {config.model}: no repeated blocks were found to checkpoint, compile or convert")
    treat_blocks(model.blocks, config, model.dropout_stream)


def treat_blocks(blocks: Iterable[nn.Module], config: TrainConfig, stream: DropoutStream) -> None:
    """Checkpoint inside, compile outside: the compiler then sees what is computed twice."""
    for block in blocks:
        if config.float8:
            apply_float8(block)
        if config.activation_checkpointing != "none":
            apply_activation_checkpointing(block, config.activation_checkpointing, stream)
        if config.compile:
            # Few lengths, one graph: rows and lengths are symbols in it. DTensors do not go with symbols.
            block.compile(dynamic=not any(isinstance(parameter, DTensor) for parameter in block.parameters()))
    if config.compile:
        torch._dynamo.config.recompile_limit = 16
