"""Activation checkpointing: what a block computed is dropped and computed again in the backward pass.

``full`` keeps a block's input alone (Chen et al., arXiv 1604.06174). ``selective`` also keeps what matrix products and
attention gave, and computes again what costs little: norms, activations, dropout (after Korthikanti et al., arXiv
2205.05198, section 5; here it chooses by operation: docs.pytorch.org, ``create_selective_checkpoint_contexts``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from training.model.dropout import DropoutStream

KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def apply_activation_checkpointing(block: nn.Module, mode: str, stream: DropoutStream) -> None:
    """Make a block's forward pass forget; names of parameters do not change.

    Args:
        block: its ``forward`` is wrapped.
        mode: ``selective`` or ``full``.
        stream: where dropout's masks are drawn; the second pass must draw the first one's.
    """
    forward = block.forward
    contexts = {"context_fn": _selective_contexts} if mode == "selective" else {}

    def forget(*args: Any, **kwargs: Any) -> Any:
        # Compiled dropout does not draw from the stream, and a graph that held its place would serve one step.
        again = forward if torch.compiler.is_compiling() else partial(_at_place, forward, stream, stream.place)
        return checkpoint(again, *args, use_reentrant=False, **contexts, **kwargs)

    block.forward = forget


def _at_place(
    forward: Callable[..., Any], stream: DropoutStream, place: tuple[int, int, int], *args: Any, **kwargs: Any
) -> Any:
    """Run with the stream where it was: in a pipeline other micro-batches come between the two passes."""
    now = stream.place
    stream.move(*place)
    try:
        return forward(*args, **kwargs)
    finally:
        stream.move(*now)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)


def _keep_products(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
