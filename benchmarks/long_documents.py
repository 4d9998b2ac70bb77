"""What is lost if long texts are cut, and do windows find it?

There are no articles among the data of this project, so they are made of AG News: each joins several texts about the
world with one about another topic, at a random place. That topic is the label, so what decides may be anywhere.
"""

from __future__ import annotations

import csv
import json
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.processes import Layout, run_ranks
from benchmarks.training_run import train_rank
from common.errors import UserError, positive
from common.hardware import usable_cpus
from training.data.dataset import NewsData, Rows, load_news

MODULE = "benchmarks.long_documents"
FILLER = 0  # World
VARIANTS = ("cut", "windows")
INTRODUCTION = """
Each article joins {parts} texts of AG News about {filler} with one about {topics}, which is inserted at a random place
and whose topic is the article's label. So guessing gets one answer in {labels} right, and only that text helps. There
are {rows} training and {tests} test articles of {words} words on average, and training uses `--max_length {max_length}`
and {epochs} epochs from `{model}`; each of {seeds} seeds also draws the articles. Figures are means over the seeds,
with the lowest and the highest. *first*: accuracy on articles that begin with the deciding text; *later*: on all
others. Seconds are those of the training steps, on a machine that other programs used too.
"""


def main() -> None:
    options = _parse()
    data = load_news(options.dataset)
    if len(data.label_names) < 3:
        raise UserError(f"--dataset {options.dataset}: needs three labels", code="benchmark-input")
    run: dict[str, Any] = {
        "facts": harness.measurement_facts(MODULE),
        "filler": data.label_names[FILLER],
        "topics": data.label_names[1:],
        "model": options.model.name,
        **{name: getattr(options, name) for name in ("parts", "rows", "tests", "max_length", "epochs", "seeds")},
        "words": [],
        "results": {name: [] for name in VARIANTS},
    }
    with tempfile.TemporaryDirectory(prefix="long-documents-") as folder:
        for seed in range(options.seeds):
            articles = Path(folder) / f"data{seed}"
            places, words = write_articles(data, options, seed, articles)
            run["words"].append(words)
            for long in VARIANTS:
                found = measure(options, articles, seed, long, Path(folder) / f"{seed}_{long}", places)
                run["results"][long].append(found)
                harness.report(f"seed {seed}, {long}: accuracy {found['accuracy']:.4f}")
    harness.write_page(options.output, render(run), run)


def write_articles(data: NewsData, options: Namespace, seed: int, folder: Path) -> tuple[list[int], float]:
    """Write articles where training reads them.

    Returns:
        The place of the deciding text in each test article, and the mean number of words.
    """
    generator, words = np.random.default_rng(seed), []
    folder.mkdir()
    for split, rows, count in (("train", data.train, options.rows), ("test", data.test, options.tests)):
        places = generator.integers(options.parts + 1, size=count)
        fillers, deciding = _draw(rows, count, options.parts, generator)
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for number, row in enumerate(deciding):
                parts = [rows.texts[i] for i in fillers[number]]
                parts.insert(places[number], rows.texts[row])
                words.append(sum(len(part.split()) for part in parts))
                label = data.label_names[rows.labels[row]]
                file.write(json.dumps({"text": " ".join(parts), "label": label}) + "\n")
    return places.tolist(), mean(words)


def _draw(rows: Rows, count: int, parts: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The fillers of each article, (articles, parts), and its deciding text, (articles,)."""
    fillers = generator.choice(np.flatnonzero(rows.labels == FILLER), (count, parts))
    topics = np.arange(count) % rows.labels.max() + 1
    return fillers, np.array([generator.choice(np.flatnonzero(rows.labels == topic)) for topic in topics])


def measure(options: Namespace, data: Path, seed: int, long: str, output: Path, places: list[int]) -> dict[str, float]:
    """Train once, and test the best epoch."""
    given = (
        *("--dataset", str(data), "--model", str(options.model), "--epochs", str(options.epochs), "--clean", "news"),
        *("--learning_rate", "2e-4", "--batch_size", "8", "--max_length", str(options.max_length), "--long", long),
        *("--seed", str(seed), "--resume", "none", "--output_dir", str(output), "--cache_dir", str(data / "cache")),
    )
    run_ranks(train_rank, Layout(usable_cpus(), 1), flags=list(given))
    with (output.with_name(f"{output.name}.run") / "predictions.csv").open(newline="", encoding="utf-8") as file:
        right = np.array([row["label"] == row["predicted"] for row in csv.DictReader(file)])
    first = np.array(places) == 0
    lines = (output.with_name(f"{output.name}.run") / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = sum(record["seconds"] for record in map(json.loads, lines) if record["kind"] == "epoch")
    return {
        "accuracy": float(right.mean()),
        "begins": float(right[first].mean()),
        "later": float(right[~first].mean()),
        "seconds": seconds,
    }


def render(run: dict[str, Any]) -> str:
    """The page of a run."""

    def cell(name: str, figure: str, factor: float = 100) -> str:
        found = [factor * one[figure] for one in run["results"][name]]
        return f"{mean(found):.1f} ({min(found):.1f} to {max(found):.1f})"

    columns = {
        "`--long`": lambda name: name,
        "accuracy, %": lambda name: cell(name, "accuracy"),
        "first, %": lambda name: cell(name, "begins"),
        "later, %": lambda name: cell(name, "later"),
        "seconds": lambda name: cell(name, "seconds", 1),
    }
    text = INTRODUCTION.format(
        **{name: run[name] for name in ("parts", "filler", "rows", "tests", "max_length", "epochs", "model", "seeds")},
        topics=", ".join(run["topics"][:-1]) + f" or {run['topics'][-1]}",
        labels=len(run["topics"]),
        words=round(mean(run["words"])),
    )
    page = harness.introduction(MODULE, "Long documents", text)
    return f"{page}{harness.table(columns, run['results'])}\n{harness.fact_list(run['facts'])}"


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="long_documents.md")
    parser.add_argument("--dataset", default=str(harness.ROOT / "data" / "ag_news"), help="data with three labels")
    parser.add_argument("--model", type=Path, required=True, help="the encoder to fine-tune")
    parser.add_argument("--parts", type=positive, default=3, help="texts of an article that say nothing")
    parser.add_argument("--rows", type=positive, default=300, help="training articles")
    parser.add_argument("--tests", type=positive, default=200, help="test articles")
    parser.add_argument("--max_length", type=positive, default=64, help="as for training")
    parser.add_argument("--epochs", type=positive, default=2, help="as for training")
    parser.add_argument("--seeds", type=positive, default=2, help="how many runs of each way")
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
