"""Data parallelism by hand next to DDP: the same weights after every step.

    torchrun --standalone --nproc_per_node=2 learn/by_hand/compare_with_ddp.py

Two copies of a model take the same steps on the same images, one by
:mod:`learn.by_hand.data_parallel`, the other in ``DistributedDataParallel``. After each step their
losses, gradients and weights are compared. On two ranks they are bit-identical. On more they may
differ in their last bits: DDP sums many gradients in one call, and so adds the ranks' numbers up in
another order; and where this divides by N, it multiplies by 1/N. All is in float64: in float32 such
a last bit may let max pooling choose another pixel, and from there on the two go separate ways.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DistributedSampler

from common.errors import TrainingFailure
from learn.by_hand.batches import training_batches
from learn.by_hand.cifar10 import Split
from learn.by_hand.cnn import CNN
from learn.by_hand.data_parallel import average_gradients, broadcast_parameters
from learn.by_hand.demonstration import demonstrate, largest_gap
from learn.by_hand.shapes import draw_shapes
from training.distributed.ranks import Ranks

STEPS = 10
ROWS_PER_RANK = 16
TOLERANCE = 1e-12  # of rounding
# Loss by hand, loss in DDP, largest difference of a gradient, of a weight.
Row = tuple[float, float, float, float]


def show(ranks: Ranks) -> None:
    """Print a row for each step, of rank 0's losses and the largest differences on any rank.

    Raises:
        TrainingFailure: they differ by more than rounding.
    """
    print_once: Callable[[str], None] = print if ranks.is_first else lambda _: None
    print_once("step  loss by hand   loss in DDP  gradients differ by  weights differ by")
    largest = 0.0
    for step, row in enumerate(compare(ranks), start=1):
        rows = ranks.gather(row)
        # All ranks call the gather, and look at the worst of them: a replica that drifted on rank
        # 1 only would not show in rank 0's numbers.
        gradients, weights = max(row[2] for row in rows), max(row[3] for row in rows)
        print_once(f"{step:4}  {row[0]:12.8f}  {row[1]:12.8f}  {gradients:19.1e}  {weights:17.1e}")
        largest = max(largest, weights)
    if largest > TOLERANCE:
        problem = f"the weights by hand and in DDP differ by {largest:.1e}"
        raise TrainingFailure(problem, quiet=not ranks.is_first, code="replicas-differ")
    verdict = f"equal except for rounding, at most {largest:.1e}" if largest else "bit-identical"
    print_once(f"weights: {verdict}")


def compare(ranks: Ranks) -> Iterator[Row]:
    """Take every step in both ways; yields how they differ."""
    # The ranks start with different weights; both ways must make them equal.
    torch.manual_seed(ranks.rank)
    by_hand = CNN(width=8).double()
    in_ddp = copy.deepcopy(by_hand)
    broadcast_parameters(by_hand)
    # DDP broadcasts rank 0's weights and buffers when it is created. It trains `in_ddp` itself, not
    # a copy, so below that is the model whose weights are compared.
    ddp = DistributedDataParallel(in_ddp)
    optimizers = [SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (by_hand, in_ddp)]
    images = Split(*draw_shapes(STEPS * ROWS_PER_RANK * ranks.world_size, seed=0))
    sampler = DistributedSampler(images, ranks.world_size, ranks.rank)
    for pixels, labels in training_batches(images, sampler, ROWS_PER_RANK, seed=0):
        losses = [F.cross_entropy(model(pixels.double()), labels) for model in (by_hand, ddp)]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()  # during which DDP averages its gradients
        # By hand they are averaged now, between backward and step. Everything else is the same.
        average_gradients(by_hand)
        for optimizer in optimizers:
            optimizer.step()
        found = ([weight.grad for weight in model.parameters()] for model in (by_hand, in_ddp))
        gradients = largest_gap(*found)
        weights = largest_gap(by_hand.parameters(), in_ddp.parameters())
        yield losses[0].item(), losses[1].item(), gradients, weights


if __name__ == "__main__":
    demonstrate("learn/by_hand/compare_with_ddp.py", show)
