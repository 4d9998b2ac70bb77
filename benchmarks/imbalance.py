"""What do class weights and balanced batches gain where two labels are rare?

Two of four labels keep only a twentieth of the training rows that the other two have. The test rows stay as they are,
so that rare and frequent labels are measured equally well.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.processes import Layout, run_ranks
from benchmarks.training_run import train_rank
from common.errors import UserError, positive
from common.hardware import usable_cpus
from training.data.dataset import NewsData, load_news

MODULE = "benchmarks.imbalance"
TIMES_AS_RARE = 20
RARE = (2, 3)
VARIANTS = {
    "all rows alike": (),
    "`--class_weights auto`": ("--class_weights", "auto"),
    "`--sampling balanced`": ("--sampling", "balanced"),
}
INTRODUCTION = """
In the {rows} training rows, {rare} are each twenty times rarer than either of the other two labels; the test set is
left as it is, with all labels equally frequent. Each variant was trained {seeds} times, each time with another seed,
which also chooses the rows. Epochs: {epochs}; the best epoch is chosen by macro-F1. Figures are means over the runs,
with the lowest and the highest. *rare*, *frequent*: the mean recall of the two rare and of the two frequent labels.
"""


def main() -> None:
    options = _parse()
    data = load_news(options.dataset)
    if len(data.label_names) != 4:
        raise UserError(f"--dataset {options.dataset}: needs four labels", code="benchmark-input")
    run: dict[str, Any] = {
        "facts": harness.measurement_facts(MODULE),
        "rare": [data.label_names[label] for label in RARE],
        "frequent": [name for label, name in enumerate(data.label_names) if label not in RARE],
        "rows": options.rows * 2 + options.rows // TIMES_AS_RARE * 2,
        "epochs": options.epochs,
        "seeds": options.seeds,
        "tests": {name: [] for name in VARIANTS},
    }
    with tempfile.TemporaryDirectory(prefix="imbalance-") as folder:
        for seed in range(options.seeds):
            write_rows(data, options.rows, seed, Path(folder) / f"data{seed}")
            for number, (name, flags) in enumerate(VARIANTS.items()):
                test = measure(options, Path(folder) / f"data{seed}", seed, flags, Path(folder) / f"{seed}_{number}")
                run["tests"][name].append(test)
                harness.report(f"seed {seed}, {name}: macro-F1 {test['macro_f1']:.4f}")
    harness.write_page(options.output, render(run), run)


def write_rows(data: NewsData, frequent: int, seed: int, folder: Path) -> None:
    """Write the chosen training rows and all test rows where training reads them."""
    generator = np.random.default_rng(seed)
    chosen: list[int] = []
    for label in range(len(data.label_names)):
        rows = np.flatnonzero(data.train.labels == label)
        count = frequent // TIMES_AS_RARE if label in RARE else frequent
        chosen += generator.permutation(rows)[:count].tolist()
    folder.mkdir()
    for name, rows in (("train", data.train.take(np.array(sorted(chosen)))), ("test", data.test)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for text, label in zip(rows.texts, rows.labels, strict=True):
                file.write(json.dumps({"text": text, "label": data.label_names[label]}) + "\n")


def measure(options: Namespace, data: Path, seed: int, flags: tuple[str, ...], output: Path) -> dict[str, Any]:
    """Train once, and return the test of the best epoch."""
    given = (
        *("--dataset", str(data), "--model", str(options.model), "--epochs", str(options.epochs), "--clean", "news"),
        *("--learning_rate", "5e-5", "--batch_size", "16", "--max_length", "128", "--seed", str(seed)),
        *("--best_metric", "macro_f1", "--resume", "none", "--output_dir", str(output)),
        *("--cache_dir", str(data / "cache")),
    )
    run_ranks(train_rank, Layout(usable_cpus(), 1), flags=[*given, *flags])
    return json.loads((output / "metrics.json").read_text(encoding="utf-8"))["test"]


def render(run: dict[str, Any]) -> str:
    """The page of a run."""

    def figures(value: Callable[[dict[str, Any]], float]) -> Callable[[str], str]:
        def cell(name: str) -> str:
            found = [100 * value(test) for test in run["tests"][name]]
            return f"{mean(found):.1f} ({min(found):.1f} to {max(found):.1f})"

        return cell

    def recall(names: list[str]) -> Callable[[dict[str, Any]], float]:
        return lambda test: mean(test["per_class"][name]["recall"] for name in names)

    columns: dict[str, Callable[[str], str]] = {
        "variant": lambda name: name,
        "accuracy, %": figures(lambda test: test["accuracy"]),
        "macro-F1, %": figures(lambda test: test["macro_f1"]),
        "rare, %": figures(recall(run["rare"])),
        "frequent, %": figures(recall(run["frequent"])),
    }
    text = INTRODUCTION.format(
        rows=f"{run['rows']:,}", rare=" and ".join(run["rare"]), epochs=run["epochs"], seeds=run["seeds"]
    )
    page = harness.introduction(MODULE, "Rare labels", text)
    return f"{page}{harness.table(columns, run['tests'])}\n{harness.fact_list(run['facts'])}"


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="imbalance.md")
    data = harness.ROOT / "data" / "ag_news"
    parser.add_argument("--dataset", default=str(data), help="data with four labels")
    parser.add_argument("--model", type=Path, required=True, help="the encoder to fine-tune")
    parser.add_argument("--rows", type=positive, default=2000, help="training rows of each frequent label")
    parser.add_argument("--epochs", type=positive, default=1, help="as for training")
    parser.add_argument("--seeds", type=positive, default=3, help="how many runs of each way")
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
