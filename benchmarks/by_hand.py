"""What are fewer calls and overlap worth: data parallelism by hand against DDP, taking the same
steps alternately?

With ``--cifar10``, also what one and two ranks learn from CIFAR-10.
"""

from __future__ import annotations

import copy
import re
import resource
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DistributedSampler

from benchmarks import harness
from benchmarks.processes import Layout, run_ranks
from common.errors import TrainingFailure, UserError, positive
from learn.by_hand.batches import Batch, training_batches
from learn.by_hand.cifar10 import Split
from learn.by_hand.cnn import CNN
from learn.by_hand.data_parallel import average_gradients
from learn.by_hand.demonstration import largest_gap
from learn.by_hand.shapes import draw_shapes
from learn.cards.training_step import all_reduce_gradients
from training.distributed.group import join_ranks
from training.distributed.ranks import Ranks
from training.monitoring.profiler import communication

MODULE = "benchmarks.by_hand"
SCRIPT = "learn/by_hand/train_cifar10.py"
EPOCH = re.compile(
    r"epoch (?P<epoch>\d+)/\d+  loss (?P<loss>\S+)  test accuracy (?P<accuracy>\S+)%"
)
SILENT, BY_HAND, ONE_CALL = "no communication", "by hand", "by hand, in one call"
ONE_BUCKET, DDP = "DDP, one bucket", "DDP"
CLEAR = 0.8  # of the rounds
WARMUP_ROUNDS = 1
PROFILED_STEPS = 2  # of a variant in a round, right after its timed ones
EPOCH_STEPS = 8
ONE_BUCKET_MB = 1000  # more than any model here has
STEPS = "steps"  # their name in a profile
INTRODUCTION = f"""
Two processes train the same model on the same batches in five variants, which alternate. *no communication*: each rank
keeps its own gradients; the ranks do not train together, but no step can be faster. *by hand*: `average_gradients` of
`learn/by_hand/data_parallel.py`, one all-reduce per tensor, after the backward pass. *in one call*: the same, with all
gradients in one vector. *DDP, one bucket*: DDP that can send nothing before the last gradient is ready. *DDP*:
gradients go into buckets in the order in which they are ready. A bucket is sent once it has reached its size limit,
while the backward pass continues; the last one cannot overlap, because nothing is left to compute. *calls* says how
many buckets that makes.

Times are medians over rounds of the slower rank, with the smallest and the largest; *×* is the median of the ratios
within a round. *ms in calls*: the time in which a collective was running, as the profiler saw it, including the wait
for the other rank. *hidden*: the share of that time in which the rank was also computing. Both are medians over rounds
and ranks. They come from separate steps, run in each round right after the timed ones, and count from the moment when
both ranks were ready. The batches are small, so that communication between two processes on one machine is a visible
share of a step. The conclusions are computed too: a difference that holds in at least {CLEAR:.0%} of the rounds is
called a gain or a loss.
"""
Results = Sequence[dict[str, Any]]  # one per rank; by variant: seconds, profiles, gap


@dataclass(frozen=True)
class Case:
    """A model of images, ``rows`` images per rank and step, and DDP's ``bucket_cap_mb`` (None: its default)."""

    make: Callable[[], nn.Module]
    rows: int
    bucket_mb: float | None = None


def deep_network(width: int = 256, depth: int = 24) -> nn.Sequential:
    """Many layers of one size, whose gradients fill bucket after bucket."""
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()) for _ in range(depth)
    ]
    return nn.Sequential(
        nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * 8 * 8, width), *blocks, nn.Linear(width, 10)
    )


CASES = {
    "CNN(width=32)": Case(partial(CNN, width=32), rows=4),
    "CNN(width=256)": Case(partial(CNN, width=256), rows=4),
    # Its gradients, about 6 MB, would fit into one bucket of the default size: with a limit of 1
    # MiB there are several, and all but the last can overlap with the backward pass.
    "deep_network()": Case(deep_network, rows=64, bucket_mb=1),
}


def main() -> None:
    options = _parse()
    facts = harness.measurement_facts(MODULE, ["torch"]) | {
        "Runs": f"2 processes of one thread, on whichever core is free; {options.rounds} rounds, a variant takes "
        f"{options.steps} timed and {PROFILED_STEPS} profiled steps in each"
    }
    text = harness.introduction(
        MODULE, "Data parallelism by hand", INTRODUCTION
    ) + harness.fact_list(facts)
    for name in options.cases:
        # Not pinned: a rank's gloo threads would have to share its one core, and nothing could
        # overlap.
        results = run_ranks(
            variants_rank,
            Layout(2, 1),
            pin=False,
            case=name,
            rounds=options.rounds,
            steps=options.steps,
        )
        section = case_section(name, results)
        harness.report(section)
        text += f"\n{section}"
        harness.write_page(options.output, text)
    if options.cifar10:
        harness.write_page(options.output, f"{text}\n{cifar10_section(options.cifar10)}")


# The ranks' side.


class Variant:
    """A copy of the model, and one way to average its gradients: ``wrap`` the model, or ``average`` after backward."""

    def __init__(
        self,
        network: nn.Module,
        wrap: Callable[[nn.Module], nn.Module],
        average: Callable[[nn.Module], object],
    ) -> None:
        self.network = network
        # The optimizer and `average` keep the bare network. DDP trains its very parameters, so the
        # weights of all variants can be compared by name and without a prefix.
        self.model = wrap(network)
        self.average = average
        self.optimizer = SGD(network.parameters(), lr=0.01, momentum=0.9)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(images), labels).backward()
        self.average(self.network)
        self.optimizer.step()


def variants_of(case: Case) -> dict[str, Variant]:
    """Every variant, from the same weights."""

    def keep(network: nn.Module) -> nn.Module:
        return network

    torch.manual_seed(0)
    network = case.make()
    ddp, one_bucket = (
        partial(DistributedDataParallel, bucket_cap_mb=mb) for mb in (case.bucket_mb, ONE_BUCKET_MB)
    )
    functions = {
        SILENT: (keep, keep),
        BY_HAND: (keep, average_gradients),
        # What a bucket is, without DDP's overlap.
        ONE_CALL: (keep, partial(all_reduce_gradients, share=1 / dist.get_world_size())),
        ONE_BUCKET: (one_bucket, keep),
        DDP: (ddp, keep),
    }
    return {
        # Copied before it is wrapped: DDP registers hooks on the parameters of the network that it
        # gets, and a copy shared by two variants would communicate in both.
        name: Variant(copy.deepcopy(network), wrap, average)
        for name, (wrap, average) in functions.items()
    }


def variants_rank(case: str, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    with join_ranks("cpu") as ranks:
        torch.set_num_threads(1)
        return measure(ranks, CASES[case], rounds, steps)


def measure(ranks: Ranks, case: Case, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """All variants start from the same weights and take the same batches, alternately.

    Returns:
        For each variant: ``seconds`` per step and ``profiles`` of a step, one per round; and
        ``gap``, by which its weights at the end differ from DDP's.
    """
    variants, batches = variants_of(case), endless_batches(ranks, case.rows)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    profiles: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for number in range(WARMUP_ROUNDS + rounds):
        # Every variant gets the same batches, and separate ones for the profiler, which slows what
        # it sees.
        drawn, to_profile = (list(islice(batches, count)) for count in (steps, PROFILED_STEPS))
        for name in harness.in_turns(list(variants), number):
            ranks.barrier()
            began = time.perf_counter()
            for batch in drawn:
                variants[name].step(*batch)
            ranks.barrier()
            seconds[name].append((time.perf_counter() - began) / steps)
            profiles[name].append(profiled(variants[name], to_profile, ranks))
    # The first round warms up and counts nowhere: DDP fills its buckets in the order in which
    # gradients are ready only after it has seen a backward pass, and allocators and connections are
    # cold.
    reference = variants[DDP].network
    return {
        name: {
            "seconds": seconds[name][WARMUP_ROUNDS:],
            "profiles": profiles[name][WARMUP_ROUNDS:],
            "gap": largest_gap(variant.network.parameters(), reference.parameters()),
        }
        for name, variant in variants.items()
    }


def endless_batches(ranks: Ranks, rows: int) -> Iterator[Batch]:
    """This rank's shares of drawn shapes, again and again."""
    images = Split(*draw_shapes(EPOCH_STEPS * rows * ranks.world_size, seed=0))
    sampler = DistributedSampler(images, ranks.world_size, ranks.rank)
    return cycle(training_batches(images, sampler, rows, seed=0))


def profiled(variant: Variant, batches: list[Batch], ranks: Ranks) -> dict[str, float]:
    """Per step: calls to the other ranks, seconds in which one ran, and the share of these hidden behind computing."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        # One rank's profiler starts later than another's: the steps must not include that wait.
        ranks.barrier()
        with record_function(STEPS):
            for batch in batches:
                # These steps train too, with the same batches for every variant, so weights stay
                # comparable.
                variant.step(*batch)
    # Only events after the marker: the barrier above is a collective too. DDP and gloo run on
    # threads of their own, so their events are not children of the marker and can only be told
    # apart by time.
    span = next(event.time_range for event in seen.events() if event.name == STEPS)
    events = [event for event in seen.events() if event.time_range.start > span.start]
    found = communication(events, on_gpu=False)
    return {
        "calls": sum(event.name.startswith("gloo:") for event in events) / len(batches),
        "seconds": found["communication"] / len(batches),
        "hidden": found["hidden"] or 0.0,
    }


# The page.


def case_section(name: str, results: Results) -> str:
    """The table of one model, and what follows from it."""
    case = CASES[name]
    tensors = [parameter.numel() for parameter in case.make().parameters()]
    limits = (
        f"{case.bucket_mb} MiB"
        if case.bucket_mb
        else "1 MiB for the first bucket, 25 MiB for others"
    )
    return (
        f"## {len(tensors)} tensors, {4 * sum(tensors) / 1e6:.2f} MB of gradients\n\n"
        f"`{name}`, {case.rows} images per rank per step. DDP's limit: {limits}.\n\n"
        f"{step_table(results)}\n{conclusion(results)}"
    )


def slower(results: Results, name: str) -> list[float]:
    """The time of the slower rank in each round."""
    return [
        max(seconds) for seconds in zip(*(rank[name]["seconds"] for rank in results), strict=True)
    ]


def in_profiles(results: Results, name: str, field: str) -> float:
    """The median of a field of one variant's profiles, over rounds and ranks."""
    return median(found[field] for rank in results for found in rank[name]["profiles"])


def step_table(results: Results) -> str:
    """A line per variant: times of the slower rank, profiles of both, the largest difference on either."""

    def milliseconds(name: str) -> list[float]:
        return [1e3 * second for second in slower(results, name)]

    def times(reference: str) -> Callable[[str], str]:
        return lambda name: (
            f"{harness.median_ratio(milliseconds(name), milliseconds(reference)):.2f}"
        )

    columns: dict[str, Callable[[str], str]] = {
        "variant": str,
        "calls": lambda name: f"{in_profiles(results, name, 'calls'):.0f}",
        "ms": lambda name: f"{median(milliseconds(name)):.1f}",
        "range": lambda name: harness.spread(milliseconds(name)),
        "× no communication": times(SILENT),
        "× by hand": times(BY_HAND),
        "ms in calls": lambda name: f"{1e3 * in_profiles(results, name, 'seconds'):.1f}",
        "hidden": lambda name: (
            harness.NONE if name == SILENT else f"{in_profiles(results, name, 'hidden'):.0%}"
        ),
        "largest difference from DDP's weights": lambda name: (
            f"{max(rank[name]['gap'] for rank in results):.0e}"
        ),
    }
    return harness.table(columns, results[0])


def conclusion(results: Results) -> str:
    """What the rounds say about fewer calls and about overlap."""
    calls, buckets = (in_profiles(results, name, "calls") for name in (BY_HAND, DDP))
    one_call = compared(slower(results, ONE_CALL), slower(results, BY_HAND), f"{calls:.0f} calls")
    overlap = "none is possible, because DDP has only one bucket too."
    if buckets > 1:
        versus = compared(slower(results, DDP), slower(results, ONE_BUCKET), "one bucket")
        overlap = f"DDP's {buckets:.0f} buckets take {versus}."
    return f"- Fewer calls: by hand, one call takes {one_call}.\n- Overlap: {overlap}\n"


def compared(ours: Sequence[float], theirs: Sequence[float], what: str) -> str:
    """How long one variant takes compared with ``what``, how often it is the faster one, and whether that is clear."""
    faster = sum(a < b for a, b in zip(ours, theirs, strict=True))
    share = faster / len(ours)
    # A share of rounds and not a difference of medians: on a busy machine all rounds move together,
    # and the median of either series says more about the hour than about the variant.
    verdict = (
        "a gain" if share >= CLEAR else "a loss" if share <= 1 - CLEAR else "no clear gain or loss"
    )
    ratio = harness.median_ratio(ours, theirs)
    return (
        f"{ratio:.2f} times as long as {what} (faster in {faster} of {len(ours)} rounds: {verdict})"
    )


def cifar10_section(data: Path) -> str:
    """The table of what one and two ranks learn."""
    rows = []
    for ranks in (1, 2):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
            SCRIPT,
        ]
        # CPU time too: two ranks on two cores finish sooner, but it is what a cloud would charge.
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        last = run_and_follow([*command, "--data", str(data.resolve())])
        minutes = (time.monotonic() - began) / 60
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 60
        rows.append(
            [str(ranks), f"{last['accuracy']}%", last["loss"], f"{minutes:.1f}", f"{cpu:.1f}"]
        )
    shown = f"`torchrun --standalone --nproc_per_node=RANKS {SCRIPT} --data {data.name}`"
    header = ["ranks", "test accuracy", "loss", "wall time, min", "CPU time, min"]
    about = f"{shown}, {last['epoch']} epochs; each of the 10,000 test images counts once."
    return f"## CIFAR-10\n\n{about}\n\n{harness.markdown_table(header, rows)}"


def run_and_follow(command: Sequence[str]) -> dict[str, str]:
    """Run a training, show its lines as they come, and return the fields of the last epoch's line.

    Raises:
        TrainingFailure: it failed, or printed no epoch.
    """
    last = None
    with subprocess.Popen(command, cwd=harness.ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                last = EPOCH.match(line) or last
        # Ctrl-C and SIGTERM (which becomes an exit) must not leave torchrun and its ranks behind.
        except BaseException:
            process.terminate()
            raise
    if process.returncode or last is None:
        raise TrainingFailure(
            f"{SCRIPT} ended with code {process.returncode}", code="benchmark-failed"
        )
    return last.groupdict()


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__, page="by_hand.md", rounds=15)
    parser.add_argument(
        "--steps", type=positive, default=6, help="of a variant per round (default: 6)"
    )
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), help="models (default: all)"
    )
    parser.add_argument(
        "--cifar10", type=Path, help="CIFAR-10's files (default: its table is left out)"
    )
    options = parser.parse_args()
    if options.cifar10 and not options.cifar10.exists():
        raise UserError(
            f"--cifar10 {options.cifar10}: no such file or folder", code="data-not-found"
        )
    return options


if __name__ == "__main__":
    harness.run_benchmark(main)
