"""A pipeline by hand: every rank holds one stage, and micro-batches follow each other through them.

    torchrun --standalone --nproc_per_node=4 learn/by_hand/pipeline.py

A stage sends its activations to the next rank and gets back the loss's gradient with respect to
them: autograd ends at the border of a process, so both transfers are written out. What is left to
choose is the order in which a rank works:

- GPipe: all forwards, then all backwards. A stage keeps the activations of all M micro-batches.
- 1F1B: a backward as soon as one can run. Of N stages, stage s keeps N - s micro-batches at most.

While the pipeline fills and drains, ranks wait: (N - 1) / (M + N - 1) of the time, if all actions
take equally long.

Source: Huang et al., "GPipe", arXiv 1811.06965, section 2; for 1F1B Narayanan et al., arXiv
2104.04473, section 2.2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from learn.by_hand.demonstration import demonstrate, largest_gap
from training.distributed.ranks import Ranks
from training.parallelism import timeline
from training.parallelism.schedules import Action

Order = list[tuple[str, int]]  # "F" or "B", and the micro-batch


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> Order:
    return [(kind, index) for kind in "FB" for index in range(num_micro_batches)]


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> Order:
    """The order of 1F1B: one forward per later stage, then forward and backward alternate."""
    # The last stage can begin a backward right after its first forward. Each stage before it waits
    # for one forward more, which is the number of micro-batches that it starts with.
    warm_up = min(num_stages - 1 - stage, num_micro_batches)
    forwards, backwards = ([(kind, index) for index in range(num_micro_batches)] for kind in "FB")
    # There are fewer forwards left than backwards, so zip ends with the forwards. From here on
    # each forward takes the memory that the backward before it has freed.
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    alternating = [action for pair in pairs for action in pair]
    # What is left are the backwards of the warm-up's micro-batches, while the pipeline drains.
    return forwards[:warm_up] + alternating + backwards[num_micro_batches - warm_up :]


class Stage:
    """This rank's part of the model during one batch; gradients accumulate in the module's
    parameters.

    Args:
        module: its output has the shape of its input.
        inputs, targets: of the micro-batches, all of one shape; the first rank reads the inputs,
            the last the targets.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        self.module, self.inputs, self.targets = module, inputs, targets
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        # What a backward needs of its forward: the stage's input and output, by micro-batch. With
        # the graph between them this is most of the memory, and how many there are at once is
        # what the orders differ in.
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, order: Order) -> list[tuple[Action, int]]:
        """Returns each action with the number of micro-batches kept in memory after it."""
        # Sends are not waited for at once: with 1F1B two neighbours would both wait to send, and
        # neither receive. But a send keeps its tensor in memory. Once the gradient of an activation
        # is back, the activation has arrived.
        events, sends = [], {}
        for kind, index in order:
            message, receiver = self._forward(index) if kind == "F" else self._backward(index)
            events.append((Action(self.rank, kind, index), len(self.kept)))
            # Only after a backward: the gradient of this activation has just arrived.
            if sent := sends.pop(("F", index), None):
                sent.wait()
            # The loss goes to no next stage, and the gradient of the batch to no previous one.
            if 0 <= receiver <= self.last:
                sends[kind, index] = dist.isend(message, receiver)
        for send in sends.values():
            send.wait()
        return events

    def _forward(self, index: int) -> tuple[torch.Tensor, int]:
        # Messages have no number: the next one is the next micro-batch. So both neighbours must
        # take the micro-batches in the same order, as they do in GPipe and in 1F1B.
        x = self.inputs[index]
        if self.rank > 0:
            # Each micro-batch has a tensor of its own, which its backward pass will need. The
            # shape is known, because a stage's output has the shape of its input.
            dist.recv(x := torch.empty_like(x), self.rank - 1)
            x.requires_grad_()  # the previous stage waits for its gradient
        y = self.module(x)
        if self.rank == self.last:
            # Micro-batches are of one size, so the sum of their losses / M is the batch's mean.
            y = F.mse_loss(y, self.targets[index]) / len(self.targets)
        self.kept[index] = x, y
        # Detached, but the same memory: only numbers are sent, the graph stays on this rank.
        return y.detach(), self.rank + 1

    def _backward(self, index: int) -> tuple[torch.Tensor | None, int]:
        # Not in `kept` any more, so these activations are freed when this function returns.
        x, y = self.kept.pop(index)
        gradient = None  # the last stage's y is the loss itself, where a backward pass begins
        if self.rank < self.last:
            # Elsewhere it begins with the gradient of y, which only the next stage can compute.
            dist.recv(gradient := torch.empty_like(y), self.rank + 1)
        # Adds to the .grad of the parameters, and sets that of x, which is a leaf of this graph.
        y.backward(gradient)
        return x.grad, self.rank - 1


def show(ranks: Ranks, num_micro_batches: int = 8) -> None:
    """Compare both orders with one process, and draw what ran (a backward takes two forwards)."""
    # One seed: every rank draws the same model and batch, so it can check its own stage against
    # one process. In float64, so that a mistake is not taken for rounding.
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(ranks.world_size)]
    layers = nn.Sequential(*stages).double()
    inputs, targets = torch.randn(2, 64, 16, dtype=torch.float64)
    module = layers[ranks.rank]
    loss = F.mse_loss(layers(inputs), targets)
    expected = torch.autograd.grad(loss, list(module.parameters()))
    for name, order in (("gpipe", gpipe), ("1f1b", one_forward_one_backward)):
        module.zero_grad()
        stage = Stage(module, inputs.chunk(num_micro_batches), targets.chunk(num_micro_batches))
        events = ranks.gather(stage.run(order(ranks.rank, ranks.world_size, num_micro_batches)))
        gap = largest_gap((weight.grad for weight in module.parameters()), expected)
        gaps = ranks.gather(f"{gap:.1e}")
        if ranks.is_first:
            drawing = timeline.place([[action for action, _ in stage] for stage in events], name)
            timeline.show(drawing, Console(highlight=False))
            what = "largest difference to the gradients of one process, by stage"
            print(f"{what}: {', '.join(gaps)}\n")


if __name__ == "__main__":
    demonstrate("learn/by_hand/pipeline.py", show)
