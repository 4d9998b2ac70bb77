"""Data parallelism by hand: the three things that a training script needs beyond its own steps.

Every rank holds the whole model and sees its own share of each global batch. The replicas stay equal because they
start equal (:func:`broadcast_parameters`) and step by equal gradients (:func:`average_gradients`); what is reported is
about all rows, not about one rank's (:func:`global_accuracy`).

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704, section 3.2.1, the naive solution that DDP improves upon.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    """Overwrite every rank's weights and buffers, in place, with those of rank 0.

    Once, before the first step. Buffers too: they are state that no gradient brings back into line, such as the
    running mean and variance by which BatchNorm evaluates. In place: an optimizer may hold the parameters already.
    """
    for tensor in chain(model.parameters(), model.buffers()):
        dist.broadcast(tensor.detach(), src=0)


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient, in place, with its mean over the ranks.

    After each backward, before the optimizer steps. Each rank's loss is the mean over its own rows, so with as many
    rows on every rank the mean of the gradients is the gradient of the mean over the global batch. Divided before they
    are summed, as in DDP: a sum over many ranks may be more than fp16 holds.

    A parameter that took no part in the loss has no gradient and is left out: the same ones on every rank. Calls meet
    by their order, not by name. If one rank leaves out another parameter, gradients of different ones are added up,
    unnoticed where their sizes are equal; where not, gloo aborts or ranks wait for ever.
    """
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def global_accuracy(correct: int, total: int) -> float:
    """The share of right answers over the rows of all ranks.

    The counts are summed, then divided: a mean of the ranks' accuracies would give the rows of a rank that has few
    of them more weight than others.

    Args:
        correct: rows that this rank's answers were right for.
        total: rows that this rank answered.
    """
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    counts = torch.tensor([correct, total], device=device)
    dist.all_reduce(counts)
    correct, total = counts.tolist()
    return correct / total
