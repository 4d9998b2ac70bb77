"""What balancing is worth: one rank slowed on purpose, even shares against balanced ones, by turns."""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.processes import Layout, end_with_children, run_ranks
from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, spread, write_table
from common.errors import UserError, positive, run_command

MODULE = "benchmarks.balance"
KINDS = ("none", "auto")
# By then the ranks have agreed on shares, and looked at them once more.
FIRST_STEP = 21
HEADER = [
    "last rank's work",
    "even, ms a step",
    "balanced, ms a step",
    "× faster",
    "× expected",
    "its share of the rows",
]
INTRODUCTION = f"""# Balance

Written by `python -m {MODULE}`. The last rank computes each of its rows so many times, forward and backward, and trains
on the first: real work in proportion to its rows. Runs with `--balance none` and `--balance auto` take turns. A time is
the median over rounds of the mean step from step {FIRST_STEP} on, with the smallest and the largest; the same batches
in both. *expected*: what the arithmetic promises if a step were nothing but rows. Of N ranks, one k times slower, even
shares wait k/N for a batch that takes 1, shares by speed 1/(N - 1 + 1/k): the mean, not the slowest.

"""


@dataclass(frozen=True)
class Outcome:
    """One run: milliseconds a step, and the last rank's share of a global batch."""

    milliseconds: float
    share: float


def main() -> None:
    """Measure what was asked for, and write the page after each round."""
    options = _parse()
    end_with_children()
    outcomes: dict[tuple[int, str], list[Outcome]] = {(k, kind): [] for k in options.slowdowns for kind in KINDS}
    for number in range(options.rounds):
        for slowdown in options.slowdowns:
            for kind in KINDS[:: 1 if number % 2 == 0 else -1]:
                outcomes[slowdown, kind].append(outcome := measure(slowdown, kind, options))
                print(f"round {number + 1}, {slowdown}x, {kind}: {outcome.milliseconds:.1f} ms a step", flush=True)
        write_table(options.output, render(outcomes, options))
    print(f"Written: {options.output}")


def measure(slowdown: int, kind: str, options: Namespace) -> Outcome:
    """One run in a folder of its own."""
    names = ("dataset", "model", "epochs", "batch_size", "max_train_rows")
    flags = [part for name in names for part in (f"--{name}", str(getattr(options, name)))]
    with tempfile.TemporaryDirectory(prefix="balance-") as folder:
        own = ["--balance", kind, "--output_dir", f"{folder}/model", "--save_every", "0", "--log_every", "1"]
        [first, *_] = run_ranks([str(slowdown), *flags, *own], options.layout, module="benchmarks.training_rank")
    # An epoch's last batch may have fewer rows.
    steps = [
        record
        for record in first["records"]
        if record["kind"] == "step" and record["step"] >= FIRST_STEP and record["step"] % first["steps_per_epoch"]
    ]
    if not steps:
        raise UserError(
            f"--epochs {options.epochs}: not {FIRST_STEP} steps; raise it or lower --batch_size", code="flag-value"
        )
    seconds = sum(first["global_batch"] / record["samples_per_second"] for record in steps)
    share = first["speeds"][-1] if first["speeds"] else 1 / options.layout.processes
    return Outcome(1000 * seconds / len(steps), share)


def render(outcomes: dict[tuple[int, str], list[Outcome]], options: Namespace) -> str:
    """The page."""
    rounds = len(outcomes[options.slowdowns[0], "auto"])
    facts = circumstances(MODULE, ("torch", "transformers")) | {
        "Runs": f"{Path(options.model).name} on {Path(options.dataset).name}, {options.layout} processes × threads, "
        f"{options.batch_size} rows a rank, {options.epochs} epochs, {rounds} rounds"
    }
    rows = [
        row(slowdown, outcomes[slowdown, "none"], outcomes[slowdown, "auto"], options.layout.processes)
        for slowdown in options.slowdowns
    ]
    return INTRODUCTION + fact_list(facts) + "\n" + markdown_table(HEADER, rows)


def row(slowdown: int, even: Sequence[Outcome], balanced: Sequence[Outcome], ranks: int) -> list[str]:
    """A line of the table."""
    times = [[run.milliseconds for run in runs] for runs in (even, balanced)]
    faster = median(a / b for a, b in zip(*times, strict=True))
    expected = slowdown * (ranks - 1 + 1 / slowdown) / ranks
    shown = [f"{median(values):.1f} ({spread(values)})" for values in times]
    return [f"{slowdown} ×", *shown, f"{faster:.2f}", f"{expected:.2f}", f"{median(run.share for run in balanced):.0%}"]


def _parse() -> Namespace:
    parser = Parser(MODULE, __doc__)
    parser.add_argument("--dataset", default="sample", help="as for training")
    parser.add_argument("--model", default="tiny", help="as for training")
    parser.add_argument("--slowdowns", type=positive, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--epochs", type=positive, default=4)
    parser.add_argument("--batch_size", type=positive, default=32, help="rows a rank, on average")
    parser.add_argument("--max_train_rows", type=int, default=0, help="0 = all")
    parser.add_argument("--layout", type=Layout.parse, default="2x1", help="PROCESSESxTHREADS")
    parser.add_argument("--output", type=Path, default=HERE / "balance.md")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
