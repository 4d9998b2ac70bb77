"""How do throughput and the memory of a rank change with processes and strategies, on this
machine's CPU?

Every layout trains the same global batches from the same random weights; the layouts alternate
within a round. Writes a page with a table and a figure, and next to it the rounds as JSON.
"""

from __future__ import annotations

import io
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from transformers.utils import logging as transformers_logging

from benchmarks import harness
from benchmarks.processes import Layout, run_ranks
from benchmarks.workload import GLOBAL_BATCH, MAX_LENGTH, SEED, SIZES, make_workload, read_workload
from common.errors import positive
from common.hardware import usable_cpus
from training.config import TrainConfig
from training.data.batching import LengthBucketSampler, Padding, micro_batches_of_rank
from training.data.dataset import SAMPLE
from training.distributed.group import join_ranks
from training.facts import TINY
from training.model.classifier import NewsClassifier
from training.parallelism.blocks import length_multiple
from training.parallelism.registry import STRATEGIES
from training.parallelism.strategy import Strategy
from training.run.step import optimizer_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODULE = "benchmarks.scaling"
WARMUP_STEPS = 3
FLAGS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {},
    "zero2": {},
    "zero3": {},
    "tp": {},
    "pp": {"gradient_accumulation": 8},  # micro-batches of the pipeline
}
# Okabe and Ito's colours, which colour-blind eyes can tell apart too.
BLUE = "#0072b2"
STATES = {"parameters": BLUE, "gradients": "#e69f00", "optimizer": "#009e73"}
INTRODUCTION = """
Each process has one core, and the global batch is the same for all. Bytes are those of the rank that holds the most,
counted when its optimizer steps. With more processes than cores, only the bytes are meaningful. `ddp` and `zero1` join
their rows without padding, and `ddp` sends only the gradients of the word embeddings that a step reads. The others do
neither, which is a part of their distance.
"""
Job = tuple[str, int]  # strategy, processes
Rounds = dict[str, list[dict[str, Any]]]  # by "strategy processes"


def main() -> None:
    options = _parse()
    pairs = [
        (name, count)
        for count in options.processes
        for name in options.strategies
        # With one process there is nothing to shard: it is measured once, under the name of ddp.
        if count > 1 or name == "ddp"
    ]
    rounds: Rounds = {}
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        num_rows = options.steps * GLOBAL_BATCH
        workload = make_workload(
            Path(folder), options.size, options.dataset, options.tokenizer, num_rows
        )
        facts = harness.measurement_facts(MODULE) | {
            "Model": f"DistilBERT of {options.size} size, random weights, fp32, global batch {GLOBAL_BATCH}",
            "Data": f"{workload.dataset}, {options.steps} steps per round after {WARMUP_STEPS} to warm up",
        }

        def measure(job: Job, number: int) -> dict[str, Any]:
            fields = {"strategy": job[0], **FLAGS[job[0]]}
            ranks = run_ranks(
                step_rank, Layout(job[1], 1), folder=folder, fields=fields, steps=options.steps
            )
            # The slowest rank's time, the largest rank's bytes.
            return {name: max(rank[name] for rank in ranks) for name in ranks[0]}

        jobs = {f"{name} {count}": (name, count) for name, count in pairs}
        for found in harness.run_rounds(
            jobs,
            options.rounds,
            measure,
            lambda one: f"{one['rows'] / one['seconds']:.1f} samples/s",
        ):
            for name, result in found.items():
                rounds.setdefault(name, []).append(result)
            text = page(facts, rounds, options.output.with_suffix(".png").name)
            harness.write_page(
                options.output, text, {"facts": facts, "rounds": rounds}, draw(rounds)
            )


def step_rank(folder: str, fields: dict[str, Any], steps: int) -> dict[str, Any]:
    """Time ``steps`` optimizer steps after a few that warm up, and count the bytes of state on this rank."""
    transformers_logging.set_verbosity_error()
    config = TrainConfig(seed=SEED, device="cpu", max_length=MAX_LENGTH, **fields)
    workload = read_workload(Path(folder))
    with join_ranks(config.device) as ranks:
        model = NewsClassifier(
            len(workload.label_names), str(workload.model_folder), workload.label_names
        )
        strategy = STRATEGIES[config.strategy](model, config, ranks, "fp32")
        # Bytes are counted when the optimizer steps: only then are gradients and moments all there,
        # and sharded strategies have freed the full weights of their blocks.
        held: dict[str, int] = {}
        strategy.optimizer.register_step_pre_hook(lambda *_: held.update(bytes_of_state(strategy)))
        sampler = LengthBucketSampler(workload.timed.lengths, GLOBAL_BATCH, SEED)
        padding = Padding(length_multiple(config, "cpu"), MAX_LENGTH)
        began = 0.0
        # With the same sampler and seed every layout trains the same global batches; a rank takes
        # its share of each.
        for step, batch in enumerate(islice(cycle(sampler), WARMUP_STEPS + steps), start=1):
            if step == WARMUP_STEPS + 1:
                ranks.barrier()
                began = time.perf_counter()
            share = micro_batches_of_rank(
                workload.timed,
                batch,
                strategy.data_shard,
                config.gradient_accumulation,
                padding=padding,
            )
            optimizer_step(strategy, share, step, learning_rate=2e-5)
        ranks.barrier()
        return {"seconds": time.perf_counter() - began, "rows": steps * GLOBAL_BATCH, **held}


def bytes_of_state(strategy: Strategy) -> dict[str, int]:
    """Bytes of this rank's weights, gradients and moments, as they are when the optimizer steps."""
    parameters = list(strategy.parameters.values())
    optimizer = strategy.local_optimizer
    moments = [
        state[name]
        for state in optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
        if name in state
    ]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(gradients),
        "optimizer": _bytes(moments),
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def rates(rounds: Rounds, job: Job) -> list[float]:
    """Samples per second in each round."""
    return [result["rows"] / result["seconds"] for result in rounds[f"{job[0]} {job[1]}"]]


def jobs_in_order(rounds: Rounds) -> list[Job]:
    """The measured jobs by strategy, as they are listed above, then by number of processes."""
    jobs = [(name, int(count)) for name, count in map(str.split, rounds)]
    return sorted(jobs, key=lambda job: (list(FLAGS).index(job[0]), job[1]))


def page(facts: dict[str, str], rounds: Rounds, figure: str, cores: int | None = None) -> str:
    """The page; ``cores``: of the machine, this one's by default."""
    cores = cores or usable_cpus()

    def held(job: Job) -> dict[str, int]:
        # Bytes are counted and not timed; every round has the same.
        first = rounds[f"{job[0]} {job[1]}"][0]
        return {state: first[state] for state in STATES}

    def speed_up(job: Job) -> float:
        return median(rates(rounds, job)) / median(rates(rounds, ("ddp", 1)))

    columns: dict[str, Callable[[Job], str]] = {
        "strategy": lambda job: job[0],
        "processes": lambda job: str(job[1]),
        "samples/s": lambda job: f"{median(rates(rounds, job)):.1f}",
        "range": lambda job: harness.spread(rates(rounds, job)),
        "× one process": lambda job: f"{speed_up(job):.2f}",
        "efficiency": lambda job: (
            # Processes that share a core cannot be expected to be faster: an efficiency would only
            # describe the machine.
            f"{speed_up(job) / job[1]:.0%}" if job[1] <= cores else "cores shared"
        ),
        "weights, MB": lambda job: f"{held(job)['parameters'] / 1e6:.1f}",
        "gradients, MB": lambda job: f"{held(job)['gradients'] / 1e6:.1f}",
        "optimizer, MB": lambda job: f"{held(job)['optimizer'] / 1e6:.1f}",
        "total, MB": lambda job: f"{sum(held(job).values()) / 1e6:.1f}",
        "share of ddp's": lambda job: (
            f"{sum(held(job).values()) / sum(held(('ddp', 1)).values()):.0%}"
        ),
    }
    facts = facts | {"Rounds": str(min(map(len, rounds.values())))}
    text = harness.introduction(MODULE, "Scaling over processes and strategies", INTRODUCTION)
    body = harness.table(columns, jobs_in_order(rounds))
    return (
        f"{text}{harness.fact_list(facts)}\n{body}\n![Throughput, and memory per rank]({figure})\n"
    )


def draw(rounds: Rounds) -> bytes:
    """PNG of two panels: throughput for as many processes as there are cores, and the bytes of a rank."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 7), layout="constrained")
        top, bottom = figure.subplots(2, 1)
        _draw_rates(top, rounds)
        _draw_memory(bottom, rounds)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=160)
    return file.getvalue()


def _draw_rates(axes: Axes, rounds: Rounds) -> None:
    """Samples per second of each strategy if every process has its own core, with a mark at what
    perfect scaling would give.
    """
    one = median(rates(rounds, ("ddp", 1)))
    # Processes that share a core are left out: nobody could say how fast they should be.
    jobs = [(name, count) for name, count in jobs_in_order(rounds) if count <= usable_cpus()]
    labels = [f"{name}\n{count}" for name, count in jobs]
    speeds = [median(rates(rounds, job)) for job in jobs]
    axes.bar(labels, speeds, color=BLUE)
    ideal = [one * count for _, count in jobs]
    axes.plot(labels, ideal, "_", color="black", markersize=30, label="perfect scaling")
    axes.set(xlabel="strategy and processes, a core each", ylabel="samples/s", ylim=(0, None))
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.98))


def _draw_memory(axes: Axes, rounds: Rounds) -> None:
    """The bytes that a rank holds, one state on top of the other."""
    jobs = jobs_in_order(rounds)
    labels = [f"{name}\n{count}" for name, count in jobs]
    bottom = [0.0] * len(jobs)
    for state, colour in STATES.items():
        heights = [rounds[f"{name} {count}"][0][state] / 1e6 for name, count in jobs]
        axes.bar(labels, heights, bottom=bottom, color=colour, label=state)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set(ylabel="MB per rank", xlabel="strategy and processes")
    axes.legend(frameon=False)


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__, page="scaling.md", rounds=3)
    add = parser.add_argument
    add("--processes", nargs="+", type=positive, default=[1, 2, 4], help="default: 1 2 4")
    add("--strategies", nargs="+", choices=FLAGS, default=list(FLAGS), help="default: all")
    add("--size", choices=SIZES, default="minilm", help="default: minilm")
    add("--dataset", default=SAMPLE, help="sample (default) or a folder in AG News' layout")
    add(
        "--tokenizer",
        default=TINY,
        help="a folder with tokenizer.json; default: trained on the data",
    )
    add("--steps", type=positive, default=10, help="optimizer steps per round (default: 10)")
    options = parser.parse_args()
    # DDP and one process are what the others are compared with.
    options.processes = sorted({1, *options.processes})
    options.strategies = list(dict.fromkeys(["ddp", *options.strategies]))
    return options


if __name__ == "__main__":
    harness.run_benchmark(main)
