"""What does a second process bring a user: whole runs of the trainer on real rows, with the same
global batch?

On CPUs every process is pinned to its own cores, so that two processes on one core each are
compared with one process on one core and with one process on both. On GPUs every process has one. A
machine fills the table of what it has; the other table stays as it was.
"""

from __future__ import annotations

import csv
import io
import random
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from benchmarks import harness
from benchmarks.processes import Layout
from benchmarks.training_run import train
from common.errors import UserError, positive
from common.hardware import usable_cpus

MODULE = "benchmarks.one_or_two_processes"
SEED = 42
TITLES = {"cpu": "CPUs", "gpu": "GPUs"}
FILLED_BY = {
    "cpu": f"`python -m {MODULE}` is run",
    "gpu": "`make gpu-check` is run on a machine with GPUs",
}
ON_CPUS = {
    "one process, one core": Layout(1, 1),
    "two processes, one core each": Layout(2, 1),
    "one process, two cores": Layout(1, 2),
}
# The threads of a process that trains on a GPU only assemble its batches.
ON_GPUS = {"one process, one GPU": Layout(1, 2), "two processes, one GPU each": Layout(2, 2)}
INTRODUCTION = """
The rounds are in the JSON file next to this page. Each run is a complete run of the trainer under DDP on rows of AG
News, with the same global batch for any number of processes. The runs alternate within a round, in a different order
each round.

- *s per epoch*: the time for the steps of an epoch, without validation and saving; the median over epochs and rounds.
  *samples/s*: training rows divided by that time, with the slowest and the fastest round next to it. *×*: the median of
  the ratios within a round.
- *MB per process*: the most memory that a process held at any time, of its GPU or, on CPUs, of the machine. On CPUs it
  includes Python and its libraries, which two processes hold twice.
- *validation accuracy*: after each epoch, the median over rounds. All runs have the same seed, the same split and the
  same global batches, so they should learn alike; the difference between them is rounding.
"""
Run = dict[str, Any]
Rounds = list[dict[str, Run]]


def main() -> None:
    options = _parse()
    on_gpu = options.device == "gpu"
    runs = layouts_of_this_machine(options.device)
    model = options.model if options.model == "tiny" else Path(options.model).name
    facts = harness.measurement_facts(MODULE, (*harness.PACKAGES, "accelerate")) | {
        "Model": f"{model}, {options.precision}",
        "Data": f"{options.data.name}, {options.rows:,} rows for training and validation, {options.epochs} epochs, "
        f"global batch {options.global_batch}",
        "Processes": "one GPU each" if on_gpu else "pinned to their own cores",
    }
    with tempfile.TemporaryDirectory(prefix="processes-") as name:
        folder = Path(name)
        data = write_data(options.data, folder / "data", options.rows, options.test_rows)

        def measure(layout: Layout, number: int) -> Run:
            # Each run has its own folder, but all share the cache of tokens: only the first one
            # tokenises.
            # The global batch stays the same, or two processes would take half as many steps.
            ranks = train(
                layout,
                # On GPUs the processes are not pinned: their threads only assemble batches.
                pin=not on_gpu,
                dataset=data,
                model=options.model,
                epochs=options.epochs,
                batch_size=options.global_batch // layout.processes,
                precision=options.precision,
                seed=SEED,
                cache_dir=folder / "cache",
                device="cuda" if on_gpu else "cpu",
            )
            epochs = [record for record in ranks[0]["records"] if record["kind"] == "epoch"]
            return {
                "rows": ranks[0]["rows_per_epoch"],
                "seconds": [record["seconds"] for record in epochs],
                "accuracy": [record["validation"]["accuracy"] for record in epochs],
                "bytes": max(rank["device_bytes" if on_gpu else "host_bytes"] for rank in ranks),
            }

        section: dict[str, Any] = {"facts": facts, "rounds": []}
        for found in harness.run_rounds(
            runs, options.rounds, measure, lambda run: f"{rate(run):.1f} samples/s"
        ):
            section["rounds"].append(found)
            put(options.output, options.device, section)


def layouts_of_this_machine(device: str) -> dict[str, Layout]:
    """The runs that there are enough cores or GPUs for.

    Raises:
        UserError: there is no GPU, or only one core.
    """
    if device == "gpu":
        found = {
            name: layout
            for name, layout in ON_GPUS.items()
            if layout.processes <= torch.cuda.device_count()
        }
        if not found:
            raise UserError(
                "--device gpu: this machine has no GPU that PyTorch sees", code="gpu-not-found"
            )
        return found
    if usable_cpus() < 2:
        message = "--device cpu: two processes need two cores, and this process may use one"
        raise UserError(message, code="cores-too-few")
    return ON_CPUS


def write_data(source: Path, folder: Path, rows: int, test_rows: int) -> Path:
    """A folder in AG News' layout with this many rows of ``source``, drawn with a fixed seed.

    Raises:
        UserError: ``source`` has no such files.
    """
    folder.mkdir()
    for name, count in {"train.csv": rows, "test.csv": test_rows}.items():
        try:
            with (source / name).open(newline="", encoding="utf-8") as file:
                found = list(csv.reader(file))
        except OSError as error:
            message = f"--data {source}: {name} cannot be read ({error.strerror})"
            raise UserError(message, code="data-unreadable") from error
        # Rows and not lines are drawn: a quoted text may have several lines.
        # All layouts read this one folder, so they train on the same rows.
        chosen = random.Random(SEED).sample(found, min(count, len(found)))
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(chosen)
    return folder


def rate(run: Run) -> float:
    """Training rows per second, of the median epoch."""
    return run["rows"] / median(run["seconds"])


def put(path: Path, device: str, section: dict[str, Any]) -> None:
    """Replace the section of that kind of device, and write the page with its figure and its JSON."""
    results = harness.read_results(path.with_suffix(".json")) | {device: section}
    harness.write_page(path, render(results, path.with_suffix(".png").name), results, draw(results))


def render(results: Mapping[str, dict[str, Any]], figure: str) -> str:
    """The page; a table that was never measured says what fills it."""
    text = harness.introduction(MODULE, "One process or two", INTRODUCTION)
    text += f"![Samples per second of each run]({figure})\n" if results else ""
    for device, title in TITLES.items():
        text += f"\n## {title}\n\n"
        if device in results:
            text += _section(results[device]["facts"], results[device]["rounds"])
        else:
            # The headings stay, so that a reader sees what would be measured and how to do it.
            text += f"Empty until {FILLED_BY[device]}.\n\n{harness.table(_columns([]), [])}"
    return text


def _columns(rounds: Rounds) -> dict[str, Callable[[str], str]]:
    def rates(name: str) -> list[float]:
        return [rate(found[name]) for found in rounds]

    def seconds(name: str) -> list[float]:
        return [second for found in rounds for second in found[name]["seconds"]]

    def times_first(name: str) -> str:
        return f"{harness.median_ratio(rates(name), rates(next(iter(rounds[0])))):.2f}"

    return {
        "run": str,
        "s per epoch": lambda name: f"{median(seconds(name)):.1f}",
        "samples/s": lambda name: f"{median(rates(name)):.1f}",
        "range": lambda name: harness.spread(rates(name)),
        "× the first row": times_first,
        "MB per process": lambda name: (
            f"{max(found[name]['bytes'] for found in rounds) / 1e6:,.0f}"
        ),
    }


def _section(facts: dict[str, str], rounds: Rounds) -> str:
    names = list(rounds[0])
    epochs = range(len(rounds[0][names[0]]["accuracy"]))
    learnt = [
        [
            name,
            *(
                f"{median(found[name]['accuracy'][epoch] for found in rounds):.2%}"
                for epoch in epochs
            ),
        ]
        for name in names
    ]
    accuracies = harness.markdown_table(
        ["validation accuracy after", *(f"epoch {epoch + 1}" for epoch in epochs)], learnt
    )
    facts = facts | {"Rounds": str(len(rounds))}
    return f"{harness.fact_list(facts)}\n{harness.table(_columns(rounds), names)}\n{accuracies}"


def draw(results: Mapping[str, dict[str, Any]]) -> bytes:
    """PNG of a panel of bars for each kind of device, each bar with its slowest and fastest round."""
    kinds = [kind for kind in TITLES if kind in results]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.6 * len(kinds), 2.4), layout="constrained")
        for panel, kind in zip(
            figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True
        ):
            rounds = results[kind]["rounds"]
            names = list(rounds[0])[::-1]
            speeds = [[rate(found[name]) for found in rounds] for name in names]
            middle = [median(rates) for rates in speeds]
            # Error bars are lengths from the top of the bar and not positions.
            low = [mid - min(rates) for mid, rates in zip(middle, speeds, strict=True)]
            high = [max(rates) - mid for mid, rates in zip(middle, speeds, strict=True)]
            panel.barh(
                names, middle, xerr=[low, high], color="#0072b2", ecolor="#5a6570", capsize=3
            )
            panel.set(xlabel=f"samples per second, {TITLES[kind]}")
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=160)
    return file.getvalue()


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__, page="one_or_two_processes.md", rounds=5)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="a folder with AG News' train.csv and test.csv")
    add("--device", choices=TITLES, help="which table to fill (default: gpu if there is one)")
    add(
        "--model", default="tiny", help="a hub name, a folder, or tiny, made from scratch (default)"
    )
    add("--rows", type=positive, default=6000, help="for training and validation (default: 6000)")
    add("--test_rows", type=positive, default=400, help="for the test at the end (default: 400)")
    add("--epochs", type=positive, default=3, help="default: 3")
    add("--global_batch", type=positive, default=64, help="rows per step (default: 64)")
    add("--precision", choices=("bf16", "fp16", "fp32"), help="default: fp32 on CPUs, bf16 on GPUs")
    options = parser.parse_args()
    # An odd batch would give two processes one row less than one process has, and the comparison
    # says that all runs take the same global batches.
    if options.global_batch % 2:
        message = (
            f"--global_batch {options.global_batch}: must be even, because two processes share it"
        )
        raise UserError(message, code="uneven-split")
    options.device = options.device or ("gpu" if torch.cuda.is_available() else "cpu")
    options.precision = options.precision or ("bf16" if options.device == "gpu" else "fp32")
    if Path(options.model).exists():
        options.model = str(Path(options.model).resolve())
    return options


if __name__ == "__main__":
    harness.run_benchmark(main)
