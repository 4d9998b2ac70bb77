"""The model that solutions are tried on.

It has everything they may overlook, and its numbers show their rank.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn


class Probe(nn.Module):
    """Weights, buffers, a frozen weight, and a weight without a gradient."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.norm.register_buffer("table", torch.empty(2), persistent=False)
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.unused = nn.Linear(2, 1, bias=False)
        generator = torch.Generator().manual_seed(rank)
        for tensor in chain(self.parameters(), self.buffers()):
            tensor.detach().copy_(numbers_of(rank, tensor.shape, generator))

    def tensors(self) -> dict[str, torch.Tensor]:
        named = chain(self.named_parameters(), self.named_buffers())
        return {name: tensor.detach().clone() for name, tensor in named}

    def gradients(self, rank: int) -> dict[str, torch.Tensor]:
        """What a backward pass on this rank might compute, for parameters that are in the loss."""
        generator = torch.Generator().manual_seed(100 + rank)
        learning = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        return {
            name: numbers_of(rank, self.get_parameter(name).shape, generator)
            for name in learning
            if not name.startswith("unused")
        }


def numbers_of(rank: int, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Whole numbers below 100 whose last digit is rank + 1: no two ranks share a number."""
    return (10 * torch.randint(10, shape, generator=generator) + rank + 1).float()


def same(tensor: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Whether type and shape are equal, and the values are equal except for rounding."""
    return (
        tensor is not None
        and (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
        and torch.allclose(tensor, expected, rtol=1e-4, atol=0)
    )
