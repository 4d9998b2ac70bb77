"""Lesson 5: ZeRO-1 in three functions. Copy this file, fill them in, and have them checked.

    cp learn/lessons/zero1.py my_solution.py
    python -m learn.check zero1 my_solution.py

All three think of the parameters as one flat vector: in their order, padded with zeros at the end
to a multiple of the number of ranks N, and cut into N equal parts. Rank r owns part r, its share.
The process group is already initialized, and each function is called on every rank with the same
weights, but other gradients. Which collectives you use is up to you. One solution is in
``learn/by_hand/zero1.py``.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist  # noqa: F401
from torch import nn


def create_sharded_adam(
    parameters: Sequence[nn.Parameter],
    learning_rate: float,
) -> torch.optim.Adam:
    """An Adam that steps this rank's share of the weights, and so keeps the two moments of that
    share only.

    The optimizer holds one tensor, a copy of the share. Nothing may be left in memory of the other
    ranks' shares. Apart from the learning rate, Adam keeps its default settings.
    """
    raise NotImplementedError


def reduce_scatter_gradients(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """This rank's share of the gradient of the whole batch, as a flat tensor.

    Each rank has called ``backward()`` on its own rows, so every ``parameter.grad`` is there. The
    gradient of the whole batch is their mean over all ranks.
    """
    raise NotImplementedError


def zero1_step(parameters: Sequence[nn.Parameter], optimizer: torch.optim.Adam) -> None:
    """One step: afterwards every rank has all weights, and they are those of plain Adam on one
    process.

    Args:
        parameters: each has its ``.grad``, of this rank's rows. Write the new weights into these
            same objects.
        optimizer: the one from ``create_sharded_adam``; ``optimizer.param_groups[0]["params"][0]``
            is the share.
    """
    raise NotImplementedError
