"""Data parallelism by hand: the three functions that a training script needs besides its own steps.

Every rank holds the whole model and sees its own share of each global batch. The replicas stay
equal because they start equal (:func:`broadcast_parameters`) and are updated with equal gradients
(:func:`average_gradients`). What is reported is about all rows, not one rank's
(:func:`global_accuracy`).

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704, section 3.2.1, the naive solution that
DDP improves on.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    """Overwrite every rank's weights and buffers, in place, with those of rank 0.

    Call it once, before the first step.
    """
    # Buffers too, because no gradient ever makes them equal again: for example the running mean and
    # variance that BatchNorm evaluates with.
    for tensor in chain(model.parameters(), model.buffers()):
        # Rank 0 sends and all others receive, one call per tensor, in the same order on every rank.
        # In place, because an optimizer may already hold the parameters. `detach` gives the same
        # memory without autograd, which forbids writing into a weight that it records.
        dist.broadcast(tensor.detach(), src=0)


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient, in place, with its mean over the ranks.

    Call it after each backward pass, before the optimizer steps. Each rank's loss is the mean over
    its own rows, so if all ranks have the same number of rows, the mean of the gradients is the
    gradient of the mean over the global batch.
    """
    for parameter in model.parameters():
        # A parameter that took no part in the loss has no gradient and is skipped, which must be
        # the same on every rank. Calls are matched by their order, not by name: if one rank skips
        # another parameter, gradients of different parameters are added up. If their sizes are
        # equal nobody notices; otherwise gloo aborts or ranks wait forever.
        if parameter.grad is not None:
            # First divided, then summed, as in DDP: a sum over many ranks may exceed the range of
            # fp16.
            parameter.grad /= dist.get_world_size()
            # In place, and the result is the same on every rank, bit for bit. So the optimizers
            # take the same step everywhere, and the replicas stay equal without sending weights.
            dist.all_reduce(parameter.grad)


def global_accuracy(correct: int, total: int) -> float:
    """The share of correct answers over the rows of all ranks.

    Args:
        correct: rows that this rank answered correctly.
        total: rows that this rank answered.
    """
    # NCCL sends only tensors in GPU memory, gloo takes those of the CPU.
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    # The counts are summed and then divided. The mean of the ranks' accuracies would give too much
    # weight to the rows of a rank that has few. Both counts are in one tensor, so it is one call.
    counts = torch.tensor([correct, total], device=device)
    dist.all_reduce(counts)
    correct, total = counts.tolist()
    return correct / total
