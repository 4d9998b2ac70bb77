"""One rank that takes the same steps in several ways: python -m benchmarks.by_hand_worker FIELDS CASE.

``benchmarks.by_hand`` starts it.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DistributedSampler

from learn.by_hand.batches import Batch, training_batches
from learn.by_hand.cifar10 import Split
from learn.by_hand.cnn import CNN
from learn.by_hand.data_parallel import average_gradients
from learn.by_hand.demonstration import largest_gap
from learn.by_hand.shapes import draw_shapes
from learn.cards.distributed.allreduce import all_reduce_gradients
from training.monitoring.profiler import communication
from training.parallelism.distributed import Ranks, ranks

WARMUP_ROUNDS = 1
PROFILED_STEPS = 2  # of a way in a round, right after its timed ones
EPOCH_STEPS = 8
ONE_BUCKET_MB = 1000  # more than any model here has
STEPS = "steps"  # what they are called in a profile
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


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        make: the model, of images.
        rows: images a rank and step.
        bucket_mb: DDP's ``bucket_cap_mb``; None for its default.
    """

    make: Callable[[], nn.Module]
    rows: int
    bucket_mb: float | None = None


def deep_network(width: int = 256, depth: int = 24) -> nn.Sequential:
    """Many layers of one size, whose gradients fill bucket after bucket."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * 8 * 8, width), *blocks, nn.Linear(width, 10))


CASES = {
    "CNN(width=32)": Case(partial(CNN, width=32), rows=4),
    "CNN(width=256)": Case(partial(CNN, width=256), rows=4),
    "deep_network()": Case(deep_network, rows=64, bucket_mb=1),
}


def keep(given: Any) -> Any:
    """Change nothing."""
    return given


def ways_of(case: Case) -> dict[str, Way]:
    """Every way, from the same weights."""
    torch.manual_seed(0)
    network = case.make()
    ddp, one_bucket = (partial(DistributedDataParallel, bucket_cap_mb=mb) for mb in (case.bucket_mb, ONE_BUCKET_MB))
    functions = {
        "no communication": (keep, keep),
        "by hand": (keep, average_gradients),
        # What a bucket is, without DDP's overlap.
        "by hand, in one call": (keep, partial(all_reduce_gradients, share=1 / dist.get_world_size())),
        "DDP, one bucket": (one_bucket, keep),
        "DDP": (ddp, keep),
    }
    return {name: Way(copy.deepcopy(network), wrap, average) for name, (wrap, average) in functions.items()}


def main() -> None:
    """Measure and print the result as one line of JSON."""
    fields, case = sys.argv[1:]
    with ranks("cpu") as mine:
        torch.set_num_threads(1)
        result = measure(mine, CASES[case], **json.loads(fields))
    print(json.dumps(result), flush=True)


def measure(mine: Ranks, case: Case, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """All ways start from the same weights and take the same batches, by turns.

    Returns:
        Of each way: ``seconds`` a step, one number a round; ``profiles``, of a step, one a round; and ``gap``, by which
        its weights at the end differ from DDP's.
    """
    ways, batches = ways_of(case), endless_batches(mine, case.rows)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    profiles: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(WARMUP_ROUNDS + rounds):
        drawn, to_profile = (list(islice(batches, count)) for count in (steps, PROFILED_STEPS))
        turn = number % len(ways)
        for name in [*ways][turn:] + [*ways][:turn]:
            seconds[name].append(timed(ways[name], drawn, mine))
            profiles[name].append(profiled(ways[name], to_profile, mine))
    gaps = {name: largest_gap(way.network.parameters(), ways["DDP"].network.parameters()) for name, way in ways.items()}
    return {
        name: {"seconds": seconds[name][WARMUP_ROUNDS:], "profiles": profiles[name][WARMUP_ROUNDS:], "gap": gaps[name]}
        for name in ways
    }


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


def profiled(way: Way, batches: list[Batch], mine: Ranks) -> dict[str, float]:
    """Of a step: calls to the other ranks, seconds in which one ran, and the share of those behind computing."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        mine.barrier()  # one rank's profiler starts later than another's, and is not to be waited for in the steps
        with record_function(STEPS):
            for batch in batches:
                way.step(*batch)
    span = next(event.time_range for event in seen.events() if event.name == STEPS)
    events = [event for event in seen.events() if event.time_range.start > span.start]
    found = communication(events, on_gpu=False)
    return {
        "calls": sum(event.name.startswith("gloo:") for event in events) / len(batches),
        "seconds": found["communication"] / len(batches),
        "hidden": found["hidden"] or 0.0,
    }


if __name__ == "__main__":
    main()
