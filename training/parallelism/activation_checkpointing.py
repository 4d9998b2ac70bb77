"""Activation checkpointing: drop what a block computed, and recompute it in the backward pass.

``full`` keeps only a block's input (Chen et al., arXiv 1604.06174). ``selective`` also keeps the
outputs of matrix products and attention, and recomputes what is cheap: norms, activations, dropout
(after Korthikanti et al., arXiv 2205.05198, section 5; selected per operation with
``create_selective_checkpoint_contexts``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from training.model.dropout import DropoutStream

KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._flash_attention_forward.default,
}


def apply_activation_checkpointing(block: nn.Module, mode: str, stream: DropoutStream) -> None:
    """Recompute the block's activations in the backward pass, with the same dropout masks;
    parameter names do not change.
    """
    forward = block.forward
    contexts = {"context_fn": _selective_contexts} if mode == "selective" else {}

    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        # Compiled dropout does not use the stream, and a graph that captured its position would be
        # right for one step only.
        again = (
            forward
            if torch.compiler.is_compiling()
            else partial(_at_position, forward, stream, stream.position)
        )
        # Only this kind of checkpoint takes a context, by which `selective` says what is kept.
        return checkpoint(again, *args, use_reentrant=False, **contexts, **kwargs)

    block.forward = checkpointed_forward


def _at_position(
    forward: Callable[..., Any],
    stream: DropoutStream,
    position: tuple[Any, ...],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run with the stream at its former position: in a pipeline, other micro-batches run between the two passes."""
    now = stream.position
    stream.move(*position)
    try:
        return forward(*args, **kwargs)
    finally:
        stream.move(*now)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)


def _keep_products(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
