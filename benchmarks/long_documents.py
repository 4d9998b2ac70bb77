"""What is lost if long texts are cut, and do windows find it?

There are no articles among the data of this project, so they are made of AG News: each joins
several texts about the world with one about another topic, at a random place. That topic is the
label, so what decides may be anywhere.
"""

from __future__ import annotations

import csv
from argparse import Namespace
from statistics import mean

import numpy as np

from benchmarks import harness, studies
from benchmarks.studies import Figures, Run, Trial
from common.errors import UserError
from training.data.dataset import Rows, TextData

FILLER = 0  # World
INTRODUCTION = """
Each article joins {parts} texts of AG News about {filler} with one about {topics}, which is inserted at a random place
and whose topic is the article's label. So guessing gets one answer in {labels} right, and only that text helps. There
are {rows} training and {tests} test articles of {words} words on average, and training uses `--max_length {max_length}`
and {epochs} epochs from `{model}`; each of {seeds} seeds also draws the articles. Figures are means over the seeds,
with the lowest and the highest. *first*: accuracy on articles that begin with the deciding text; *later*: on all
others. Seconds are those of the training steps, on a machine that other programs used too.
"""


def measure(trial: Trial) -> Figures:
    """Train once on articles that the seed draws, and test the best epoch."""
    options, data, generator = trial.options, trial.data, np.random.default_rng(trial.seed)
    train, _ = make_articles(data.train, options.rows, options.parts, generator)
    test, positions = make_articles(data.test, options.tests, options.parts, generator)
    rows = trial.write_rows(train=train, test=test)
    given = {"dataset": rows, "clean": "news", "model": options.model, "epochs": options.epochs}
    given |= {"max_length": options.max_length, "learning_rate": 2e-4, "batch_size": 8}
    _, rank = trial.train(**given)
    with (trial.run_dir / "predictions.csv").open(newline="", encoding="utf-8") as file:
        # The file has the test rows in their order, so each answer can be put beside its text's
        # place.
        right = np.array([row["label"] == row["predicted"] for row in csv.DictReader(file)])
    return {
        "accuracy": float(right.mean()),
        "begins": float(right[positions == 0].mean()),
        "later": float(right[positions != 0].mean()),
        "seconds": rank["seconds"],
        "words": mean(len(text.split()) for text in (*train.texts, *test.texts)),
    }


def make_articles(
    rows: Rows, count: int, parts: int, generator: np.random.Generator
) -> tuple[Rows, np.ndarray]:
    """Articles, and the place of the deciding text in each."""
    positions = generator.integers(parts + 1, size=count)
    fillers = generator.choice(np.flatnonzero(rows.labels == FILLER), (count, parts))
    # The topics take turns, so that all labels are equally frequent; 0 is the filler.
    topics = np.arange(count) % rows.labels.max() + 1
    deciding = np.array(
        [generator.choice(np.flatnonzero(rows.labels == topic)) for topic in topics]
    )
    # Training and test articles are made of training and test texts, so no sentence is in both.
    texts = []
    for position, row, others in zip(positions, deciding, fillers, strict=True):
        article = [rows.texts[i] for i in others]
        article.insert(position, rows.texts[row])
        texts.append(" ".join(article))
    return Rows(texts, rows.labels[deciding]), positions


def about(options: Namespace, data: TextData) -> Run:
    if len(data.label_names) < 3:
        raise UserError(f"--dataset {options.dataset}: needs three labels", code="benchmark-input")
    return {
        "filler": data.label_names[FILLER],
        "topics": data.label_names[1:],
        "model": options.model.name,
    }


def words(run: Run) -> dict[str, str | int]:
    *others, last = run["topics"]
    num_words = mean(figures["words"] for found in run["rounds"] for figures in found.values())
    return {
        "topics": f"{', '.join(others)} or {last}",
        "labels": len(run["topics"]),
        "words": round(num_words),
    }


STUDY = studies.Study(
    "long_documents",
    __doc__,
    "Long documents",
    INTRODUCTION,
    variants={"cut": ("--long", "cut"), "windows": ("--long", "windows")},
    measure=measure,
    flags={
        "dataset": studies.dataset("data with three labels"),
        "model": studies.ENCODER,
        "parts": studies.number(3, "texts of an article that say nothing"),
        "rows": studies.number(300, "training articles"),
        "tests": studies.number(200, "test articles"),
        "max_length": studies.number(64, "as for training"),
        "epochs": studies.number(2, "as for training"),
    },
    seeds=2,
    about=about,
    words=words,
    columns={
        "`--long`": studies.row_name,
        "accuracy, %": studies.mean_percent("accuracy"),
        "first, %": studies.mean_percent("begins"),
        "later, %": studies.mean_percent("later"),
        "seconds": lambda row: harness.mean_and_spread(row.values("seconds")),
    },
)

if __name__ == "__main__":
    harness.run_benchmark(STUDY.main)
