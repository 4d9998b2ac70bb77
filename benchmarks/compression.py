"""What compressed gradients save on the wire, and what they do to the loss: whole runs, over several seeds."""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.processes import Layout, end_with_children, run_ranks
from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, write_table
from common.errors import positive, run_command

MODULE = "benchmarks.compression"
PLAIN = "none"
HEADER = [
    "`--compress`",
    "MB a step and rank",
    "× fewer",
    "training loss, last epoch",
    "test loss",
    "test accuracy",
    "points against none",
]
INTRODUCTION = f"""# Gradient compression

Written by `python -m {MODULE}`. Every seed trains a whole run with each kind of compression; the test is that of the
best epoch. *MB a step and rank*: what a rank gives to the all-reduces of a step, counted as it is sent, once PowerSGD's
first plain steps are over; a ring carries twice that, less a rank's part, whatever the kind. *points against none*: the
mean over seeds of the difference within a seed. Behind ± stands the standard deviation over seeds.

"""


@dataclass(frozen=True)
class Outcome:
    """One run: bytes a step and rank, and how well it learnt."""

    sent: int
    plain: int
    train_loss: float
    test_loss: float
    accuracy: float


def main() -> None:
    """Train all that was asked for, and write the page after each seed."""
    options = _parse()
    end_with_children()
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in options.kinds}
    for seed in range(1, options.seeds + 1):
        for kind in options.kinds:
            outcomes[kind].append(outcome := train(kind, seed, options))
            print(f"seed {seed}/{options.seeds}, {kind}: {outcome.accuracy:.2%}, {outcome.sent:,} bytes", flush=True)
        write_table(options.output, render(outcomes, options))
    print(f"Written: {options.output}")


def train(kind: str, seed: int, options: Namespace) -> Outcome:
    """One whole run in a folder of its own."""
    names = ("dataset", "model", "epochs", "batch_size", "max_train_rows")
    flags = [part for name in names for part in (f"--{name}", str(getattr(options, name)))]
    flags += ["--learning_rate", options.learning_rate] if options.learning_rate else []
    with tempfile.TemporaryDirectory(prefix="compression-") as folder:
        own = ["--compress", kind, "--seed", str(seed), "--output_dir", f"{folder}/model", "--save_every", "0"]
        results = run_ranks(["1", *flags, *own], options.layout, module="benchmarks.training_rank")
    records = results[0]["records"]
    [test] = [record for record in records if record["kind"] == "test"]
    train_loss = [record["train_loss"] for record in records if record["kind"] == "epoch"][-1]
    return Outcome(results[0]["sent"], results[0]["plain"], train_loss, test["loss"], test["accuracy"])


def render(outcomes: dict[str, list[Outcome]], options: Namespace) -> str:
    """The page."""
    seeds = min(len(runs) for runs in outcomes.values())
    facts = circumstances(MODULE, ("torch", "transformers")) | {
        "Runs": f"{Path(options.model).name} on {Path(options.dataset).name}, {options.epochs} epochs, "
        f"{options.layout.processes} ranks × {options.batch_size} rows, {seeds} seeds"
    }
    return (
        INTRODUCTION
        + fact_list(facts)
        + "\n"
        + markdown_table(HEADER, [row(kind, runs, outcomes[PLAIN]) for kind, runs in outcomes.items()])
    )


def row(kind: str, runs: Sequence[Outcome], plain: Sequence[Outcome]) -> list[str]:
    """A line of the table."""
    points = [100 * (run.accuracy - other.accuracy) for run, other in zip(runs, plain, strict=True)]
    return [
        kind,
        f"{runs[0].sent / 1e6:.3g}",
        f"{runs[0].plain / runs[0].sent:.1f}",
        _spread([run.train_loss for run in runs], 4),
        _spread([run.test_loss for run in runs], 4),
        _spread([100 * run.accuracy for run in runs], 2) + "%",
        "–" if kind == PLAIN else f"{mean(points):+.2f}",
    ]


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def _parse() -> Namespace:
    parser = Parser(MODULE, __doc__)
    parser.add_argument("--dataset", default="sample", help="as for training")
    parser.add_argument("--model", default="tiny", help="as for training")
    parser.add_argument("--kinds", nargs="+", default=["fp16", "bf16", "powersgd:4"], help="beside none")
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--epochs", type=positive, default=8)
    parser.add_argument("--batch_size", type=positive, default=16, help="rows a rank")
    parser.add_argument("--max_train_rows", type=int, default=0, help="0 = all")
    parser.add_argument("--learning_rate", help="as for training")
    parser.add_argument("--layout", type=Layout.parse, default="2x1", help="PROCESSESxTHREADS")
    parser.add_argument("--output", type=Path, default=HERE / "compression.md")
    options = parser.parse_args()
    options.kinds = list(dict.fromkeys([PLAIN, *options.kinds]))
    return options


if __name__ == "__main__":
    run_command(main)
