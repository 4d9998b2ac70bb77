"""Measure how throughput and the memory of a rank change over processes and strategies, on this machine's CPU.

Every layout trains the same global batches from the same random weights; the layouts take turns within a round. Writes
a page with a table and a figure, and beside it the rounds as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.processes import Layout, end_with_children, run_ranks
from benchmarks.scaling_figure import draw
from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, spread, write_table
from benchmarks.workload import GLOBAL_BATCH, SIZES, make_workload
from common.errors import positive, run_command
from deployment.launchers import usable_cores
from training.config import TINY
from training.data.dataset import SAMPLE

MODULE = "benchmarks.scaling"
MICRO_BATCHES = 8  # of a pipeline
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {},
    "zero2": {},
    "zero3": {},
    "tp": {},
    "pp": {"gradient_accumulation": MICRO_BATCHES},
}
HEADER = ["strategy", "processes", "samples/s", "rounds", "× one process", "efficiency"]
HEADER += ["weights MB", "gradients MB", "optimizer MB", "together", "of ddp's"]
Rounds = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Measure what was asked for and write the page."""
    options = _parse()
    end_with_children()
    jobs = [(name, count) for count in options.processes for name in options.strategies if count > 1 or name == "ddp"]
    rounds: Rounds = {}
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        workload = make_workload(
            Path(folder), options.size, options.dataset, options.tokenizer, options.steps * GLOBAL_BATCH, say
        )
        facts = circumstances(MODULE) | {
            "Model": f"DistilBERT of {options.size} size, random weights, fp32, global batch {GLOBAL_BATCH}",
            "Data": f"{workload.dataset}, {options.steps} steps a round after three to warm up",
        }
        for number in range(1, options.rounds + 1):
            turn = number * len(jobs) // options.rounds % len(jobs)
            for name, count in jobs[turn:] + jobs[:turn]:
                result = measure(workload.folder, name, count, options.steps)
                rounds.setdefault(f"{name} {count}", []).append(result)
                rate = result["rows"] / result["seconds"]
                say(f"round {number}/{options.rounds}: {name} on {count}: {rate:.1f} samples/s")
            write(options.output, facts, rounds)
    say(f"wrote {options.output}")


def write(output: Path, facts: dict[str, str], rounds: Rounds) -> None:
    """The page, and beside it the rounds as JSON and the figure."""
    write_table(output, page(facts, rounds))
    write_table(output.with_suffix(".json"), json.dumps({"facts": facts, "rounds": rounds}, indent=1) + "\n")
    output.with_suffix(".png").write_bytes(draw(rates(rounds), memory(rounds), len(usable_cores())))


def measure(folder: Path, strategy: str, count: int, steps: int) -> dict[str, Any]:
    """One round of a layout: the slowest rank's time, the largest rank's bytes."""
    fields = {"strategy": strategy, **STRATEGIES[strategy]}
    layout = Layout(count, 1)
    results = run_ranks([str(folder), json.dumps(fields), str(steps)], layout, module="benchmarks.scaling_worker")
    return {name: max(result[name] for result in results) for name in results[0]}


def in_order(rounds: Rounds) -> list[tuple[str, int]]:
    """Strategies as they are listed, each by its number of processes."""
    jobs = [(job.split()[0], int(job.split()[1])) for job in rounds]
    return sorted(jobs, key=lambda job: (list(STRATEGIES).index(job[0]), job[1]))


def rates(rounds: Rounds) -> dict[str, dict[int, float]]:
    """Median samples/s by strategy and number of processes."""
    found: dict[str, dict[int, float]] = {}
    for name, count in in_order(rounds):
        results = rounds[f"{name} {count}"]
        found.setdefault(name, {})[count] = median(result["rows"] / result["seconds"] for result in results)
    return found


def memory(rounds: Rounds) -> dict[str, dict[int, dict[str, int]]]:
    """Bytes of a rank's weights, gradients and moments, by strategy and number of processes."""
    found: dict[str, dict[int, dict[str, int]]] = {}
    for name, count in in_order(rounds):
        first = rounds[f"{name} {count}"][0]
        found.setdefault(name, {})[count] = {kind: first[kind] for kind in ("parameters", "gradients", "optimizer")}
    return found


def page(facts: dict[str, str], rounds: Rounds) -> str:
    """The page in Markdown."""
    rate, held, cores = rates(rounds), memory(rounds), len(usable_cores())
    alone = rate["ddp"][1]
    whole = sum(held["ddp"][1].values())
    rows = []
    for name, count in in_order(rounds):
        measured = [result["rows"] / result["seconds"] for result in rounds[f"{name} {count}"]]
        times = rate[name][count] / alone
        efficiency = f"{times / count:.0%}" if count <= cores else "cores shared"
        mine = held[name][count]
        rows.append(
            [name, str(count), f"{rate[name][count]:.1f}", spread(measured), f"{times:.2f}", efficiency]
            + [f"{mine[kind] / 1e6:.1f}" for kind in ("parameters", "gradients", "optimizer")]
            + [f"{sum(mine.values()) / 1e6:.1f}", f"{sum(mine.values()) / whole:.0%}"]
        )
    return (
        "# Scaling over processes and strategies\n\n"
        f"{fact_list(facts | {'Rounds': str(min(map(len, rounds.values())))})}\n{markdown_table(HEADER, rows)}\n"
        "![Throughput and memory of a rank](scaling.png)\n\n"
        "A process has one core; the global batch is the same for all. Bytes are those of the fullest rank when its "
        "optimizer steps. Over more processes than cores only the bytes mean something.\n"
    )


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def _parse() -> Namespace:
    parser = Parser(MODULE, __doc__.splitlines()[0])
    parser.add_argument("--processes", nargs="+", type=positive, default=[1, 2, 4], help="default: 1 2 4")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), help="default: all")
    parser.add_argument("--size", choices=SIZES, default="minilm", help="default: minilm")
    parser.add_argument("--dataset", default=SAMPLE, help="sample (default) or a folder in AG News' layout")
    parser.add_argument("--tokenizer", default=TINY, help="a folder with tokenizer.json; default: trained on the data")
    parser.add_argument("--steps", type=positive, default=10, help="optimizer steps a round (default: 10)")
    parser.add_argument("--rounds", type=positive, default=3, help="default: 3")
    parser.add_argument("--output", type=Path, default=HERE / "scaling.md", help="default: benchmarks/scaling.md")
    options = parser.parse_args()
    # Both are what the others are compared with.
    options.processes = sorted({1, *options.processes})
    options.strategies = list(dict.fromkeys(["ddp", *options.strategies]))
    return options


if __name__ == "__main__":
    run_command(main)
