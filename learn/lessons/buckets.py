"""Lesson 4: buckets, overlap and no_sync. Copy this file, fill it in, and have it checked.

    cp learn/lessons/buckets.py my_solution.py
    python -m learn.check buckets my_solution.py

The process group is already initialized, and each function is called on every rank.
``torch.distributed`` has the collectives.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def average_in_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> Callable[[], None]:
    """Average gradients while the backward pass is still running, as DDP does.

    Called once, before training. Register a hook on each parameter
    (``register_post_accumulate_grad_hook``) and return a function, ``finish``. In each step the
    caller runs ``loss.backward()`` and then ``finish()``. Afterwards every ``parameter.grad`` must
    be the mean over all ranks.

    Put the parameters into buckets in the order in which they are given: the next one goes into the
    same bucket unless its gradient would make the bucket larger than ``bucket_bytes``. A gradient
    that is larger by itself gets a bucket of its own. As soon as all gradients of a bucket are
    computed, launch one all-reduce for them together. The hook must not wait for it, so that the
    backward pass can continue.

    Args:
        parameters: all of one type, in the order in which the backward pass computes their
            gradients. Each gets a gradient in each step, on every rank.
    """
    raise NotImplementedError


def accumulate(
    replica: DistributedDataParallel,
    micro_batches: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Compute the gradient of a large batch from several small ones, and send gradients only once.

    Afterwards every ``.grad`` must be the gradient of the mean squared error over the rows of all
    micro-batches of all ranks, as if one process had seen them in one batch. Only the last backward
    pass may send gradients (``replica.no_sync()``). You may also sum numbers of rows over the
    ranks. All ``.grad`` are None before the call.

    Args:
        replica: a model with one output. DDP divides the sum of the ranks' gradients by their
            number.
        micro_batches: inputs and targets of each. They have different numbers of rows, on each rank
            other ones, but all ranks have the same number of micro-batches.
    """
    raise NotImplementedError
