"""``accumulate``: called on micro-batches of different lengths; how did it weigh and send?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from learn.checking.calls import RecordedCalls
from learn.checking.finding import Exercise, Finding
from learn.checking.probe import explanation

PROMISE = "the gradient is that of all rows in one batch, and is sent once"
INPUTS = 20  # with a bias: 21 float32 gradients, of which no count of rows has the size
NUM_MICRO_BATCHES = 3

MicroBatch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Seen:
    """One rank's gradient after the call as a vector, or None, and how often one was sent."""

    gradient: torch.Tensor | None
    num_sent: int


def micro_batches_of(rank: int) -> list[MicroBatch]:
    """Micro-batches of 1, 4 and 2 rows on rank 0; each further rank has two rows more in each."""
    generator = torch.Generator().manual_seed(rank)
    # Of different lengths, within a rank and between ranks: if all were equally long, a mean of
    # means would be right by luck.
    return [
        (
            torch.rand(rows, INPUTS, generator=generator) + rank,
            torch.rand(rows, 1, generator=generator),
        )
        for rows in (1 + 2 * rank, 4 + 2 * rank, 2 + 2 * rank)
    ]


def _model() -> nn.Module:
    model = nn.Linear(INPUTS, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(1.0)
    return model


def _gradient_of(model: nn.Module) -> torch.Tensor | None:
    gradients = [parameter.grad for parameter in model.parameters()]
    return None if None in gradients else torch.cat([gradient.flatten() for gradient in gradients])


def observe(function: Callable[[DistributedDataParallel, list[MicroBatch]], None]) -> Seen:
    model = _model()
    replica = DistributedDataParallel(model)
    with RecordedCalls() as recorded:
        function(replica, micro_batches_of(dist.get_rank()))
    size = sum(parameter.nbytes for parameter in model.parameters())
    # Only calls as large as all gradients: a solution may sum its counts of rows as well.
    sent = [call for call in recorded.calls if (call.name, call.num_bytes) == ("allreduce", size)]
    return Seen(_gradient_of(model), len(sent))


def judge(seen: Sequence[Seen]) -> Finding | None:
    num_ranks = len(seen)
    rows, sums = _by_rank(num_ranks)
    # The gradient of the mean over all rows: errors summed over everything, divided once.
    right = sums.sum((0, 1)) / rows.sum()
    held = [one.gradient for one in seen]
    counts = enumerate(rows[..., 0].int().tolist())
    lists = "; ".join(f"rank {rank}: {', '.join(map(str, one))}" for rank, one in counts)
    if None in held:
        hint = "The optimizer reads it after your function has returned."
        return Finding("a gradient is gone: .grad is None", hint)
    first = ", ".join(f"{gradient[0].item():.4g}" for gradient in held)
    elements = f"first element of the gradient: {right[0].item():.4g}; the ranks have {first}"
    detail = f"rows per micro-batch, {lists}\n{elements}"
    if not all(_close(gradient, held[0]) for gradient in held):
        hint = (
            "They would step in different directions. In which of the backward passes does DDP "
            "average?"
        )
        return Finding("the ranks hold different gradients", hint, detail)
    if not _close(held[0], right):
        problem, hint = _suspect(held[0], rows, sums)
        return Finding(problem, hint, detail)
    # Last, because it is only slow: the gradient is right, but every micro-batch sent its own.
    num_sent = max(one.num_sent for one in seen)
    if num_sent > 1:
        hint = (
            "The gradient is right, but only the last one had to be sent. What has to happen "
            "inside no_sync()? Read its documentation: DDP decides in the forward pass."
        )
        problem = f"sends gradients {num_sent} times for {NUM_MICRO_BATCHES} micro-batches"
        return Finding(problem, hint)
    return None


def _by_rank(num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, (ranks, micro-batches, 1), and gradients of summed errors, (..., elements)."""
    rows, sums = [], []
    for rank in range(num_ranks):
        for inputs, targets in micro_batches_of(rank):
            model = _model()
            mse_loss(model(inputs), targets, reduction="sum").backward()
            rows.append(len(inputs))
            sums.append(_gradient_of(model))
    by_rank = torch.tensor(rows, dtype=torch.float).view(num_ranks, NUM_MICRO_BATCHES, 1)
    return by_rank, torch.stack(sums).view(num_ranks, NUM_MICRO_BATCHES, -1)


def _suspect(held: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor) -> tuple[str, str]:
    """The mistake that explains this gradient, and a hint."""
    # (ranks, micro-batches, elements): the gradient of each micro-batch's own mean.
    num_ranks, means = len(rows), sums / rows
    right = sums.sum((0, 1)) / rows.sum()
    weight = (
        "A row of a short micro-batch must weigh as much as one of a long one. What is the mean "
        "over all rows?"
    )
    # DDP averages over the ranks whatever each rank has accumulated: the .mean(0) in these.
    mistakes = [
        (
            means.mean((0, 1)),
            "every micro-batch has the same weight, however many rows it has",
            weight,
        ),
        (means.sum(1).mean(0), "adds up the means of the micro-batches", weight),
        (
            sums.sum((0, 1)) / num_ranks,
            "adds up the rows' gradients, and does not divide by their number",
            weight,
        ),
        (
            (sums.sum(1) / rows.sum(1)).mean(0),
            "every rank has the same weight, however many rows it has",
            "Within a rank the weights are right. Does each rank know how many rows all ranks "
            "have together?",
        ),
        (
            means[:, -1].mean(0),
            "only the last micro-batch is in the gradient",
            "backward() adds to .grad. What removes the gradients of the micro-batches before?",
        ),
        (
            right / num_ranks,
            f"the gradient is {num_ranks} times too small",
            "You divide by all rows, and DDP divides by the number of ranks too.",
        ),
        (
            right * num_ranks,
            f"the gradient is {num_ranks} times too large",
            "Who divides by the number of ranks, DDP or you?",
        ),
    ]
    otherwise = "the gradient is not that of the mean over all rows", weight
    return explanation(held, mistakes, otherwise, _close)


def _close(gradient: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(gradient, expected, rtol=1e-4)


EXERCISES = {
    "accumulate": Exercise("buckets", PROMISE, observe, judge),
}
