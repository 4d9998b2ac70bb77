"""Does a run with a time budget end on time, and could other flags have made more of the same time?

The command line of a user is started as a process, and its whole time counts: start, training,
test, report. A variant that sets a flag keeps it; what it leaves out, the budget chooses.
"""

from __future__ import annotations

import re
import tempfile
from argparse import Namespace
from functools import cache
from pathlib import Path

from benchmarks import harness, studies
from benchmarks.studies import Figures, Flags, Row, Trial
from benchmarks.training_run import train_as_a_user
from training.config import TrainConfig

# What a budget chooses, and config.yaml says.
CHOSEN = ("max_length", "learning_rate", "layer_decay", "dropout", "freeze")
RUNS = (
    "starter ; 1m ; --learning_rate 2e-4 ; --learning_rate 9e-4 ; --max_length 128 ; --dropout 0.1",
    "starter ; 3m",
    "checkpoints/minilm ; 1m ; --freeze none",
    "checkpoints/minilm ; 3m",
)
INTRODUCTION = """
Each row runs `training/run_ddp.sh {processes} --dataset {name} --budget TIME` with its model and flags, one process per
core. *Time used* is the time of the whole command, from start to end, as a share of the budget. *Chosen* is what the
run decided because the flags leave it open. *Accuracy* is on all {tests:,} test rows, which training never saw.
*Expected* is the range that the run predicted before its first step. Rounds: {seeds}, with the variants in alternating
order and a different seed in each round. Tokens were already cached, as in every run on a dataset except the first.
"""


def variants(options: Namespace) -> dict[str, Flags]:
    found = {}
    for group in options.run:
        model, budget, *others = group.split(" ; ")
        for flags in ("", *others):
            found[f"{model} ; {budget} ; {flags}"] = (
                "--model",
                model,
                "--budget",
                budget,
                *flags.split(),
            )
    return found


@cache
def prepare_tokens(dataset: str, model: str) -> None:
    """Fill the cache of tokens, as it is on every run but the first of somebody's data."""
    # A budget that this run cannot use up, and one epoch of a few rows: only the tokens that it
    # leaves in the cache matter.
    flags = (
        "--dataset",
        dataset,
        "--model",
        model,
        "--budget",
        "10h",
        "--epochs",
        "1",
        "--max_train_rows",
        "64",
    )
    with tempfile.TemporaryDirectory(prefix="budget-") as folder:
        train_as_a_user((*flags, "--seed", "0"), Path(folder) / "model")


def measure(trial: Trial) -> Figures:
    """Run the command; returns what it used of its time, what it chose, what it expected and what came of it."""
    dataset, (_, model, _, budget, *_) = trial.options.dataset, trial.flags
    prepare_tokens(dataset, model)
    flags = ("--dataset", dataset, *trial.flags, "--seed", str(trial.seed))
    seconds, metrics, printed = train_as_a_user(flags, trial.output)
    config = (trial.run_dir / "config.yaml").read_text(encoding="utf-8")
    # What the run decided is read from its configuration, and not asked of the code that decides.
    settings = dict(re.findall(rf"^({'|'.join(CHOSEN)}): '?([^'\n]*)", config, re.M))
    expected = re.search(r"test accuracy ([\d.]+)% to ([\d.]+)%", printed)
    return {
        "seconds": seconds,
        "used": seconds / TrainConfig(budget=budget).budget_seconds,
        "accuracy": metrics["test"]["accuracy"],
        "tests": metrics["test"]["rows"],
        "epochs": metrics["best_epoch"],
        "expected": [float(part) / 100 for part in expected.groups()] if expected else None,
        **settings,
    }


def chosen(row: Row) -> str:
    found = {flag: row.values(flag)[-1] for flag in CHOSEN if flag not in row.name}
    parts = [
        f"{flag} {'as in the model' if value == 'null' else value}" for flag, value in found.items()
    ]
    return ", ".join([*parts, f"{row.values('epochs')[-1]:g} epochs"])


def expected(row: Row) -> str:
    ranges = row.values("expected")
    if ranges[0] is None:
        return harness.NONE
    held = [
        # Whether a prediction held is judged round by round; the table shows the last range.
        low <= accuracy <= high
        for (low, high), accuracy in zip(ranges, row.values("accuracy"), strict=True)
    ]
    low, high = ranges[-1]
    return f"{100 * low:.1f} to {100 * high:.1f}: {sum(held)} of {len(held)}"


STUDY = studies.Study(
    "budget",
    __doc__,
    "Training within a time budget",
    INTRODUCTION,
    variants=variants,
    measure=measure,
    flags={
        "dataset": studies.dataset(),
        "run": {
            "nargs": "+",
            "default": RUNS,
            "help": "a model, a budget, and the flags of variants beside the run without any, with ' ; ' between them",
        },
    },
    seeds=0,
    rounds=3,
    words=lambda run: {"tests": next(iter(run["rounds"][0].values()))["tests"]},
    columns={
        "model": lambda row: f"`{Path(row.name.split(' ; ')[0]).name}`",
        "budget": lambda row: row.name.split(" ; ")[1],
        "flags": lambda row: f"`{flags}`" if (flags := row.name.split(" ; ")[2]) else "none",
        "chosen": chosen,
        "time used, %": lambda row: harness.median_and_spread(row.percent("used")),
        "accuracy, %": lambda row: harness.median_and_spread(row.percent("accuracy"), 2),
        "expected, %, and how often it held": expected,
    },
)

if __name__ == "__main__":
    harness.run_benchmark(STUDY.main)
