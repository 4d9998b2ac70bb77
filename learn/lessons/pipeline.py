"""Lesson 7: a pipeline in the order 1F1B, in two functions. Copy this file, fill them in, and have
them checked.

    cp learn/lessons/pipeline.py my_solution.py
    python -m learn.check pipeline my_solution.py

Rank s holds stage s of the model. A batch is cut into micro-batches, numbered from 0, and an action
is ``("F", i)`` or ``("B", i)``: the forward or backward pass of micro-batch i through this stage.
The process group is already initialized, and each function is called on every rank. One solution is
in ``learn/by_hand/pipeline.py``.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist  # noqa: F401
from torch import nn


def one_forward_one_backward(
    stage: int,
    num_stages: int,
    num_micro_batches: int,
) -> list[tuple[str, int]]:
    """The actions of a stage in the order 1F1B, for any number of micro-batches, even fewer than
    there are stages.

    Stage s of N keeps the activations of N - s micro-batches at most: it has at most so many more
    forward passes than backward passes behind it. Within that limit it begins early, so that no
    stage waits longer than it has to.
    """
    raise NotImplementedError


def run_stage(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    order: Sequence[tuple[str, int]],
) -> None:
    """Run this rank's actions in the given order, with real sends and receives.

    Stage 0 reads the inputs, each other stage what the previous one sends. The last stage computes
    the loss. Afterwards the gradients of ``module`` are those of the mean square error over the
    whole batch, as in one process.

    Args:
        module: this rank's stage; its output has the shape of its input.
        inputs: the micro-batches, equally large. Stages other than 0 may use them only for their
            shape and dtype.
        targets: for the last stage, of the same shapes, for ``torch.nn.functional.mse_loss``.
        order: this stage's actions.
    """
    raise NotImplementedError
