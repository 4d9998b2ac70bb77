"""What does the starter reach with few rows and in little time, beside an encoder from scratch and other encoders?

Every figure is on all test rows of the data, which neither the starter nor its vocabulary has seen.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import harness
from benchmarks.processes import Layout, run_ranks
from benchmarks.training_run import train_rank
from common.errors import positive
from common.hardware import usable_cpus
from common.rows import SAMPLE_NEWS
from training.config import STARTER
from training.data.dataset import NewsData, load_news
from training.facts import TINY

MODULE = "benchmarks.starter"
FEW = 1000
FINE_TUNING = ("--batch_size", "8", "--epochs", "5", "--schedule", "linear")
ROWS = {
    f"{FEW:,} rows": ("--max_train_rows", str(FEW), *FINE_TUNING),
    "the built-in texts": FINE_TUNING,
}
INTRODUCTION = """
Each encoder is trained on rows of {name}, drawn with the seed, or on the {built_in:,} texts of the built-in sample, and
is tested on all {tests:,} test rows of {name}. Runs use {processes} processes and keep no rows for validation
(`--validation_fraction 0`). There are {seeds} seeds, with the variants in alternating order. Accuracy is the mean over
the seeds, with the lowest and the highest; *training* is the median of the seconds that all steps took. Flags: {flags}.
"""


def main() -> None:
    options = _parse()
    data = load_news(options.dataset)
    encoders = {STARTER: STARTER, f"{TINY}, from scratch": TINY}
    encoders |= {model.name: str(model) for model in options.beside}
    with tempfile.TemporaryDirectory(prefix="starter-") as name:
        folder = Path(name)
        built_in = write_built_in(data, folder / "built_in")
        run: dict[str, Any] = {
            "facts": harness.measurement_facts(MODULE),
            "name": Path(data.name).name,
            "built_in": built_in,
            "tests": len(data.test),
            "cases": {},
            "rounds": [],
        }
        places = {f"{FEW:,} rows": options.dataset, "the built-in texts": str(folder / "built_in")}
        cases = {
            f"{encoder} / {rows}": (("--dataset", places[rows], "--model", place), flags)
            for rows, flags in ROWS.items()
            for encoder, place in encoders.items()
        }
        for count in options.many:
            many = ("--max_train_rows", str(count), "--batch_size", "32", "--epochs", "1")
            cases[f"{STARTER} / {count:,} rows, one epoch"] = (("--dataset", options.dataset, "--model", STARTER), many)
        run["cases"] = {name: list(flags) for name, (_, flags) in cases.items()}

        def measure(case: tuple[Sequence[str], Sequence[str]], seed: int) -> dict[str, float]:
            return train([*case[0], *case[1]], seed, folder)

        for found in harness.run_rounds(cases, options.seeds, measure, lambda one: f"{one['accuracy']:.4f}"):
            run["rounds"].append(found)
            harness.write_page(options.output, render(run), run)


def write_built_in(data: NewsData, folder: Path) -> int:
    """Write the training texts of the built-in sample beside the data's test rows; returns their number."""
    sample = load_news(str(SAMPLE_NEWS))
    folder.mkdir()
    for name, rows, labels in (("train", sample.train, sample.label_names), ("test", data.test, data.label_names)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for text, label in zip(rows.texts, rows.labels, strict=True):
                file.write(json.dumps({"text": text, "label": labels[label]}) + "\n")
    return len(sample.train)


def train(flags: Sequence[str], seed: int, folder: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as place:
        output = Path(place) / "model"
        common = ("--max_length", "96", "--validation_fraction", "0", "--clean", "news", "--save_every", "0")
        common += ("--seed", str(seed), "--output_dir", str(output), "--cache_dir", str(folder / "cache"))
        told = run_ranks(train_rank, Layout(usable_cpus(), 1), flags=[*flags, *common])
        test = json.loads((output / "metrics.json").read_text(encoding="utf-8"))["test"]
        seconds = [record["seconds"] for record in told[0]["records"] if record["kind"] == "epoch"]
        return {"accuracy": test["accuracy"], "seconds": sum(seconds)}


def render(run: dict[str, Any]) -> str:
    """The page of a run."""

    def values(case: str, key: str) -> list[float]:
        return [found[case][key] for found in run["rounds"]]

    def accuracy(case: str) -> str:
        found = [100 * value for value in values(case, "accuracy")]
        return f"{mean(found):.1f} ({harness.spread(found)})"

    columns = {
        "encoder": lambda case: f"`{case.partition(' / ')[0]}`",
        "trained on": lambda case: case.partition(" / ")[2],
        "accuracy, %": accuracy,
        "training, s": lambda case: harness.median_and_spread(values(case, "seconds"), 0),
    }
    flags = "; ".join(sorted({f"`{' '.join(flags)}`" for flags in run["cases"].values()}))
    text = INTRODUCTION.format(
        **{name: run[name] for name in ("name", "built_in", "tests")},
        processes=usable_cpus(),
        seeds=len(run["rounds"]),
        flags=flags,
    )
    page = harness.introduction(MODULE, "The starter", text)
    return f"{page}{harness.table(columns, run['cases'])}\n{harness.fact_list(run['facts'])}"


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="starter.md")
    parser.add_argument("--dataset", default=str(harness.ROOT / "data" / "ag_news"), help="as for training")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="folders of other encoders to fine-tune")
    parser.add_argument(
        "--many", type=positive, nargs="*", default=[40_000], help="numbers of rows for one epoch (default: 40000)"
    )
    parser.add_argument("--seeds", type=positive, default=3, help="how many runs of each variant")
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
