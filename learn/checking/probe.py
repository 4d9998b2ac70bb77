"""The model that solutions are tried on.

It has everything they may overlook, and its numbers show their rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn


class Probe(nn.Module):
    """Weights, buffers, a frozen weight, and a weight without a gradient."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        # Its buffers: two means of floats, and a count of batches, which is a whole number. Code
        # that averages or divides everything fails on the count.
        self.norm = nn.BatchNorm1d(2)
        # Not in the state_dict, so a loop over that misses it. The model computes with it anyway.
        self.norm.register_buffer("table", torch.empty(2), persistent=False)
        # Never trained, but part of the model: it must be broadcast, and has no gradient.
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        # Takes no part in the loss: its .grad is None, and an all-reduce of None fails.
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
    # So if a rank holds 43, it is rank 2's number, and sums show which ranks they are made of.
    return (10 * torch.randint(10, shape, generator=generator) + rank + 1).float()


def same(tensor: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Whether type and shape are equal, and the values are equal except for rounding."""
    return (
        tensor is not None
        and (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
        and torch.allclose(tensor, expected, rtol=1e-4, atol=0)
    )


# One tensor per rank, in the order of ranks; None where a rank holds nothing.
ByRank = Sequence[torch.Tensor | None]


Otherwise = TypeVar("Otherwise")


def same_on_all(held: ByRank, expected: ByRank) -> bool:
    return all(map(same, held, expected))


def first_wrong(held: ByRank, expected: ByRank) -> int:
    """The first rank that does not hold what it should."""
    pairs = enumerate(zip(held, expected, strict=True))
    return next(rank for rank, (one, other) in pairs if not same(one, other))


def explanation(
    held: Any,
    mistakes: Iterable[tuple[Any, str, str]],
    otherwise: Otherwise,
    equal: Callable[[Any, Any], bool] = same_on_all,
) -> tuple[str, str] | Otherwise:
    """The problem and the hint of the first mistake that explains what the ranks hold.

    Args:
        held: what the ranks hold after the call.
        mistakes: of each, what the ranks would hold, then the problem and a hint.
        otherwise: the answer if it is none of them.
        equal: compares what is held with what a mistake would leave.
    """
    # Nobody reads the learner's code. The mistake is made here, on the same numbers, and if the
    # result is the learner's, so is the mistake.
    for expected, problem, hint in mistakes:
        if equal(held, expected):
            return problem, hint
    return otherwise
