"""Lesson 2: data parallelism in three functions. Copy this file, fill them in, and have them
checked.

    cp learn/lessons/data_parallel.py my_solution.py
    python -m learn.check data_parallel my_solution.py

The process group is already initialized, and each function is called on every rank.
``torch.distributed`` has the collectives. Every rank must make each call, or some will wait
forever; none may rely on another having finished. One solution is in
``learn/by_hand/data_parallel.py``.
"""

import torch  # noqa: F401
import torch.distributed as dist  # noqa: F401
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    """Make every rank start with the weights of rank 0.

    Each rank has created the same model with its own random weights. Afterwards everything that the
    model consists of, parameters and buffers, must have rank 0's values on every rank. An optimizer
    may already hold the parameters, so keep the same Parameter objects and their ``requires_grad``.
    """
    raise NotImplementedError


def average_gradients(model: nn.Module) -> None:
    """Make every rank step in the same direction.

    Each rank has called ``backward()`` on its own rows. Afterwards every ``parameter.grad`` must be
    the mean over all ranks, on any number of ranks. The gradient of a parameter that took no part
    in the loss is None.
    """
    raise NotImplementedError


def global_accuracy(correct: int, total: int) -> float:
    """The share of correct answers over the rows of all ranks, between 0 and 1, the same on every
    rank.

    Args:
        correct: rows that this rank answered correctly.
        total: rows that this rank answered; ranks may have different numbers.
    """
    raise NotImplementedError
