"""Attention for ``transformers``, with the masks of :class:`RowDropout` on the CPU.

On a GPU, joined rows are attended to by FlashAttention (Dao, arXiv 2307.08691), and padded ones by
the kernel that PyTorch chooses.

While training on the CPU, rows are attended to a few at a time, so that their weights stay in the
processor's cache from the scores to the product with the values, and the same in the backward pass.
Over a whole batch each of these operations would write its weights to memory and read them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from common.errors import first_line
from training.model.dropout import RowDropout
from training.model.packing import Packing
from training.model.precision import DTYPES

ROW_ATTENTION = "row_dropout"
FLASH_CAPABILITY = (8, 0)  # Ampere, the first generation that FlashAttention-2 runs on
FLASH_TOLERANCE = 0.05  # of the largest value; bf16 has 8 bits, so one rounding is at most 0.004
# Attention weights computed together, half a megabyte in fp32. Measured with 12 heads and 50 tokens
# on an EPYC, forward and backward: 21 ms for 32 rows, 27 ms with a quarter of it, which is one row
# at a time, and 29 to 42 ms with the whole batch at once.
WEIGHTS_AT_ONCE = 1 << 17


def _trains_slowly_when_fused(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether separate operations are faster than PyTorch's fused kernel, forward and backward
    together.

    On CPUs with AMX, PyTorch 2.13: in bf16 they are 1.4 to 10 times as fast for 16 to 512 tokens,
    since the fused backward does not use the matrix units; in fp32 up to about 64 tokens.
    """
    if query.device.type != "cpu" or not (torch.is_grad_enabled() and query.requires_grad):
        return False
    return query.dtype == torch.bfloat16 or key.shape[2] <= 64


# The parameters are those that transformers calls an attention function with.
def row_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Packing | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention.

    Args:
        query, key, value: (batch, heads, queries or keys, head size); keys may have fewer heads.
            Packed rows have a batch of 1, except for queries if each row has a single one.
        attention_mask: bool, broadcastable to (batch, heads, queries, keys). If None, a module with
            ``is_causal`` set attends to earlier tokens only.

    Returns:
        (batch, queries, heads, head size), and None for the weights.
    """
    packing = attention_mask if isinstance(attention_mask, Packing) else None
    if packing and query.device.type != "cpu":
        return flash_attention(query, key, value, packing, scaling, dropout), None
    drop = _mask_of_weights(module, query) if dropout > 0 else None
    is_causal = (
        attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", False)
    )
    groups = query.shape[1] // key.shape[1]  # query heads that share one head of keys and values
    if not (drop or packing) and (
        dropout > 0 or is_causal or not _trains_slowly_when_fused(query, key)
    ):
        given = (query, key, value, attention_mask, dropout, is_causal)
        context = F.scaled_dot_product_attention(*given, scale=scaling, enable_gqa=groups > 1)
        return context.transpose(1, 2).contiguous(), None
    # The fused kernel draws its own dropout mask. Ours has to be applied to the weights, so they
    # are computed here.
    if groups > 1:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    # The query is scaled, not the product: it is smaller, unless a text is shorter than a head is
    # wide.
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():  # the compiler fuses, and would unroll the loop over rows
        return _attend_compiled(query * scale, key, value, attention_mask, drop)
    plan = _plan(query, key, scale, packing, drop)
    draws = _draws(drop, query, key, plan) if drop else None
    bias = None if attention_mask is None or packing else _bias(query, attention_mask)
    return _RowAttention.apply(query, key, value, bias, draws, plan), None


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention within each of several joined rows, in bf16 or fp16; dropout draws from PyTorch's
    generator.

    Args:
        query, key, value: (1, heads, tokens, size), or of each row's first query (rows, heads, 1,
            size).

    Returns:
        (1, tokens, heads, size), or of first queries (rows, 1, heads, size).
    """
    # (tokens, heads, size), a view: as the projections have written them.
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    # Where each row's queries begin: with its tokens, or one row after the other.
    offsets, longest = packing.offsets, max(packing.lengths)
    if len(query) == 1:
        of_queries, most_queries = offsets, longest
    else:
        of_queries = torch.arange(len(offsets), dtype=torch.int32, device=offsets.device)
        most_queries = 1
    # Private, since no public function does it in PyTorch 2.11 to 2.13: varlen_attn has no dropout,
    # and scaled_dot_product_attention of jagged tensors spends its time in Python (12 heads, 128
    # tokens, forward and backward without the kernel itself: 13 ms on an EPYC, against 0.7 ms).
    context = torch.ops.aten._flash_attention_forward(
        *(q, k, v),
        *(of_queries, offsets, most_queries, longest),
        dropout,
        is_causal=False,
        return_debug_mask=False,
        scale=scaling,
    )[0]
    return context.unflatten(0, (len(query), -1))


def why_no_flash_attention(device: torch.device, precision: str, heads: int, size: int) -> str:
    """Why joined rows cannot be attended to on this GPU; empty if they can be.

    ``heads``, ``size``: of the model's attention, and the size of each head.
    """
    if precision == "fp32":
        return "FlashAttention computes in bf16 or fp16 only, and this run is in fp32"
    capability = torch.cuda.get_device_capability(device)
    if capability < FLASH_CAPABILITY:
        has = ".".join(map(str, capability))
        return f"FlashAttention needs compute capability 8.0 or more, and this GPU has {has}"
    return why_flash_attention_fails(device, DTYPES[precision], heads, size)


def why_flash_attention_fails(
    device: torch.device, dtype: torch.dtype, heads: int, size: int
) -> str:
    """Try it on two small rows, forward and backward; empty if it gives what padded rows get.

    PyTorch may be built without it, it may take no heads of this size, and as it is private, a
    later version may call it differently: then a run is slower, instead of failing or being wrong.
    """
    packing = Packing(torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]), device)
    # Not drawn, so that the model's random numbers are those of a run without this test.
    numbers = torch.arange(3 * heads * packing.tokens * size, dtype=torch.float32)
    states = numbers.sin().view(3, 1, heads, packing.tokens, size).to(device, dtype)
    states.requires_grad_()

    def of_each_row(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        parts = (part.split(packing.lengths, dim=2) for part in (query, key, value))
        found = [F.scaled_dot_product_attention(*row) for row in zip(*parts, strict=True)]
        return torch.cat(found, dim=2).transpose(1, 2)

    try:
        with torch.autocast(device.type, enabled=False):
            flash_attention(*states, packing, dropout=0.5)
            found, expected = flash_attention(*states, packing), of_each_row(*states)
            # The gradients of the sum of squares: those of all three depend on all values.
            pairs = [(found, expected)]
            pairs += zip(
                *(torch.autograd.grad(out.square().sum(), states) for out in (found, expected)),
                strict=True,
            )
        is_same = all(
            bool((one - other).abs().max() <= FLASH_TOLERANCE * other.abs().max())
            for one, other in pairs
        )
    except Exception as error:  # of any kind: PyTorch has several for a missing kernel
        return f"FlashAttention does not work here ({first_line(error)})"
    return "" if is_same else "FlashAttention gives other values here than PyTorch's own attention"


def _mask_of_weights(module: nn.Module, query: torch.Tensor) -> RowDropout | None:
    """The dropout of the weights, if its masks come from the stream."""
    drop = getattr(module, "dropout", None)
    return drop if isinstance(drop, RowDropout) and drop.masks_attention(query) else None


def _draws(drop: RowDropout, query: torch.Tensor, key: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """(rows, heads, queries, keys). Rows that are packed get what they have when they are padded."""
    rows, length = plan.packed_keys.shape if plan.packed_keys else (len(query), key.shape[2])
    queries = query.shape[2] if plan.packed_queries is None else length
    return drop.draws(torch.Size((rows, query.shape[1], queries, length)), query.device)


def _bias(query: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """What is added to the scores, (batch, heads, queries, keys) if expanded."""
    # Not minus infinity: a row without any token would become NaN.
    bias = query.new_zeros(attention_mask.shape)
    bias.masked_fill_(~attention_mask, torch.finfo(query.dtype).min)
    return bias.expand(len(query), query.shape[1], -1, -1)


def _attend_compiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    drop: nn.Module | None,
) -> tuple[torch.Tensor, None]:
    scores = torch.matmul(query, key.transpose(2, 3))
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    if drop is not None:
        weights = drop(weights)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class _Plan:
    """How attention is computed: which consecutive rows together, which states are packed, the
    scale of the scores, and what dropout keeps (see :class:`RowDropout`).
    """

    groups: Sequence[slice]
    packed_queries: Packing | None
    packed_keys: Packing | None
    scale: float
    lowest_kept: int
    dropout_scale: float

    def cut(self, states: torch.Tensor, packing: Packing | None = None) -> list[torch.Tensor]:
        """(batch, heads, tokens, size) -> of each group (rows, heads, tokens, size), not copied."""
        if packing:
            return [packing.cut(states, group) for group in self.groups]
        return [states[group] for group in self.groups]

    def cut_queries(self, *states: torch.Tensor) -> list[list[torch.Tensor]]:
        return [self.cut(one, self.packed_queries) for one in states]

    def cut_keys(self, *states: torch.Tensor) -> list[list[torch.Tensor]]:
        return [self.cut(one, self.packed_keys) for one in states]

    def drop(self, weights: torch.Tensor, draws: torch.Tensor | None) -> torch.Tensor:
        """The weights, or their gradients, that dropout leaves, scaled."""
        if draws is None:
            return weights
        # Compared as floats, fp32 or wider, which hold every draw: in PyTorch 2.13 that takes half
        # as long as to make bools and multiply by them.
        queries, keys = weights.shape[1:]
        kept = draws[:, :, :queries, :keys].flatten(0, 1).to(weights.dtype).ge_(self.lowest_kept)
        return kept.mul_(weights).mul_(self.dropout_scale)


class _RowAttention(torch.autograd.Function):
    """Attention with the gradients written out, group by group.

    Within a group, heads and rows are one dimension. A group of one row is a view of its states; of
    several rows, ``flatten`` copies what fits into the cache.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        draws: torch.Tensor | None,
        plan: _Plan,
    ) -> torch.Tensor:
        context = query.new_empty(query.transpose(1, 2).shape)
        all_weights = []
        # Autocast would convert what is in half precision already.
        with torch.autocast("cpu", enabled=False):
            for q, out, k, v, b, d in zip(
                *plan.cut_queries(query, context.transpose(1, 2)),
                *plan.cut_keys(key, value),
                *(_cut_or_none(plan, given) for given in (bias, draws)),
                strict=True,
            ):
                q, k, v = (q * plan.scale).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
                scores = (
                    torch.bmm(q, k.transpose(1, 2))
                    if b is None
                    else torch.baddbmm(b.flatten(0, 1), q, k.transpose(1, 2))
                )
                # (rows * heads, queries, keys), each row a distribution over the keys.
                weights = scores.softmax(dim=-1, dtype=_at_least_fp32(q))
                all_weights.append(weights)
                found = torch.bmm(plan.drop(weights, d).to(v.dtype), v)
                out.copy_(found.view(out.shape))
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, draws, *all_weights)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: _Plan = ctx.plan
        query, key, value, draws, *all_weights = ctx.saved_tensors
        # Of the same layout as their states, so that the projections' backward passes copy nothing.
        of_query, of_key, of_value = map(torch.empty_like, (query, key, value))
        for q, g, dq, k, v, dk, dv, d, weights in zip(
            *plan.cut_queries(query, gradient.transpose(1, 2), of_query),
            *plan.cut_keys(key, value, of_key, of_value),
            _cut_or_none(plan, draws),
            all_weights,
            strict=True,
        ):
            q, k, v, g = (q * plan.scale).flatten(0, 1), *(x.flatten(0, 1) for x in (k, v, g))
            dropped = plan.drop(weights, d).to(v.dtype)
            dv.copy_(torch.bmm(dropped.transpose(1, 2), g).view(dv.shape))
            of_weights = plan.drop(torch.bmm(g, v.transpose(1, 2)).to(weights.dtype), d)
            # There is no public function for the gradient of softmax.
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            of_scores = of_scores.to(q.dtype)
            dq.copy_(torch.bmm(of_scores, k).mul_(plan.scale).view(dq.shape))
            dk.copy_(torch.bmm(of_scores.transpose(1, 2), q).view(dk.shape))
        return of_query, of_key, of_value, None, None, None


def _plan(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    packing: Packing | None,
    drop: RowDropout | None,
) -> _Plan:
    heads = query.shape[1]
    if packing:
        groups = packing.groups(max(1, WEIGHTS_AT_ONCE // (heads * packing.shape[1])))
    else:
        size = max(1, WEIGHTS_AT_ONCE // (heads * query.shape[2] * key.shape[2]))
        groups = [slice(first, first + size) for first in range(0, len(query), size)]
    return _Plan(
        groups,
        packing if len(query) == 1 else None,
        packing,
        scale,
        drop.lowest_kept if drop else 0,
        drop.scale if drop else 1.0,
    )


def _at_least_fp32(states: torch.Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)


def _cut_or_none(plan: _Plan, states: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    return [None] * len(plan.groups) if states is None else plan.cut(states)


AttentionInterface.register(ROW_ATTENTION, row_attention)
AttentionMaskInterface.register(ROW_ATTENTION, sdpa_mask)
