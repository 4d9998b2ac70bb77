"""How many wrong labels does a run find by itself, what does that cost, and what does it gain to
train without them?

A share of the training rows gets another label, drawn at random. Only these planted errors count as
errors, although the data has wrong labels of its own, so the precision on the page is a lower
bound.
"""

from __future__ import annotations

import csv
import json
import math
import tempfile
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from queue import Queue
from statistics import mean
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.processes import Layout, on_cores, run_ranks
from benchmarks.training_run import write_rows
from common.errors import positive
from common.hardware import usable_cpus
from deployment.launchers import usable_cores
from training.config import parse_config
from training.data.dataset import TextData, load_data
from training.distributed.group import join_ranks
from training.run.suspects import ask_words
from training.run.trainer import Trainer

MODULE = "benchmarks.label_errors"
RATES = (0.05, 0.2)
RECALL = 0.8
VALIDATION_ROWS = 200
NOT_PLANTED = 10  # rows that are shown
ACTIONS = ("list", "drop", "reweight")
INTRODUCTION = """
Wrong labels are planted at random in a share of the {rows} training rows; the {tests} test rows are left as they are.
Epochs: {epochs}, learning rate {learning_rate}, texts cut at {max_length} tokens; each run has its own seed. Only
planted errors count as errors: rows that were labelled wrongly to begin with count against the precision. *at 80%
recall*: the precision of the ranking in `suspects.csv` down to the row at which four of five planted errors are found,
with the lowest and the highest of the runs. *steps only*: the same if the ranking uses only the training steps and not
the words of the rows. *flagged*: the rows that a run calls wrong. *time*: the share of the run's time that finding them
took.
"""
OWN_ERRORS = """
These are the first rows in the ranking of seed {seed}, with {rate:.0%} planted, that were not planted and so count as
mistakes here:
"""


def main() -> None:
    options = _parse()
    data = load_data(options.dataset)
    run: dict[str, Any] = {
        "facts": harness.measurement_facts(MODULE),
        **{
            name: getattr(options, name)
            for name in ("rows", "tests", "epochs", "seeds", "learning_rate", "max_length")
        },
        "found": {str(rate): [] for rate in RATES},
        "accuracy": {action: [] for action in ACTIONS},
    }
    cores = free_cores()
    with (
        tempfile.TemporaryDirectory(prefix="label-errors-") as name,
        ThreadPoolExecutor(cores.qsize()) as pool,
    ):
        folder, planted, runs = Path(name), {}, {}
        for seed, rate in product(range(options.seeds), RATES):
            # All data is written before the first run begins, because three actions share each
            # folder.
            planted[rate, seed] = plant(data, options, rate, seed, folder / f"{rate}_{seed}")
        for action, rate, seed in trials(options.seeds):
            rows = folder / f"{rate}_{seed}"
            future = pool.submit(train, options, rows, seed, action, cores)
            runs[future] = (action, rate, seed)
        for future in as_completed(runs):
            (test, told), (action, rate, seed) = future.result(), runs[future]
            if action == "list":
                # Only runs that list: the others act on what they suspect, which changes the
                # ranking.
                suspects = folder / f"{rate}_{seed}_list.run" / "suspects.csv"
                figures = {"seed": seed} | found(suspects, told, planted[rate, seed])
                run["found"][str(rate)].append(figures)
                harness.report(f"{rate:.0%}: {figures}")
            if rate == max(RATES):
                run["accuracy"][action].append(test["accuracy"])
                harness.report(f"seed {seed}, {action}: accuracy {test['accuracy']:.4f}")
            harness.write_page(options.output, render(run), run)


def free_cores() -> Queue[list[int]]:
    """Several runs train at a time, each in one process on one core, so that none waits for another."""
    cores: Queue[list[int]] = Queue()
    # Where the system does not number its cores, one run after the other takes them all.
    for core in [[core] for core in usable_cores()[: usable_cpus()]] or [[]]:
        cores.put(core)
    return cores


def trials(seeds: int) -> list[tuple[str, float, int]]:
    """Every action, share of wrong labels and seed that is trained."""
    everything = product(ACTIONS, RATES, range(seeds))
    # What is done with the suspects is only compared where most labels are wrong.
    return [case for case in everything if case[0] == "list" or case[1] == max(RATES)]


def plant(data: TextData, options: Namespace, rate: float, seed: int, folder: Path) -> set[int]:
    """Write chosen rows where training reads them; returns the numbers of the rows with a planted error."""
    generator = np.random.default_rng(seed)
    drawn = generator.permutation(len(data.train.labels))
    splits = {
        "train": data.train.take(np.sort(drawn[: options.rows])),
        "validation": data.train.take(drawn[options.rows :][:VALIDATION_ROWS]),
        "test": data.test.take(
            np.sort(generator.permutation(len(data.test.labels))[: options.tests])
        ),
    }
    labels = splits["train"].labels
    planted = generator.permutation(len(labels))[: round(rate * len(labels))]
    # A shift by at least one and less than all labels is never the label itself.
    shift = generator.integers(1, len(data.label_names), len(planted))
    labels[planted] = (labels[planted] + shift) % len(data.label_names)
    write_rows(folder, data.label_names, **splits)
    return set(planted.tolist())


def train(
    options: Namespace, rows: Path, seed: int, action: str, cores: Queue[list[int]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The test of a run on the next free core, and what it told; its model is next to its rows."""
    output = rows.with_name(f"{rows.name}_{action}")
    flags = [
        *f"--epochs {options.epochs} --learning_rate {options.learning_rate}".split(),
        *f"--batch_size 32 --max_length {options.max_length} --seed {seed} --clean news".split(),
        *f"--suspects {action} --resume none --save_every 0".split(),
        *("--dataset", str(rows), "--model", str(options.model)),
        *("--output_dir", str(output), "--cache_dir", str(rows / "cache")),
    ]
    core = cores.get()
    try:
        with on_cores(core):
            [told] = run_ranks(train_rank, Layout(1, 1), flags=flags)
    finally:
        cores.put(core)
    return json.loads((output / "metrics.json").read_text(encoding="utf-8"))["test"], told


def train_rank(flags: list[str]) -> dict[str, Any]:
    """A run in this process; returns the share of its time that finding suspects took, and the rows
    in the order of their doubt if only the steps are asked.
    """
    config = parse_config(flags)
    seconds = 0.0

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            nonlocal seconds
            began = time.perf_counter()
            try:
                return work(*arguments)
            finally:
                seconds += time.perf_counter() - began

        return wrapped

    # The trainer has no hook around its suspects, so a clock is put around the methods that it
    # calls for them; only one process trains here, so nothing waits inside.
    with join_ranks(config.device) as ranks:
        trainer = Trainer(config, ranks)
        for owner, names in (
            (
                trainer.context.suspects,
                ("add", "merge", "end_epoch", "is_left", "weights", "ranking"),
            ),
            (trainer.context.strategy.task, ("label_logprobs",)),
        ):
            for name in names:
                setattr(owner, name, timed(getattr(owner, name)))
        trainer.fit()
        suspects, tokens = trainer.context.suspects, trainer.context.data.tokens
        began = time.perf_counter()
        ask_words(tokens.train, suspects.index, len(tokens.label_names))
        seconds += time.perf_counter() - began
        share = seconds / trainer.context.state.seconds
        # With the words' doubts at zero, the same ranking shows what the steps find by themselves.
        suspects.words = np.zeros_like(suspects.words)
        return {"share": share, "by_steps": [one.row for one in suspects.ranking()]}


def found(suspects: Path, told: dict[str, Any], planted: set[int]) -> dict[str, Any]:
    """How well the rows of ``suspects.csv`` are the planted ones, and the first that are not.

    Args:
        told: what the run itself told (:func:`train_rank`).
    """
    with suspects.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    ranking = [int(row["row"]) in planted for row in rows]
    others = [row for row in rows if int(row["row"]) not in planted]
    flagged = [int(row["row"]) in planted for row in rows if row["flagged"] == "yes"]
    return {
        "precision_at_recall": precision_at_recall(ranking, planted),
        "flagged": len(flagged),
        "flagged_precision": mean(flagged) if flagged else 0.0,
        "flagged_recall": sum(flagged) / len(planted),
        "not_planted": [
            {name: row[name] for name in ("label", "proposed", "text")}
            for row in others[:NOT_PLANTED]
        ],
        "steps_alone": precision_at_recall([row in planted for row in told["by_steps"]], planted),
        "time": told["share"],
    }


def precision_at_recall(ranking: Sequence[bool], planted: Collection[int]) -> float:
    """The precision of a ranking, the most suspicious first, down to where enough of the planted errors are found."""
    hits = np.cumsum(ranking)
    # `hits` rises along the ranking: the first place with enough hits is how many rows a person
    # would have to read.
    number = int(np.searchsorted(hits, math.ceil(RECALL * len(planted)))) + 1
    return float(hits[number - 1] / number) if number <= len(hits) else 0.0


def render(run: dict[str, Any]) -> str:
    """The page of a run."""

    def percent(name: str, digits: int = 1) -> Callable[[str], str]:
        def cell(rate: str) -> str:
            values = [100 * one[name] for one in run["found"][rate]]
            return f"{mean(values):.{digits}f}" if values else "-"

        return cell

    def spread(values: Sequence[float]) -> str:
        low, middle, high = (f"{100 * figure(values or [0]):.1f}" for figure in (min, mean, max))
        return f"{middle} ({low} to {high})" if values else "-"

    text = INTRODUCTION.format(
        **{name: f"{run[name]:,}" for name in ("rows", "tests", "epochs", "max_length")},
        learning_rate=run["learning_rate"],
    )
    errors = harness.table(
        {
            "planted": lambda rate: f"{float(rate):.0%}",
            "runs": lambda rate: str(len(run["found"][rate])),
            "precision at 80% recall, %": lambda rate: spread(
                [one["precision_at_recall"] for one in run["found"][rate]]
            ),
            "steps only, %": percent("steps_alone"),
            "flagged: precision, %": percent("flagged_precision"),
            "flagged: recall, %": percent("flagged_recall"),
            "time, %": percent("time", 2),
        },
        run["found"],
    )
    gains = harness.table(
        {
            "with 20% planted": lambda action: f"`--suspects {action}`",
            "runs": lambda action: str(len(run["accuracy"][action])),
            "test accuracy, %": lambda action: spread(run["accuracy"][action]),
        },
        ACTIONS,
    )
    introduction = harness.introduction(MODULE, "Label errors", text)
    return f"{introduction}{errors}\n{_own_errors(run)}{gains}\n{harness.fact_list(run['facts'])}"


def _own_errors(run: dict[str, Any]) -> str:
    rate = str(min(RATES))
    if not run["found"][rate]:
        return ""
    one = min(run["found"][rate], key=lambda one: one["seed"])
    rows = harness.table(
        {
            "label": lambda row: row["label"],
            "proposed": lambda row: row["proposed"],
            "text": lambda row: textwrap.shorten(
                row["text"].replace("|", " "), 90, placeholder=" ..."
            ),
        },
        one["not_planted"],
    )
    return f"{OWN_ERRORS.strip().format(seed=one['seed'], rate=float(rate))}\n\n{rows}\n"


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="label_errors.md", seeds=2)
    add = parser.add_argument
    add(
        "--dataset",
        default=str(harness.ROOT / "data" / "ag_news"),
        help="data with one label per row",
    )
    add("--model", type=Path, required=True, help="the encoder to fine-tune")
    add("--rows", type=positive, default=4000, help="training rows")
    add("--tests", type=positive, default=1000, help="test rows")
    add("--epochs", type=positive, default=3, help="as for training")
    add("--learning_rate", type=float, default=1e-4, help="as for training")
    add("--max_length", type=positive, default=40, help="as for training")
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
