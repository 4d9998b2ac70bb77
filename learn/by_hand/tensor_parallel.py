"""Tensor parallelism by hand: two linear layers, cut over a group's ranks, and two all-reduces.

Cut the first layer of a pair by its outputs and the second by its inputs, and nothing has to be
sent between them: an attention or a feed-forward layer then costs one all-reduce forward and one
backward.

Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3, whose f and g these are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

Group = dist.ProcessGroup | None  # None: all ranks


class _CopyToRanks(torch.autograd.Function):
    """Megatron's f: every rank uses the whole input, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Group) -> torch.Tensor:  # noqa: ANN001
        # Nothing is sent: x is equal on all ranks already.
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN001
        # Each rank has only found what its own outputs contribute to the gradient of x. The sum is
        # written into a copy: others may still read what arrived, and it may be an expanded tensor
        # (stride 0), which no collective can write into.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None  # one per argument of forward; a group has no gradient


class _SumOverRanks(torch.autograd.Function):
    """Megatron's g: each rank holds a summand; every summand's gradient is the sum's."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Group) -> torch.Tensor:  # noqa: ANN001
        # Summed in a copy, because autograd may have kept x for the backward pass.
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN001
        # If a summand grows by 1, so does the sum. All ranks continue with the same sum, so the
        # same gradient arrives everywhere, and nothing is sent. (The backward pass of a plain
        # all-reduce would sum these N equal gradients, which makes them N times too large.)
        return gradient, None


def copy_to_ranks(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    return _CopyToRanks.apply(x, group)


def sum_over_ranks(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    return _SumOverRanks.apply(x, group)


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes its share of the outputs: ``y_r = x A_r + b_r``.

    ``weight``: this rank's rows of ``nn.Linear``'s weight (columns of A), (out_features / ranks,
    in_features).
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: Group = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.group = group

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: Group = None,
    ) -> ColumnParallelLinear:
        """This rank's share of a layer that is the same on every rank.

        Raises:
            ValueError: the ranks do not divide the outputs.
        """
        # nn.Linear keeps its weight as (out_features, in_features): dimension 0 is the outputs. An
        # output has its own bias, so the bias is cut in the same way.
        bias = None if linear.bias is None else _share(linear.bias, 0, group)
        return cls(_share(linear.weight, 0, group), bias, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features), the same on every rank -> (..., out_features / ranks)."""
        # The outputs stay where they are: an activation works on each of them separately, and the
        # next layer reads exactly this rank's share.
        return F.linear(copy_to_ranks(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank reads its share of the inputs:
    ``y = sum over ranks of x_r A_r, + b``.

    ``weight``: this rank's columns of ``nn.Linear``'s weight (rows of A), (out_features,
    in_features / ranks). The bias is added once, after the sum.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: Group = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.group = group

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: Group = None,
    ) -> RowParallelLinear:
        """This rank's share of a layer that is the same on every rank.

        Raises:
            ValueError: the ranks do not divide the inputs.
        """
        # Dimension 1 of the weight is the inputs. Each rank keeps the whole bias, and its gradient
        # is the same on all ranks, so the copies stay equal.
        bias = None if linear.bias is None else linear.bias.detach().clone()
        return cls(_share(linear.weight, 1, group), bias, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features / ranks) -> (..., out_features), the same on every rank."""
        # Each rank's product has the full shape (..., out_features), but is only a summand. The
        # bias comes after the sum: before it, it would be added once per rank.
        total = sum_over_ranks(F.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias


def _share(tensor: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    ranks, size = dist.get_world_size(group), tensor.shape[dim]
    if size % ranks:
        raise ValueError(f"{size} features over {ranks} ranks: the ranks must divide them")
    # A copy: the chunk is a view, and while it is in use, so is the memory of the whole weight.
    return tensor.detach().chunk(ranks, dim)[dist.get_rank(group)].clone()
