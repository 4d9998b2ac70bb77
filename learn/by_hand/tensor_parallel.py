"""Tensor parallelism by hand: two linear layers, each cut over the ranks of a group, and the two all-reduces they need.

Cut the first layer of a pair by its outputs and the second by its inputs, and nothing has to be sent between them:
an attention or a feed-forward layer then costs one all-reduce forward and one backward.

Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3, whose f and g these are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class _CopyToRanks(torch.autograd.Function):
    """Megatron's f: every rank uses the whole input, so its gradient is the sum of what each found."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:  # noqa: ANN001
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN001
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _SumOverRanks(torch.autograd.Function):
    """Megatron's g: each rank holds a summand of the output; every summand's gradient is the sum's."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:  # noqa: ANN001
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN001
        return gradient, None


def copy_to_ranks(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    return _CopyToRanks.apply(x, group)


def sum_over_ranks(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    return _SumOverRanks.apply(x, group)


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes its share of the outputs: ``y_r = x A_r + b_r``.

    ``weight``: this rank's rows of ``nn.Linear``'s weight (columns of A), (out_features / ranks, in_features).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.group = group

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: dist.ProcessGroup | None = None) -> ColumnParallelLinear:
        """This rank's share of a layer that is the same on every rank.

        Raises:
            ValueError: the ranks do not divide the outputs.
        """
        bias = None if linear.bias is None else _share(linear.bias, 0, group)
        return cls(_share(linear.weight, 0, group), bias, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features), the same on every rank -> (..., out_features / ranks)."""
        return F.linear(copy_to_ranks(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank reads its share of the inputs: ``y = sum over ranks of x_r A_r, + b``.

    ``weight``: this rank's columns of ``nn.Linear``'s weight (rows of A), (out_features, in_features / ranks). The bias
    is added once, after the sum.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.group = group

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: dist.ProcessGroup | None = None) -> RowParallelLinear:
        """This rank's share of a layer that is the same on every rank.

        Raises:
            ValueError: the ranks do not divide the inputs.
        """
        bias = None if linear.bias is None else linear.bias.detach().clone()
        return cls(_share(linear.weight, 1, group), bias, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features / ranks) -> (..., out_features), the same on every rank."""
        total = sum_over_ranks(F.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias


def _share(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    if tensor.shape[dim] % ranks:
        raise ValueError(f"{tensor.shape[dim]} features over {ranks} ranks: the ranks must divide them")
    return tensor.detach().chunk(ranks, dim)[dist.get_rank(group)].clone()
