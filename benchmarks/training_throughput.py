"""Measure training throughput against the usual recipes on this machine's CPU.

Every variant trains the same rows from the same random weights, one epoch a round, in processes of its own; the
variants take turns within a round. Writes a page of tables, and beside it the rounds as JSON, from which the page
is made anew after every round: other sizes and datasets measured before stay on it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.processes import Layout, end_with_children, run_ranks
from benchmarks.startup import COMMAND, measure_startup
from benchmarks.tables import (
    HERE,
    Parser,
    circumstances,
    fact_list,
    markdown_table,
    ratio,
    read_results,
    spread,
    write_table,
)
from benchmarks.variants import VARIANTS
from benchmarks.worker import MATMUL
from benchmarks.workload import GLOBAL_BATCH, MAX_LENGTH, SIZES, Workload, make_workload
from common.errors import UserError, positive, run_command
from training.config import TINY
from training.data.dataset import SAMPLE
from training.model.precision import cpu_has_bf16

MODULE = "benchmarks.training_throughput"
STARTUP = "start-up"
TITLES = {"minilm": "MiniLM", "base": "Base"}
SCALED = {"1x1": "2x1"}  # on the first layout only our own variants run, to compare the second with
DEFAULT_VARIANTS = ["plain", "trainer", "trainer-grouped", "ours", "ours-bf16"]
HEADER = [
    "variant",
    "processes × threads",
    "samples/s",
    "rounds",
    "× plain",
    "× Trainer",
    "× Trainer, length grouping",
    "padding",
    "GFLOP/s, nominal",
    "GFLOP/s, done",
    "loss",
]


def main() -> None:
    """Measure what was asked for and write the page."""
    options = _parse()
    end_with_children()
    page = Page(options.output)
    if options.startup:
        seconds = measure_startup(options.rounds, say)
        page.put(STARTUP, {"facts": circumstances(MODULE), "seconds": seconds})
        return
    layouts = {text: Layout.parse(text) for text in options.layouts}
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        workload = make_workload(Path(folder), options.size, options.dataset, options.tokenizer, options.rows, say)
        jobs = plan(options.variants, layouts)
        section = new_section(workload, options)
        for number in range(1, options.rounds + 1):
            measure_round(workload, jobs, layouts, section["rounds"], f"round {number}/{options.rounds}")
            page.put(f"{options.size}, {workload.dataset}", section)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def plan(variants: Sequence[str], layouts: Sequence[str]) -> list[tuple[str, str]]:
    """What runs in a round, as (variant, layout), and which matrix rates are measured with it."""
    jobs = []
    for layout in layouts:
        only_ours = layout in SCALED and SCALED[layout] in layouts
        chosen = [name for name in variants if VARIANTS[name].is_ours or not only_ours]
        precisions = dict.fromkeys(VARIANTS[name].precision for name in chosen)
        jobs += [(f"{MATMUL}{precision}", layout) for precision in precisions]
        jobs += [(name, layout) for name in chosen]
    return jobs


def measure_round(
    workload: Workload,
    jobs: Sequence[tuple[str, str]],
    layouts: dict[str, Layout],
    rounds: list[dict[str, Any]],
    title: str,
) -> None:
    """Run every job once, each round in another order; adds the round to ``rounds``."""
    turn = len(rounds) * max(1, len(jobs) // 3) % len(jobs)
    measured: dict[str, Any] = {}
    for number, (variant, layout) in enumerate([*jobs[turn:], *jobs[:turn]], start=1):
        results = run_ranks([str(workload.folder), variant], layouts[layout])
        measured[f"{variant} {layout}"] = result = join_ranks(results, workload)
        is_epoch = "samples_per_second" in result
        figure = f"{result['samples_per_second']:.1f} samples/s" if is_epoch else f"{result['flops'] / 1e9:.0f} GFLOP/s"
        say(f"{title}, {number}/{len(jobs)}: {variant} {layout}: {figure}")
    rounds.append(measured)


def join_ranks(results: Sequence[dict[str, Any]], workload: Workload) -> dict[str, Any]:
    """One measurement out of its ranks': the slowest rank's time, the sum of their work."""
    if "flops" in results[0]:
        return {"flops": sum(result["flops"] for result in results)}
    seconds = max(result["seconds"] for result in results)
    return {
        "seconds": seconds,
        "samples_per_second": len(workload.timed) / seconds,
        "cells": sum(result["cells"] for result in results),
        "squares": sum(result["squares"] for result in results),
        "loss": sum(result["loss"] for result in results) / len(results),
        "threads": results[0]["threads"],
    }


def new_section(workload: Workload, options: Namespace) -> dict[str, Any]:
    """What a page needs to know of a workload, with no rounds yet."""
    return {
        "facts": circumstances(MODULE),
        "size": workload.size,
        "dataset": workload.dataset,
        "rows": len(workload.timed),
        "tokens": int(workload.timed.lengths.sum()),
        "nominal_work": workload.nominal_work,
        "layouts": options.layouts,
        "variants": options.variants,
        "rounds": [],
    }


class Page:
    """The page and the measurements it is made of."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results_path = path.with_suffix(".json")
        self.results = read_results(self.results_path)

    def put(self, name: str, section: dict[str, Any]) -> None:
        """Put a section in the place of the one of that name, and write the page."""
        self.results[name] = section
        write_table(self.results_path, json.dumps(self.results, indent=1) + "\n")
        text = INTRODUCTION + "".join(render(self.results[key]) for key in sorted(self.results, key=_order))
        write_table(self.path, text)
        say(f"Written: {self.path}")


def _order(name: str) -> tuple[bool, str]:
    return name == STARTUP, name


INTRODUCTION = f"""# Training throughput

Written by `python -m {MODULE}`; the rounds behind it are in the JSON file beside it. Every variant trains the same
rows from the same random weights of the same DistilBERT (dropout 0.1) with a global batch of {GLOBAL_BATCH}, fp32
unless it says bf16, fused AdamW, a peak learning rate of 2e-5 and gradients clipped to a norm of 1. Texts are
tokenised before the clock starts and cut at {MAX_LENGTH} tokens. A round times one whole epoch of every variant, from
before its first batch is put together to the end of its last step, after a few steps on other rows with a
throw-away copy of the model; nothing is evaluated, logged to files or saved. Each process has cores of its own.

- *samples/s*: the median of the rounds, with the smallest and the largest beside it. *×*: the median of the ratios
  within a round, against the variant of the same processes × threads.
- *padding*: the share of the tokens computed that are padding.
- *GFLOP/s, nominal*: matrix products of the blocks, forward and backward, that the real tokens stand for, every block
  in full, although ours computes the last block for the first token alone. *GFLOP/s, done*: those really carried out,
  with padding, and without what ours leaves out. In brackets the share of this machine's matrix rate in that
  precision: the best `torch.mm` of 2048 × 2048 matrices, in all processes at once, measured in the same run.
  A nominal share above the other's is work saved, not speed of the machine. Embeddings, head, normalisation, dropout
  and the optimizer count as no work, but take time.
- `transformers.Trainer` stands at its defaults but for what is named here; its progress bar and log are off, and
  `average_tokens_across_devices=False`: with it, a classifier's gradients come out multiplied by the number of ranks.
- *loss*: the mean over the epoch, to see that all of them train alike.
"""


def render(section: dict[str, Any]) -> str:
    """A section of the page."""
    if "seconds" in section:
        return _render_startup(section)
    rounds = section["rounds"]
    rows = []
    for layout in section["layouts"]:
        names = [name for name in section["variants"] if f"{name} {layout}" in rounds[0]]
        rows += [_row(section, name, layout) for name in names]
    title = f"\n## {TITLES[section['size']]} size, {section['dataset']}\n\n"
    blocks = SIZES[section["size"]]
    facts = section["facts"] | {
        "Model": f"DistilBERT, {blocks.n_layers} blocks of {blocks.dim} ({blocks.hidden_dim}), {blocks.n_heads} heads",
        "Rows": f"{section['rows']:,} of {section['tokens'] / section['rows']:.1f} tokens each in the mean",
        "Rounds": str(len(rounds)),
    }
    return f"{title}{fact_list(facts)}\n{markdown_table(HEADER, rows)}{_matrix_rates(section)}{_scaling(section)}"


def _row(section: dict[str, Any], name: str, layout: str) -> list[str]:
    rounds, variant = section["rounds"], VARIANTS[name]
    mine = [one[f"{name} {layout}"] for one in rounds]

    def rates(other: str) -> list[float]:
        key = f"{other} {layout}"
        return [one[key]["samples_per_second"] for one in rounds if key in one]

    seconds = median(one["seconds"] for one in mine)
    done = median(one["cells"] for one in mine)
    work = SIZES[section["size"]].training_work(
        int(done), int(median(one["squares"] for one in mine)), section["rows"] if variant.is_ours else 0
    )
    peak = _peak(section, variant.precision, layout)
    return [
        variant.title,
        str(Layout(*map(int, layout.split("x")))),
        f"{median(rates(name)):.1f}",
        spread(rates(name)),
        ratio(rates(name), rates("plain")),
        ratio(rates(name), rates("trainer")),
        ratio(rates(name), rates("trainer-grouped")),
        f"{1 - section['tokens'] / done:.1%}",
        f"{section['nominal_work'] / seconds / 1e9:.0f} ({section['nominal_work'] / seconds / peak:.0%})",
        f"{work / seconds / 1e9:.0f} ({work / seconds / peak:.0%})",
        f"{median(one['loss'] for one in mine):.3f}",
    ]


def _peak(section: dict[str, Any], precision: str, layout: str) -> float:
    return max(one[f"{MATMUL}{precision} {layout}"]["flops"] for one in section["rounds"])


def _matrix_rates(section: dict[str, Any]) -> str:
    keys = [key for key in section["rounds"][0] if key.startswith(MATMUL)]
    rates = []
    for key in sorted(keys):
        precision, layout = key.removeprefix(MATMUL).split()
        rates.append(f"{precision} {layout.replace('x', ' × ')}: {_peak(section, precision, layout) / 1e9:.0f}")
    return f"\nMatrix rates of this machine, GFLOP/s: {'; '.join(rates)}.\n"


def _scaling(section: dict[str, Any]) -> str:
    lines = []
    for one_core, two_cores in SCALED.items():
        for name in section["variants"]:
            keys = f"{name} {one_core}", f"{name} {two_cores}"
            if not all(key in section["rounds"][0] for key in keys):
                continue
            one, two = ([r[key]["samples_per_second"] for r in section["rounds"]] for key in keys)
            shares = [100 * b / (2 * a) for a, b in zip(one, two, strict=True)]
            title = VARIANTS[name].title.replace("*", "")
            lines.append(
                f"\nScaling of {title}: two pinned cores with a process each train at {median(shares):.0f}% of twice "
                f"the speed of one pinned core (rounds: {spread(shares, 0)}%).\n"
            )
    return "".join(lines)


def _render_startup(section: dict[str, Any]) -> str:
    seconds = section["seconds"]
    row = [f"`{COMMAND}`", f"{median(seconds):.1f}", spread(seconds), str(len(seconds))]
    table = markdown_table(["command", "seconds to the first optimizer step", "rounds", "number"], [row])
    note = "Wall time from starting the launcher to the first step's line in `metrics.jsonl`, tokens cached before.\n"
    return f"\n## Start-up\n\n{fact_list(section['facts'])}\n{note}\n{table}"


def _parse() -> Namespace:
    parser = Parser(MODULE, str(__doc__).split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="minilm", help="of the model (default: minilm)")
    parser.add_argument("--dataset", default=SAMPLE, help="a folder in AG News' layout (default: the built-in sample)")
    parser.add_argument("--rows", type=positive, default=1600, help="of the timed epoch (default: 1600)")
    parser.add_argument("--rounds", type=positive, default=5, help="default: 5")
    parser.add_argument(
        "--tokenizer", default=TINY, help="a folder or tokenizer.json (default: tiny, one trained on the rows)"
    )
    parser.add_argument(
        "--layouts", nargs="+", default=["2x1", "1x2", "1x1"], metavar="PxT", help="default: 2x1 1x2 1x1"
    )
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, help="default: all but trainer-rebalanced; bf16 where the CPU has it"
    )
    parser.add_argument("--startup", action="store_true", help="measure the time to the first step, and nothing else")
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE / "training_throughput.md",
        help="the page (default: benchmarks/training_throughput.md)",
    )
    options = parser.parse_args()
    if options.output.suffix != ".md":
        raise UserError(f"--output {options.output}: must end in .md", code="flag-value")
    default = [name for name in DEFAULT_VARIANTS if VARIANTS[name].precision != "bf16" or cpu_has_bf16()]
    options.variants = options.variants or default
    return options


if __name__ == "__main__":
    run_command(main)
