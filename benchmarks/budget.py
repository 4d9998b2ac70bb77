"""Does a run with a time budget end on time, and could other flags have made more of the same time?

The command line of a user is started as a process, and its whole time counts: start, training, test, report. A variant
that sets a flag keeps it; what it leaves out, the budget chooses.
"""

from __future__ import annotations

import re
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.training_run import train_as_a_user
from common.hardware import usable_cpus
from training.config import TrainConfig
from training.data.dataset import load_news

MODULE = "benchmarks.budget"
# What a budget chooses, and config.yaml says.
CHOSEN = ("max_length", "learning_rate", "layer_decay", "dropout", "freeze")
INTRODUCTION = """
Each row runs `training/run_ddp.sh {processes} --dataset {name} --budget TIME` with its model and flags, one process per
core. *Time used* is the time of the whole command, from start to end, as a share of the budget. *Chosen* is what the
run decided because the flags leave it open. *Accuracy* is on all {tests:,} test rows, which training never saw.
*Expected* is the range that the run predicted before its first step. Rounds: {rounds}, with the variants in alternating
order and a different seed in each round. Tokens were already cached, as in every run on a dataset except the first.
"""


def main() -> None:
    options = _parse()
    cases = {}
    for group in options.run:
        model, budget, *variants = group.split(" ; ")
        for flags in ("", *variants):
            cases[f"{model} ; {budget} ; {flags}"] = ("--model", model, "--budget", budget, *flags.split())
    run: dict[str, Any] = {"facts": harness.measurement_facts(MODULE), "name": Path(options.dataset).name, "rounds": []}
    data = load_news(options.dataset)
    run["facts"]["Data"] = harness.rows_of(run["name"], len(data.train), len(data.test))
    with tempfile.TemporaryDirectory(prefix="budget-") as name:
        # Tokens are prepared beforehand, as on every run but the first of somebody's data.
        for model in {flags[1] for flags in cases.values()}:
            measure(("--model", model, "--budget", "10h", "--epochs", "1", "--max_train_rows", "64"), 0, options, name)

        def one(flags: Sequence[str], seed: int) -> dict[str, Any]:
            return measure(flags, seed, options, name)

        for found in harness.run_rounds(
            cases, options.rounds, one, lambda it: f"{it['used']:.3f} {it['accuracy']:.4f}"
        ):
            run["rounds"].append(found)
            harness.write_page(options.output, render(run), run)


def measure(flags: Sequence[str], seed: int, options: Namespace, folder: str) -> dict[str, Any]:
    """Run the command; returns what it used of its time, what it chose, what it expected and what came of it."""
    with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as place:
        output = Path(place) / "model"
        flags = ("--dataset", options.dataset, *flags, "--seed", str(seed))
        seconds, metrics, printed = train_as_a_user(flags, output)
        config = (output.with_name("model.run") / "config.yaml").read_text(encoding="utf-8")
        settings = dict(re.findall(rf"^({'|'.join(CHOSEN)}): '?([^'\n]*)", config, re.M))
        expected = re.search(r"test accuracy ([\d.]+)% to ([\d.]+)%", printed)
        budget = flags[flags.index("--budget") + 1]
        allowed = TrainConfig(budget=budget).budget_seconds
        return {
            "seconds": seconds,
            "used": seconds / allowed,
            "accuracy": metrics["test"]["accuracy"],
            "tests": metrics["test"]["rows"],
            "epochs": metrics["best_epoch"],
            "expected": [float(part) / 100 for part in expected.groups()] if expected else None,
            **settings,
        }


def render(run: dict[str, Any]) -> str:
    """The page of a run."""
    cases = list(run["rounds"][0])

    def values(case: str, key: str) -> list[Any]:
        return [found[case][key] for found in run["rounds"]]

    def chosen(case: str) -> str:
        open_ = [flag for flag in CHOSEN if flag not in case]
        found = {flag: values(case, flag)[-1] for flag in open_}
        parts = [f"{flag} {'as in the model' if value == 'null' else value}" for flag, value in found.items()]
        return ", ".join([*parts, f"{values(case, 'epochs')[-1]:g} epochs"])

    def expected(case: str) -> str:
        if values(case, "expected")[0] is None:
            return harness.NONE
        pairs = zip(values(case, "expected"), values(case, "accuracy"), strict=True)
        held = sum(low <= accuracy <= high for (low, high), accuracy in pairs)
        low, high = values(case, "expected")[-1]
        return f"{100 * low:.1f} to {100 * high:.1f}: {held} of {len(run['rounds'])}"

    columns = {
        "model": lambda case: f"`{Path(case.split(' ; ')[0]).name}`",
        "budget": lambda case: case.split(" ; ")[1],
        "flags": lambda case: f"`{flags}`" if (flags := case.split(" ; ")[2]) else "none",
        "chosen": chosen,
        "time used, %": lambda case: harness.median_and_spread([100 * used for used in values(case, "used")]),
        "accuracy, %": lambda case: harness.median_and_spread([100 * one for one in values(case, "accuracy")], 2),
        "expected, %, and how often it held": expected,
    }
    text = INTRODUCTION.format(
        name=run["name"], processes=usable_cpus(), tests=values(cases[0], "tests")[0], rounds=len(run["rounds"])
    )
    page = harness.introduction(MODULE, "Training within a time budget", text)
    return f"{page}{harness.table(columns, cases)}\n{harness.fact_list(run['facts'])}"


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="budget.md", rounds=3)
    parser.add_argument("--dataset", default=str(harness.ROOT / "data" / "ag_news"), help="as for training")
    parser.add_argument(
        "--run",
        nargs="+",
        default=[
            "starter ; 1m ; --learning_rate 2e-4 ; --learning_rate 9e-4 ; --max_length 128 ; --dropout 0.1",
            "starter ; 3m",
            "checkpoints/minilm ; 1m ; --freeze none",
            "checkpoints/minilm ; 3m",
        ],
        help="a model, a budget, and the flags of variants beside the run without any, with ' ; ' between them",
    )
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
