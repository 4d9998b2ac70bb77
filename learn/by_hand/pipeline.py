"""A pipeline by hand: every rank holds one stage of the model, and micro-batches follow each other through the stages.

    torchrun --standalone --nproc_per_node=4 learn/by_hand/pipeline.py

A stage sends its activations to the next rank and gets back the loss's gradient with respect to them: autograd ends at
the border of a process, so both transfers are written out. What is left to choose is the order in which a rank works:

- GPipe: all forwards, then all backwards. A stage keeps the activations of all M micro-batches.
- 1F1B: a backward as soon as one can run. Of N stages, stage s keeps N - s micro-batches at most.

While the pipeline fills and drains, ranks wait: (N - 1) / (M + N - 1) of the time, if all actions take equally long.

Source: Huang et al., "GPipe", arXiv 1811.06965, section 2; for 1F1B Narayanan et al., arXiv 2104.04473, section 2.2.
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
from training.parallelism import timeline
from training.parallelism.distributed import Ranks
from training.parallelism.schedules import Action

Order = list[tuple[str, int]]  # "F" or "B", and the micro-batch


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> Order:
    return [(kind, index) for kind in "FB" for index in range(num_micro_batches)]


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> Order:
    """The order of 1F1B: one forward per later stage, then forward and backward alternate."""
    warm_up = min(num_stages - 1 - stage, num_micro_batches)
    forwards, backwards = ([(kind, index) for index in range(num_micro_batches)] for kind in "FB")
    alternating = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return forwards[:warm_up] + alternating + backwards[num_micro_batches - warm_up :]


class Stage:
    """This rank's part of the model during one batch; gradients accumulate in the module's parameters.

    Args:
        module: its output has the shape of its input.
        inputs, targets: of the micro-batches, all of one shape; the first rank reads the inputs, the last the targets.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self.module, self.inputs, self.targets = module, inputs, targets
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what a backward needs of its forward

    def run(self, order: Order) -> list[tuple[Action, int]]:
        """Returns each action with the number of micro-batches whose activations the stage then kept."""
        # Sends are not waited for at once: with 1F1B two neighbours would both wait to send, and neither receive. But a
        # send keeps its tensor in memory. Once the gradient of an activation is back, the activation has arrived.
        events, sends = [], {}
        for kind, index in order:
            message, receiver = self._forward(index) if kind == "F" else self._backward(index)
            events.append((Action(self.rank, kind, index), len(self.kept)))
            if sent := sends.pop(("F", index), None):
                sent.wait()
            if 0 <= receiver <= self.last:
                sends[kind, index] = dist.isend(message, receiver)
        for send in sends.values():
            send.wait()
        return events

    def _forward(self, index: int) -> tuple[torch.Tensor, int]:
        x = self.inputs[index]
        if self.rank > 0:
            dist.recv(x := torch.empty_like(x), self.rank - 1)
            x.requires_grad_()  # the previous stage waits for its gradient
        y = self.module(x)
        if self.rank == self.last:
            y = F.mse_loss(y, self.targets[index]) / len(self.targets)
        self.kept[index] = x, y
        return y.detach(), self.rank + 1

    def _backward(self, index: int) -> tuple[torch.Tensor | None, int]:
        x, y = self.kept.pop(index)
        gradient = None
        if self.rank < self.last:
            dist.recv(gradient := torch.empty_like(y), self.rank + 1)
        y.backward(gradient)
        return x.grad, self.rank - 1


def show(ranks: Ranks, num_micro_batches: int = 8) -> None:
    """Compare both orders with one process, and draw what ran, with backward passes twice as long as forward ones."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(ranks.world_size))).double()
    inputs, targets = torch.randn(2, 64, 16, dtype=torch.float64)
    module = layers[ranks.rank]
    expected = torch.autograd.grad(F.mse_loss(layers(inputs), targets), list(module.parameters()))
    for name, order in (("gpipe", gpipe), ("1f1b", one_forward_one_backward)):
        module.zero_grad()
        stage = Stage(module, inputs.chunk(num_micro_batches), targets.chunk(num_micro_batches))
        events = ranks.gather(stage.run(order(ranks.rank, ranks.world_size, num_micro_batches)))
        gaps = ranks.gather(f"{largest_gap((weight.grad for weight in module.parameters()), expected):.1e}")
        if ranks.is_first:
            drawing = timeline.place([[action for action, _ in stage] for stage in events], name)
            timeline.show(drawing, Console(highlight=False))
            print(f"largest difference to the gradients of one process, by stage: {', '.join(gaps)}\n")


if __name__ == "__main__":
    demonstrate("learn/by_hand/pipeline.py", show)
