"""Time whole training runs on one GPU or two; on CPU processes where there is none, which the page says first.

The real commands are run, from start to finished model folder: nothing of the program is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from transformers import AutoConfig

from benchmarks.processes import ROOT, Layout, end_with_children, run_ranks
from benchmarks.tables import (
    HERE,
    Parser,
    circumstances,
    fact_list,
    markdown_table,
    ratio,
    spread,
    write_table,
)
from benchmarks.worker import MATMUL
from benchmarks.workload import MAX_LENGTH, SIZES, read_tokenizer, write_weights
from inference.cpu import usable_cpus
from training.config import TINY, TrainConfig
from training.dataset import SAMPLE, load_news
from training.distributed import ranks
from training.errors import TrainingFailure, UserError, positive, run_command
from training.monitoring.run_log import read_metrics
from training.precision import choose_precision
from training.prepare import prepare_news
from training.utils import format_time

MODULE = "benchmarks.gpu"
PAGES = {1: "single_gpu.md", 2: "ddp_2gpu.md"}
ROWS_ON_CPU = 640
HEADER = [
    "processes",
    "wall time",
    "to the first step",
    "training alone",
    "samples/s",
    "rounds",
    "× one process",
    "TFLOP/s, nominal",
    "share of the matrix rate",
    "test accuracy",
]


@dataclass(frozen=True)
class Run:
    """One training run. ``wall``: the whole command; ``first_step``, ``training``: parts of it, in seconds."""

    wall: float
    first_step: float
    training: float
    samples_per_second: float
    accuracy: float


def main() -> None:
    """Run, measure and write the page."""
    options = _parse()
    end_with_children()
    on_gpu = torch.cuda.is_available()
    if on_gpu and torch.cuda.device_count() < options.processes:
        raise UserError(f"--processes {options.processes}: this machine has {torch.cuda.device_count()} GPU")
    if not on_gpu:
        Layout.parse(f"{options.processes}x1")
    options.weights = f"the weights of {options.model.name}" if options.model else "random weights"
    options.rows = options.rows or (0 if on_gpu else ROWS_ON_CPU)
    options.precision = choose_precision(options.precision, torch.device("cuda" if on_gpu else "cpu"))
    counts = sorted({1, options.processes})
    runs: dict[int, list[Run]] = {count: [] for count in counts}
    rates: dict[int, list[float]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory(prefix="runs-") as name:
        folder = Path(name)
        work, rows = prepare(folder, options)
        for number in range(1, options.rounds + 1):
            for count in counts:
                rates[count].append(matrix_rate(count, options.precision, on_gpu))
                runs[count].append(train(folder, options, count, rows))
                last = runs[count][-1]
                print(
                    f"round {number}/{options.rounds}: {count} process{'es' * (count > 1)}: "
                    f"{format_time(last.wall)}, {last.samples_per_second:.1f} samples/s",
                    flush=True,
                )
            write_table(options.output, render(options, runs, rates, work, rows, on_gpu))
    print(f"Written: {options.output}")


def prepare(folder: Path, options: Namespace) -> tuple[float, int]:
    """Write random weights unless a model is given, and tokenise into a cache that all runs share.

    Returns:
        The nominal work of one row in the mean, and the number of training rows.
    """
    if options.model is None:
        data = load_news(options.dataset)
        options.model = folder / "model"
        write_weights(options.model, options.size, len(data.label_names))
        read_tokenizer(options.tokenizer, data.train.texts).save_pretrained(options.model)
    elif AutoConfig.from_pretrained(options.model).hidden_size != SIZES[options.size].dim:
        raise UserError(f"--model {options.model} is not of --size {options.size}")
    with ranks("cpu", use_process_group=False) as alone:
        config = TrainConfig(
            dataset=options.dataset,
            model=str(options.model),
            max_length=MAX_LENGTH,
            max_train_rows=options.rows,
            cache_dir=folder / "cache",
        )
        news = prepare_news(config, alone, lambda text: print(text, flush=True))
    lengths = news.tokens.train.lengths[news.train_index]
    work = SIZES[options.size].training_work(int(lengths.sum()), int((lengths**2).sum()))
    return work / len(lengths), len(lengths)


def train(folder: Path, options: Namespace, count: int, rows: int) -> Run:
    """Run the training command on ``count`` processes.

    Raises:
        TrainingFailure: it failed, with its last line.
    """
    output = Path(tempfile.mkdtemp(dir=folder)) / "model"
    with output.with_name("log").open("w+") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            _command(folder, options, count, output), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
        first_step = _watch(process, output.with_name("model.run") / "metrics.jsonl", started)
        wall = time.perf_counter() - started
        if process.returncode:
            raise TrainingFailure(f"training on {count} processes failed: {_last_line(log)}")
    epochs = [record for record in read_metrics(output.with_name("model.run")) if record["kind"] == "epoch"]
    training = sum(record["seconds"] for record in epochs)
    accuracy = json.loads((output / "metrics.json").read_text())["test"]["accuracy"]
    return Run(wall, first_step, training, rows * len(epochs) / training, accuracy)


def _command(folder: Path, options: Namespace, count: int, output: Path) -> list[str]:
    launcher = ["training/train_single.py"]
    if count > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", "training/train_ddp.py"]
    flags: dict[str, Any] = {
        "dataset": Path(options.dataset).resolve() if Path(options.dataset).exists() else options.dataset,
        "model": Path(options.model).resolve(),
        "max_length": MAX_LENGTH,
        "max_train_rows": options.rows,
        "epochs": options.epochs,
        "batch_size": options.global_batch // count,
        "precision": options.precision,
        "cache_dir": folder / "cache",
        "output_dir": output,
    }
    pairs = (part for name, value in flags.items() for part in (f"--{name}", str(value)))
    return [sys.executable, *launcher, *pairs]


def _watch(process: subprocess.Popen[bytes], metrics: Path, started: float) -> float:
    """Wait for the end; returns when the first step was logged."""
    first_step = 0.0
    try:
        while process.poll() is None:
            if not first_step and metrics.exists() and metrics.stat().st_size:
                first_step = time.perf_counter() - started
            time.sleep(0.01)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    return first_step


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = [line for line in log.read().splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("error:")), (lines or ["no output"])[-1])


def matrix_rate(count: int, precision: str, on_gpu: bool) -> float:
    """The best matrix product of all devices at once: every GPU, or all cores shared out over the processes."""
    layout = Layout(count, 1 if on_gpu else max(1, usable_cpus() // count))
    results = run_ranks(["", f"{MATMUL}{precision}", "cuda" if on_gpu else "cpu"], layout, pin=not on_gpu)
    return sum(result["flops"] for result in results)


def render(
    options: Namespace,
    runs: dict[int, list[Run]],
    rates: dict[int, list[float]],
    work: float,
    rows: int,
    on_gpu: bool,
) -> str:
    """The page."""
    table = markdown_table(HEADER, [_row(runs, rates, work, count) for count in runs])
    first = "" if on_gpu else "Measured on CPU processes: no GPU was at hand.\n\n"
    facts = circumstances(MODULE) | {
        "Model": f"DistilBERT, {options.size} size, from {options.weights}; {options.precision}",
        "Data": f"{Path(options.dataset).name}: {rows:,} training rows, --epochs {options.epochs}, "
        f"global batch {options.global_batch}, texts cut at {MAX_LENGTH} tokens",
        "Rounds": str(options.rounds),
        "Matrix rate": ", ".join(
            f"{max(rates[count]) / 1e12:.3g} TFLOP/s in {options.precision} with {count} process{'es' * (count > 1)}"
            for count in rates
        ),
    }
    return (
        f"{first}# {'One device' if options.processes == 1 else 'Data parallelism on two devices'}\n\n"
        f"Written by `python -m {MODULE}`, which runs the training program itself, from its start to the finished "
        "model folder, with its progress bar, logs, validation, checkpoints and test. *Training alone*: the epochs' "
        "steps; *samples/s* is of these. *Nominal* work: the blocks' matrix products for the real tokens, forward and "
        "backward, every block in full; the program computes the last one for the first token alone.\n\n"
        f"{fact_list(facts)}\n{table}"
    )


def _row(runs: dict[int, list[Run]], rates: dict[int, list[float]], work: float, count: int) -> list[str]:
    columns: dict[str, list[float]] = {
        name: [asdict(run)[name] for run in runs[count]] for name in asdict(runs[count][0])
    }
    speeds = columns["samples_per_second"]
    flops = median(speeds) * work
    return [
        str(count),
        format_time(median(columns["wall"])),
        f"{median(columns['first_step']):.1f}s",
        format_time(median(columns["training"])),
        f"{median(speeds):.1f}",
        spread(speeds),
        ratio(speeds, [run.samples_per_second for run in runs[1]]),
        f"{flops / 1e12:.3g}",
        f"{flops / max(rates[count]):.0%}",
        f"{median(columns['accuracy']):.2%}",
    ]


def _parse() -> Namespace:
    parser = Parser(MODULE, str(__doc__).split("\n")[0])
    parser.add_argument("--processes", type=int, choices=PAGES, default=1, help="one a GPU (default: 1)")
    parser.add_argument("--dataset", default=SAMPLE, help="as in training (default: the built-in sample)")
    parser.add_argument("--model", type=Path, help="a folder with weights of that size (default: random weights)")
    parser.add_argument("--size", choices=SIZES, default="base", help="of the model (default: base)")
    parser.add_argument("--tokenizer", default=TINY, help="for random weights: a folder or tokenizer.json")
    parser.add_argument(
        "--rows", type=positive, default=0, help=f"training rows (default: all on GPUs, {ROWS_ON_CPU} on CPUs)"
    )
    parser.add_argument("--epochs", type=positive, default=3, help="default: 3")
    parser.add_argument("--rounds", type=positive, default=1, help="default: 1")
    parser.add_argument("--global_batch", type=positive, default=64, help="rows of a step (default: 64)")
    parser.add_argument(
        "--precision", choices=("auto", "bf16", "fp32"), default="auto", help="default: bf16 where there is any"
    )
    parser.add_argument("--output", type=Path, help="the page (default: benchmarks/single_gpu.md or ddp_2gpu.md)")
    options = parser.parse_args()
    if options.global_batch % options.processes:
        raise UserError(f"--global_batch {options.global_batch}: must divide by --processes {options.processes}")
    if options.model and not (options.model / "config.json").is_file():
        raise UserError(f"--model {options.model}: no folder with a config.json")
    options.output = options.output or HERE / PAGES[options.processes]
    return options


if __name__ == "__main__":
    run_command(main)
