"""What is done to each block alone, whatever the strategy: float8, activation checkpointing, then compilation."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common.errors import UserError
from training.config import TrainConfig
from training.model.architectures import find_blocks
from training.model.dropout import DropoutStream
from training.parallelism.activation_checkpointing import apply_activation_checkpointing
from training.parallelism.float8 import apply_float8

# Tokens; lengths are multiples of it where each new one costs a compilation, or would not be cut evenly.
LENGTH_MULTIPLE = 16


def length_multiple(config: TrainConfig, device: str) -> int:
    """What lengths are rounded up to, tokens; ``device``: ``cpu`` or ``cuda``."""
    if config.compile or config.sequence_parallel:
        return LENGTH_MULTIPLE
    # GPUs multiply matrices of such sides fastest. On the CPU a row's dropout masks depend on its padded length.
    return 1 if device == "cpu" else 8


def apply_to_blocks(network: nn.Module, config: TrainConfig, stream: DropoutStream) -> None:
    """Treat the blocks of a model, or of a stage of one, as the configuration asks; before it is wrapped.

    Raises:
        UserError: something is asked for, and the network has no repeated blocks.
    """
    if config.activation_checkpointing == "none" and not config.compile and not config.float8:
        return
    blocks = find_blocks(network)
    if not blocks:
        raise UserError(
            f"--model {config.model}: no repeated blocks were found to checkpoint, compile or convert",
            code="model-no-blocks",
        )
    for block in blocks:
        _treat(block, config, stream)
    if config.compile:
        # Each length, in training and in evaluation, where lengths are no symbols; and what else differs.
        torch._dynamo.config.recompile_limit = 2 * (config.max_length // LENGTH_MULTIPLE + 1) + 8


def _treat(block: nn.Module, config: TrainConfig, stream: DropoutStream) -> None:
    """Checkpoint inside, compile outside: the compiler then sees what is computed twice."""
    if config.float8:
        apply_float8(block)
    if config.activation_checkpointing != "none":
        apply_activation_checkpointing(block, config.activation_checkpointing, stream)
    if config.compile:
        # Few lengths, one graph: rows and lengths are symbols in it. DTensors do not go with symbols.
        block.compile(dynamic=not any(isinstance(parameter, DTensor) for parameter in block.parameters()))
