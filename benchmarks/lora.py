"""What does LoRA save against full fine-tuning, and what does it cost in accuracy?

Both train the same encoder on the same rows, which are drawn with the seed, and are tested on the same test rows.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.processes import Layout, run_ranks
from benchmarks.training_run import train_rank
from common.errors import positive
from common.hardware import usable_cpus
from training.data.dataset import NewsData, load_news

MODULE = "benchmarks.lora"
FULL = "full fine-tuning"
VARIANTS = {
    FULL: ("--learning_rate", "5e-5"),
    "`--lora 8`": ("--lora", "8", "--learning_rate", "5e-4"),
}
MIB = 2**20
INTRODUCTION = """
Each run trains on {rows:,} rows of {name}, drawn with the seed, a tenth of them for validation, and is tested on
{test_rows:,} of its {all_test_rows:,} test rows, the same for all runs. Each uses one process, {epochs} epoch and 16
rows per step, with texts cut at 64 tokens. The learning rates are {rates}. There are {seeds} seeds, with the variants
in alternating order. Accuracy is the mean over the seeds, with the lowest and the highest; the seconds of training are
the median, and *time* is the median ratio to full fine-tuning with the same seed. *Optimizer state*: AdamW's two
moments. *Memory*: the most that the process held at any time.
"""


def main() -> None:
    options = _parse()
    data = load_news(options.dataset)
    run: dict[str, Any] = {
        "facts": harness.measurement_facts(MODULE, (*harness.PACKAGES, "peft")),
        "name": Path(data.name).name,
        "rows": options.rows,
        "epochs": options.epochs,
        "test_rows": min(options.test_rows, len(data.test)),
        "all_test_rows": len(data.test),
        "rounds": [],
    }
    with tempfile.TemporaryDirectory(prefix="lora-") as folder:
        write_rows(data, options.rows, options.test_rows, Path(folder) / "data")

        def measure(flags: Sequence[str], seed: int) -> dict[str, Any]:
            return train(options, Path(folder) / "data", seed, flags)

        run["rounds"] = list(
            harness.run_rounds(
                VARIANTS, options.seeds, measure, lambda run: f"{run['accuracy']:.4f} in {run['seconds']:.0f} s"
            )
        )
    harness.write_page(options.output, render(run), run)


def write_rows(data: NewsData, num_train: int, num_test: int, folder: Path) -> None:
    """Write twice the training rows, half of which each seed draws, and the test rows, where training reads them."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for name, rows, count in (("train", data.train, 2 * num_train), ("test", data.test, num_test)):
        chosen = np.sort(generator.permutation(len(rows))[:count])
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for row in chosen:
                label = data.label_names[rows.labels[row]]
                file.write(json.dumps({"text": rows.texts[row], "label": label}) + "\n")


def train(options: Namespace, data: Path, seed: int, flags: Sequence[str]) -> dict[str, Any]:
    """Train once, and return what the page shows of it."""
    with tempfile.TemporaryDirectory(prefix="lora-run-") as folder:
        output = Path(folder) / "model"
        given = (
            *(
                "--dataset",
                str(data),
                "--model",
                str(options.model),
                "--epochs",
                str(options.epochs),
                "--clean",
                "news",
            ),
            *("--batch_size", "16", "--max_length", "64", "--max_train_rows", str(options.rows), "--seed", str(seed)),
            *("--save_every", "0", "--output_dir", str(output), "--cache_dir", str(data / "cache")),
        )
        (found,) = run_ranks(train_rank, Layout(1, usable_cpus()), flags=[*given, *flags])
        (checkpoint,) = (folder for folder in output.with_name("model.run").glob("checkpoints/step_*"))
        return {
            "accuracy": json.loads((output / "metrics.json").read_text(encoding="utf-8"))["test"]["accuracy"],
            "seconds": next(record["seconds"] for record in found["records"] if record["kind"] == "epoch"),
            "trained": found["uncompressed"] // 4,
            "host_bytes": found["host_bytes"],
            "checkpoint_bytes": sum(file.stat().st_size for file in checkpoint.iterdir()),
        }


def render(run: dict[str, Any]) -> str:
    """The page of a run."""

    def values(name: str, key: str) -> list[float]:
        return [found[name][key] for found in run["rounds"]]

    def accuracy(name: str) -> str:
        found = [100 * value for value in values(name, "accuracy")]
        return f"{mean(found):.1f} ({harness.spread(found)})"

    columns = {
        "variant": lambda name: name,
        "accuracy, %": accuracy,
        "training, s": lambda name: harness.median_and_spread(values(name, "seconds"), 0),
        "time": lambda name: f"{harness.median_ratio(values(name, 'seconds'), values(FULL, 'seconds')):.2f}",
        "trained parameters": lambda name: f"{values(name, 'trained')[0]:,}",
        "optimizer state, MiB": lambda name: f"{values(name, 'trained')[0] * 8 / MIB:.1f}",
        "checkpoint, MiB": lambda name: f"{values(name, 'checkpoint_bytes')[0] / MIB:.1f}",
        "memory, MiB": lambda name: f"{max(values(name, 'host_bytes')) / MIB:,.0f}",
    }
    rates = " and ".join(f"{flags[flags.index('--learning_rate') + 1]} for {name}" for name, flags in VARIANTS.items())
    facts = {name: run[name] for name in ("rows", "name", "test_rows", "all_test_rows", "epochs")}
    text = INTRODUCTION.format(**facts, rates=rates, seeds=len(run["rounds"]))
    page = harness.introduction(MODULE, "LoRA", text)
    return f"{page}{harness.table(columns, VARIANTS)}\n{harness.fact_list(run['facts'])}"


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="lora.md")
    parser.add_argument("--dataset", default=str(harness.ROOT / "data" / "ag_news"), help="as for training")
    parser.add_argument("--model", type=Path, required=True, help="the encoder to fine-tune")
    parser.add_argument("--rows", type=positive, default=3000, help="training rows, those for validation among them")
    parser.add_argument("--test_rows", type=positive, default=2000, help="test rows, drawn from those of the data")
    parser.add_argument("--epochs", type=positive, default=1, help="as for training")
    parser.add_argument("--seeds", type=positive, default=3, help="how many runs of each variant")
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
