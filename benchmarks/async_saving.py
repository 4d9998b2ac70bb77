"""How long a checkpoint stops training: one that is waited for against one that a thread writes, by turns."""

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
from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, spread, write_table
from common.errors import positive, run_command

MODULE = "benchmarks.async_saving"
HEADER = [
    "processes × threads",
    "MB",
    "waited for, s",
    "blocked, s",
    "blocked : waited for",
    "until it is complete, s",
    "ms per step",
    "while it is written, ms",
    "steps meanwhile",
    "costs in all, s",
]
INTRODUCTION = f"""# Saving beside training

Written by `python -m {MODULE}`. DistilBERT with random weights and AdamW's moments, under ddp: each of N ranks copies
and writes 1/N. *waited for*: training stops until the checkpoint is complete, its files synced, hashed and renamed.
*blocked*: the same save by a thread; training stops only for the copy. *until it is complete*: how long the thread
takes beside training, with the cores that training leaves it. *costs in all*: the time that training loses to the save
by a thread, which is *blocked* plus what the *steps meanwhile* take longer, because the thread computes hashes on the
cores that train. A GPU's training does not use those cores, so it should lose little more than *blocked*; that was not
measured. The two kinds of save take turns; medians over rounds of the slowest rank, with the smallest and the largest.

"""


def main() -> None:
    """Measure every layout and write the page."""
    options = _parse()
    end_with_children()
    results = {}
    for layout in options.layouts:
        results[layout] = measure(layout, options)
        write_table(options.output, render(results, options))
        print(row(layout, results[layout]), flush=True)
    print(f"Written: {options.output}")


def measure(layout: Layout, options: Namespace) -> list[dict[str, Any]]:
    """What each rank measured."""
    names = ("rounds", "quiet_steps", "rows", "tokens")
    fields = json.dumps({name: getattr(options, name) for name in names})
    with tempfile.TemporaryDirectory(prefix="saving-", dir=options.place) as folder:
        return run_ranks([folder, fields], layout, module="benchmarks.saving_worker")


def render(results: dict[Layout, list[dict[str, Any]]], options: Namespace) -> str:
    """The page."""
    facts = circumstances(MODULE, ("torch", "transformers")) | {
        "Runs": f"{options.rounds} rounds, {options.rows} rows of {options.tokens} tokens per rank and step"
    }
    return INTRODUCTION + fact_list(facts) + "\n" + markdown_table(HEADER, [row(*item) for item in results.items()])


def row(layout: Layout, ranks: list[dict[str, Any]]) -> list[str]:
    """A line of the table."""
    waited, blocked, seconds = (slowest(ranks, name) for name in ("blocking", "blocked", "seconds"))
    share = median(b / w for b, w in zip(blocked, waited, strict=True))
    quiet, disturbed = ranks[0]["quiet"], ranks[0]["disturbed"]
    return [
        str(layout),
        f"{ranks[0]['bytes'] / 1e6:.0f}",
        f"{median(waited):.2f} ({spread(waited, 2)})",
        f"{median(blocked):.2f} ({spread(blocked, 2)})",
        f"{share:.0%}",
        f"{median(seconds):.2f} ({spread(seconds, 2)})",
        f"{1000 * median(quiet):.0f}",
        f"{1000 * median(disturbed):.0f}" if disturbed else "–",
        f"{len(disturbed) / len(seconds):.1f}",
        f"{cost(ranks):.2f}",
    ]


def cost(ranks: list[dict[str, Any]]) -> float:
    """Seconds of training that a save by a thread takes: the copy, and by how much it slows the steps beside it."""
    blocked, quiet, disturbed = slowest(ranks, "blocked"), ranks[0]["quiet"], ranks[0]["disturbed"]
    slowed = median(disturbed) - median(quiet) if disturbed else 0.0
    return median(blocked) + len(disturbed) / len(blocked) * slowed


def slowest(ranks: list[dict[str, Any]], name: str) -> list[float]:
    """Of each round, the time of the rank for which all wait."""
    return [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)]


def _parse() -> Namespace:
    parser = Parser(MODULE, __doc__)
    parser.add_argument("--layouts", type=Layout.parse, nargs="+", default=[Layout.parse("1x2"), Layout.parse("2x1")])
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--quiet_steps", type=positive, default=3, help="steps before each save")
    parser.add_argument("--rows", type=positive, default=8, help="a rank and step")
    parser.add_argument("--tokens", type=positive, default=64, help="a row")
    parser.add_argument("--place", type=Path, default=None, help="a folder of the disk to save to; unset = temporary")
    parser.add_argument("--output", type=Path, default=HERE / "async_saving.md")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
