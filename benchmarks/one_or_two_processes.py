"""Train on one process and on two, as a user would: whole runs of the trainer on real rows, with the same global batch.

On CPUs every process is pinned to cores of its own, so that two processes on one core each stand beside one process on
one core and beside one process on both. On GPUs every process has one. A machine fills the table of what it has; the
other table stays as it was.
"""

from __future__ import annotations

import csv
import io
import json
import random
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from benchmarks.processes import Layout, end_with_children, run_ranks
from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, ratio, read_results, write_table
from common.errors import UserError, positive, run_command
from common.files import write_whole
from common.hardware import usable_cpus

MODULE = "benchmarks.one_or_two_processes"
SEED = 42
TITLES = {"cpu": "CPUs", "gpu": "GPUs"}
FILLED_BY = {"cpu": f"`python -m {MODULE}`", "gpu": "`make gpu-check`, on a machine with GPUs,"}
ON_CPUS = {
    "one process, one core": Layout(1, 1),
    "two processes, one core each": Layout(2, 1),
    "one process, two cores": Layout(1, 2),
}
# The threads of a process that trains on a GPU put its batches together.
ON_GPUS = {"one process, one GPU": Layout(1, 2), "two processes, one GPU each": Layout(2, 2)}
HEADER = [
    "run",
    "s per epoch",
    "samples/s",
    "rounds",
    "× the first row",
    "MB per process",
]
INTRODUCTION = f"""# One process or two

Written by `python -m {MODULE}`; the rounds behind it are in the JSON file beside it. Whole runs of the trainer under
DDP on rows of AG News, with the same global batch whatever the number of processes. The runs take turns within a round,
in another order each round.

- *s per epoch*: the steps of an epoch, without validation and saving; the median over epochs and rounds. *samples/s*:
  training rows over that time, with the slowest and the fastest round beside it. *×*: the median of the ratios within
  a round.
- *MB per process*: the most that a process held at any time, of a GPU's memory or else of the machine's. On CPUs
  Python and its libraries are in it, and so are they twice with two processes.
- *validation accuracy*: after each epoch, the median over rounds. All runs have the same seed, the same split and the
  same global batches, so they should learn alike; what rounding changes is the difference between them.
"""


def main() -> None:
    """Measure what this machine has, and write the page after each round."""
    options = _parse()
    end_with_children()
    kind = options.device
    runs = runs_of_this_machine(kind)
    with tempfile.TemporaryDirectory(prefix="processes-") as name:
        folder = Path(name)
        data = write_data(options.data, folder / "data", options.rows, options.test_rows)
        section = {"facts": _facts(options, kind), "rounds": []}
        for number in range(1, options.rounds + 1):
            section["rounds"].append(measure_round(runs, data, folder, options, number))
            put(options.output, kind, section)
    print(f"Written: {options.output}")


def runs_of_this_machine(kind: str) -> dict[str, Layout]:
    """What can be compared here: as many of the runs as there are cores or GPUs for.

    Raises:
        UserError: there is no GPU, or only one core.
    """
    if kind == "gpu":
        found = {name: layout for name, layout in ON_GPUS.items() if layout.processes <= torch.cuda.device_count()}
        if not found:
            raise UserError("--device gpu: this machine has no GPU that PyTorch sees", code="gpu-not-found")
        return found
    if usable_cpus() < 2:
        raise UserError(
            "--device cpu: two processes need two cores, and this process may use one", code="cores-too-few"
        )
    return ON_CPUS


def write_data(source: Path, folder: Path, rows: int, test_rows: int) -> Path:
    """A folder in AG News' layout with so many rows of ``source``, drawn with a fixed seed.

    Raises:
        UserError: ``source`` has no such files.
    """
    folder.mkdir()
    for name, count in {"train.csv": rows, "test.csv": test_rows}.items():
        try:
            with (source / name).open(newline="", encoding="utf-8") as file:
                found = list(csv.reader(file))
        except OSError as error:
            raise UserError(
                f"--data {source}: {name} cannot be read ({error.strerror})", code="data-unreadable"
            ) from error
        chosen = random.Random(SEED).sample(found, min(count, len(found)))
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(chosen)
    return folder


def measure_round(
    runs: Mapping[str, Layout], data: Path, folder: Path, options: Namespace, number: int
) -> dict[str, dict[str, Any]]:
    """Every run once, each round in another order."""
    names = list(runs)
    turn = (number - 1) % len(names)
    measured = {}
    for name in [*names[turn:], *names[:turn]]:
        measured[name] = run = train(runs[name], data, folder, options)
        accuracies = ", ".join(f"{accuracy:.1%}" for accuracy in run["accuracy"])
        rate = f"{run['rows'] / median(run['seconds']):.1f} samples/s"
        print(f"round {number}/{options.rounds}, {name}: {rate}; {accuracies}", flush=True)
    return {name: measured[name] for name in names}


def train(layout: Layout, data: Path, folder: Path, options: Namespace) -> dict[str, Any]:
    """One whole run: seconds and validation accuracy of each epoch, and the memory of the process with the most."""
    on_gpu = options.device == "gpu"
    with tempfile.TemporaryDirectory(dir=folder) as output:
        flags = {
            "dataset": data,
            "model": options.model,
            "epochs": options.epochs,
            "batch_size": options.global_batch // layout.processes,
            "precision": options.precision,
            "seed": SEED,
            "save_every": 0,
            "cache_dir": folder / "cache",
            "output_dir": Path(output) / "model",
            "device": "cuda" if on_gpu else "cpu",
        }
        pairs = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        results = run_ranks(["1", *pairs], layout, pin=not on_gpu, module="benchmarks.training_rank")
    epochs = [record for record in results[0]["records"] if record["kind"] == "epoch"]
    memory = "device_bytes" if on_gpu else "host_bytes"
    return {
        "rows": results[0]["rows_per_epoch"],
        "seconds": [record["seconds"] for record in epochs],
        "accuracy": [record["validation"]["accuracy"] for record in epochs],
        "bytes": max(result[memory] for result in results),
    }


def put(page: Path, kind: str, section: dict[str, Any]) -> None:
    """Put a section in the place of the one of its kind, and write the page, its figure and its JSON."""
    results = read_results(page.with_suffix(".json")) | {kind: section}
    write_table(page.with_suffix(".json"), json.dumps(results, indent=1) + "\n")
    write_whole(page.with_suffix(".png"), draw(results))
    write_table(page, render(results, page.with_suffix(".png").name))


def render(results: Mapping[str, dict[str, Any]], figure: str) -> str:
    """The page; a table that was never measured says what fills it."""
    text = INTRODUCTION + (f"\n![Samples per second of each run]({figure})\n" if results else "")
    for kind, title in TITLES.items():
        text += f"\n## {title}\n\n"
        if kind in results:
            text += _section(results[kind])
        else:
            text += f"Empty until {FILLED_BY[kind]} has filled it.\n\n{markdown_table(HEADER, [])}"
    return text


def _section(section: dict[str, Any]) -> str:
    rounds = section["rounds"]
    names = list(rounds[0])
    facts = section["facts"] | {"Rounds": str(len(rounds))}
    speeds = {name: [run["rows"] / median(run["seconds"]) for run in _runs(rounds, name)] for name in names}
    rows = [
        [
            name,
            f"{median(seconds for run in _runs(rounds, name) for seconds in run['seconds']):.1f}",
            f"{median(speeds[name]):.1f}",
            f"{min(speeds[name]):.1f} to {max(speeds[name]):.1f}",
            ratio(speeds[name], speeds[names[0]]),
            f"{max(run['bytes'] for run in _runs(rounds, name)) / 1e6:,.0f}",
        ]
        for name in names
    ]
    epochs = range(len(rounds[0][names[0]]["accuracy"]))
    learnt = [
        [name, *(f"{median(run['accuracy'][epoch] for run in _runs(rounds, name)):.2%}" for epoch in epochs)]
        for name in names
    ]
    header = ["validation accuracy after", *(f"epoch {epoch + 1}" for epoch in epochs)]
    return f"{fact_list(facts)}\n{markdown_table(HEADER, rows)}\n{markdown_table(header, learnt)}"


def _runs(rounds: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    return [one[name] for one in rounds]


def draw(results: Mapping[str, dict[str, Any]]) -> bytes:
    """PNG of a panel of bars for each kind that was measured, each bar with its slowest and fastest round."""
    kinds = [kind for kind in TITLES if kind in results]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.6 * len(kinds), 2.4), layout="constrained")
        for panel, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
            rounds = results[kind]["rounds"]
            names = list(rounds[0])[::-1]
            speeds = [[run["rows"] / median(run["seconds"]) for run in _runs(rounds, name)] for name in names]
            middle = [median(rates) for rates in speeds]
            low = [mid - min(rates) for mid, rates in zip(middle, speeds, strict=True)]
            high = [max(rates) - mid for mid, rates in zip(middle, speeds, strict=True)]
            panel.barh(names, middle, xerr=[low, high], color="#0072b2", ecolor="#5a6570", capsize=3)
            panel.set(xlabel=f"samples per second, {TITLES[kind]}")
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=160)
    return file.getvalue()


def _facts(options: Namespace, kind: str) -> dict[str, str]:
    model = options.model if options.model == "tiny" else Path(options.model).name
    return circumstances(MODULE) | {
        "Model": f"{model}, {options.precision}",
        "Data": f"{options.data.name}, {options.rows:,} rows for training and validation, {options.epochs} epochs, "
        f"global batch {options.global_batch}",
        "Processes": "pinned to cores of their own" if kind == "cpu" else "one GPU each",
    }


def _parse() -> Namespace:
    parser = Parser(MODULE, str(__doc__).split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder with AG News' train.csv and test.csv")
    parser.add_argument("--device", choices=TITLES, help="which table to fill (default: gpu if there is one)")
    parser.add_argument("--model", default="tiny", help="a hub name, a folder, or tiny, made from scratch (default)")
    parser.add_argument("--rows", type=positive, default=6000, help="for training and validation (default: 6000)")
    parser.add_argument("--test_rows", type=positive, default=400, help="for the test at the end (default: 400)")
    parser.add_argument("--epochs", type=positive, default=3, help="default: 3")
    parser.add_argument("--rounds", type=positive, default=5, help="default: 5")
    parser.add_argument("--global_batch", type=positive, default=64, help="rows of a step (default: 64)")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), help="default: fp32 on CPUs, bf16 on GPUs")
    parser.add_argument("--output", type=Path, default=HERE / "one_or_two_processes.md", help="the page")
    options = parser.parse_args()
    if options.global_batch % 2:
        raise UserError(
            f"--global_batch {options.global_batch}: must be even, for two processes share it", code="uneven-split"
        )
    options.device = options.device or ("gpu" if torch.cuda.is_available() else "cpu")
    options.precision = options.precision or ("bf16" if options.device == "gpu" else "fp32")
    if Path(options.model).exists():
        options.model = str(Path(options.model).resolve())
    return options


if __name__ == "__main__":
    run_command(main)
