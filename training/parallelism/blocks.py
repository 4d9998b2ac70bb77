"""What is applied to each block whatever the strategy: float8, then activation checkpointing, then compilation."""

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

# Tokens. Lengths are rounded up to a multiple of it if each new length costs a compilation or has
# to divide evenly.
LENGTH_MULTIPLE = 16


def length_multiple(config: TrainConfig, device: str) -> int:
    """The multiple that lengths are rounded up to, in tokens."""
    if config.compile or config.sequence_parallel:
        return LENGTH_MULTIPLE
    # GPUs multiply matrices with such sides fastest. On CPUs a row's dropout masks depend on its
    # padded length.
    return 1 if device == "cpu" else 8


def apply_to_blocks(network: nn.Module, config: TrainConfig, stream: DropoutStream) -> None:
    """Apply what the configuration asks for to the blocks of a model or a stage, before it is
    wrapped.

    Raises:
        UserError: the network has no repeated blocks to apply it to.
    """
    if config.activation_checkpointing == "none" and not config.compile and not config.float8:
        return
    blocks = find_blocks(network)
    if not blocks:
        raise UserError(
            f"--model {config.model}: no repeated blocks were found to checkpoint, compile or "
            "convert",
            code="model-no-blocks",
        )
    for block in blocks:
        _treat(block, config, stream)
    if config.compile:
        # One graph per length in training and evaluation if lengths are not symbolic, and some room
        # for other differences.
        torch._dynamo.config.recompile_limit = 2 * (config.max_length // LENGTH_MULTIPLE + 1) + 8


def _treat(block: nn.Module, config: TrainConfig, stream: DropoutStream) -> None:
    """Checkpointing inside, compilation outside, so that the compiler sees what is computed twice."""
    if config.float8:
        apply_float8(block)
    if config.activation_checkpointing != "none":
        apply_activation_checkpointing(block, config.activation_checkpointing, stream)
    if config.compile:
        # Few lengths, one graph: rows and lengths are symbolic in it. DTensors do not work with
        # symbolic shapes.
        block.compile(
            dynamic=not any(isinstance(parameter, DTensor) for parameter in block.parameters())
        )
