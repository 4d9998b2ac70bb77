"""Lesson 6: tensor parallelism in three functions. Copy this file, fill them in, and have them
checked.

    cp learn/lessons/tensor_parallel.py my_solution.py
    python -m learn.check tensor_parallel my_solution.py

The first two are f and g of the paper on Megatron-LM: what they do in the backward pass differs
from what they do in the forward pass. A ``torch.autograd.Function`` of your own can do that, and a
function that calls its ``apply`` is what is asked for. The process group is already initialized,
and each function is called on every rank. The same idea as modules is in
``learn/by_hand/tensor_parallel.py``.
"""

import torch
import torch.distributed as dist  # noqa: F401
from torch import nn


def copy_to_ranks(x: torch.Tensor) -> torch.Tensor:
    """f, where the ranks begin to do different things with the same x.

    Forward: x as it is, and nothing is sent. Backward: the sum over all ranks of the gradients that
    arrive, because each rank has found only what its own part contributes. Leave x and the arriving
    gradient unchanged.
    """
    raise NotImplementedError


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """g, where the ranks' parts come together.

    Forward: the sum of all ranks' x. Backward: the gradient that arrives, as it is: every rank
    computes the same loss from the same sum, so the gradient that arrives is the same everywhere.
    Leave x unchanged.
    """
    raise NotImplementedError


def parallel_feed_forward(x: torch.Tensor, first: nn.Linear, second: nn.Linear) -> torch.Tensor:
    """``second(torch.relu(first(x)))``, where each of N ranks computes 1/N of the hidden features.

    Rank r uses the r-th of N equal consecutive parts of ``first.weight``, ``first.bias`` and
    ``second.weight``, nothing else of these three, and sends nothing between the layers. Afterwards
    every rank has the whole output. In the backward pass every rank gets the whole gradient of x
    and of ``second.bias``, and that of its own parts.

    Args:
        x: (rows, in_features), the same on every rank.
        first: the same on every rank; ``weight`` is (hidden, in_features), and N divides hidden.
        second: the same on every rank; ``weight`` is (out_features, hidden).
    """
    raise NotImplementedError
