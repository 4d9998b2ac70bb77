"""One rank that takes the same steps in several ways: python -m benchmarks.by_hand_worker FIELDS.

``benchmarks.by_hand`` starts it.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DistributedSampler

from training.by_hand.batches import Batch, training_batches
from training.by_hand.cifar10 import Split
from training.by_hand.cnn import CNN
from training.by_hand.compare_with_ddp import largest_gap
from training.by_hand.data_parallel import average_gradients
from training.by_hand.shapes import draw_shapes
from training.distributed import Ranks, ranks
from training.monitoring.profile_summary import summarise

WARMUP_STEPS = 3
PROFILED_STEPS = 30
EPOCH_STEPS = 8
ONE_BUCKET_MB = 1000  # more than any model here has
Model = Callable[[torch.Tensor], torch.Tensor]


class Way:
    """A copy of the model, and one way to average its gradients.

    Args:
        network: the copy, which the optimizer changes.
        wrap: makes of it what computes the loss, such as DDP.
        average: called after backward.
    """

    def __init__(
        self, network: nn.Module, wrap: Callable[[nn.Module], Model], average: Callable[[nn.Module], None]
    ) -> None:
        self.network = network
        self.model = wrap(network)
        self.average = average
        self.optimizer = SGD(network.parameters(), lr=0.01, momentum=0.9)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(images), labels).backward()
        self.average(self.network)
        self.optimizer.step()


def average_in_one_call(model: nn.Module) -> None:
    """Average all gradients as one long vector: what a bucket is, without DDP's overlap."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def keep(given: Any) -> Any:
    """Change nothing."""
    return given


def in_one_bucket(network: nn.Module) -> DistributedDataParallel:
    """DDP that waits for the last gradient before it sends any."""
    return DistributedDataParallel(network, bucket_cap_mb=ONE_BUCKET_MB)


WAYS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "no communication": (keep, keep),
    "by hand": (keep, average_gradients),
    "by hand, in one call": (keep, average_in_one_call),
    "DDP, one bucket": (in_one_bucket, keep),
    "DDP": (DistributedDataParallel, keep),
}


def main() -> None:
    """Measure and print the result as one line of JSON."""
    fields = json.loads(sys.argv[1])
    with ranks("cpu") as mine:
        result = measure(mine, **fields)
    print(json.dumps(result), flush=True)


def measure(mine: Ranks, width: int, rows: int, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """All ways start from the same weights and take the same batches, by turns.

    Returns:
        Of each way: ``seconds`` a step, one number a round; ``profile``, of a step; and ``gap``, by which its weights
        at the end differ from DDP's.
    """
    torch.manual_seed(0)
    network = CNN(width=width)
    ways = {name: Way(copy.deepcopy(network), *functions) for name, functions in WAYS.items()}
    batches = endless_batches(mine, rows)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + rounds):
        drawn = list(islice(batches, steps if number else WARMUP_STEPS))
        turn = number % len(ways)
        for name in [*ways][turn:] + [*ways][:turn]:
            took = timed(ways[name], drawn, mine)
            if number:
                seconds[name].append(took)
    drawn = list(islice(batches, PROFILED_STEPS))
    profiles = {name: profiled(way, drawn) for name, way in ways.items()}
    gaps = {name: largest_gap(way.network.parameters(), ways["DDP"].network.parameters()) for name, way in ways.items()}
    return {name: {"seconds": seconds[name], "profile": profiles[name], "gap": gaps[name]} for name in ways}


def endless_batches(mine: Ranks, rows: int) -> Iterator[Batch]:
    """This rank's shares of drawn shapes, again and again."""
    images = Split(*draw_shapes(EPOCH_STEPS * rows * mine.world_size, seed=0))
    sampler = DistributedSampler(images, mine.world_size, mine.rank)
    return cycle(training_batches(images, sampler, rows, seed=0))


def timed(way: Way, batches: list[Batch], mine: Ranks) -> float:
    """Seconds a step, from when all ranks are there until all are done."""
    mine.barrier()
    began = time.perf_counter()
    for batch in batches:
        way.step(*batch)
    mine.barrier()
    return (time.perf_counter() - began) / len(batches)


def profiled(way: Way, batches: list[Batch]) -> dict[str, float]:
    """Of a step: calls to the other ranks, seconds in which one ran, and the share of those behind computing."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for batch in batches:
            way.step(*batch)
    events = seen.events()
    found = summarise(events, on_gpu=False)
    calls = sum(event.name.startswith("gloo:") for event in events)
    return {
        "calls": calls / len(batches),
        "seconds": found["communication"] / len(batches),
        "hidden": found["hidden"] or 0.0,
    }


if __name__ == "__main__":
    main()
