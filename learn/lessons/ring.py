"""Lesson 1: the ring all-reduce. Copy this file, fill it in, and have it checked.

    cp learn/lessons/ring.py my_solution.py
    python -m learn.check ring my_solution.py

The process group is already initialized, and the function is called on every rank. One solution is
in ``learn/by_hand/ring_all_reduce.py``.
"""

import torch
import torch.distributed as dist  # noqa: F401


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Replace a tensor, in place, with its sum over all ranks, as ``dist.all_reduce`` does.

    Build it from ``dist.isend`` and ``dist.irecv`` (or ``dist.send`` and ``dist.recv``), without a
    collective. On N ranks, each rank sends only to the next one, which after rank N - 1 is rank 0,
    and receives only from the previous one. No rank may send more than 2 (N - 1) / N of the
    tensor's bytes, plus those of one of N chunks. Afterwards all ranks must hold the same bits.

    Args:
        tensor: contiguous, of the same shape and type on all ranks, with any number of dimensions.
            N may not divide its number of elements, which may even be smaller than N.
    """
    raise NotImplementedError
