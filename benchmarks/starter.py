"""What does the starter reach with few rows and in little time, beside an encoder from scratch and
other encoders?

Every figure is on all test rows of the data, which neither the starter nor its vocabulary has seen.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from benchmarks import harness, studies
from benchmarks.studies import Figures, Flags, Run, Trial
from benchmarks.training_run import write_rows
from common.rows import SAMPLE_NEWS
from training.config import STARTER
from training.data.dataset import TextData, load_data
from training.facts import TINY

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


def variants(options: Namespace) -> dict[str, Flags]:
    encoders = {STARTER: STARTER, f"{TINY}, from scratch": TINY}
    encoders |= {model.name: str(model) for model in options.beside}
    found = {
        f"{encoder} / {rows}": ("--model", path, *flags)
        for rows, flags in ROWS.items()
        for encoder, path in encoders.items()
    }
    for count in options.many:
        many = ("--max_train_rows", str(count), "--batch_size", "32", "--epochs", "1")
        found[f"{STARTER} / {count:,} rows, one epoch"] = ("--model", STARTER, *many)
    return found


def measure(trial: Trial) -> Figures:
    dataset = trial.options.dataset
    if "--max_train_rows" not in trial.flags:
        # Only the training rows are built in. All variants are tested on the test rows of the data,
        # or their accuracies could not be compared.
        dataset, sample = trial.write_rows(test=trial.data.test), load_data(str(SAMPLE_NEWS))
        write_rows(dataset, sample.label_names, train=sample.train)
    given = {
        "dataset": dataset,
        "clean": "news",
        "max_length": 96,
        "validation_fraction": 0,
        "save_every": 0,
    }
    test, rank = trial.train(**given)
    return {"accuracy": test["accuracy"], "seconds": rank["seconds"]}


def about(options: Namespace, data: TextData) -> Run:
    cases = {name: flags[2:] for name, flags in variants(options).items()}
    return {"built_in": len(load_data(str(SAMPLE_NEWS)).train), "cases": cases}


STUDY = studies.Study(
    "starter",
    __doc__,
    "The starter",
    INTRODUCTION,
    variants=variants,
    measure=measure,
    flags={
        "dataset": studies.dataset(),
        "beside": {
            "type": Path,
            "nargs": "*",
            "default": [],
            "help": "folders of other encoders to fine-tune",
        },
        "many": studies.number(40_000, "numbers of rows for one epoch")
        | {"nargs": "*", "default": [40_000]},
    },
    about=about,
    words=lambda run: {
        "flags": "; ".join(sorted({f"`{' '.join(flags)}`" for flags in run["cases"].values()}))
    },
    columns={
        "encoder": lambda row: f"`{row.name.partition(' / ')[0]}`",
        "trained on": lambda row: row.name.partition(" / ")[2],
        "accuracy, %": studies.mean_percent("accuracy"),
        "training, s": studies.median_seconds,
    },
)

if __name__ == "__main__":
    harness.run_benchmark(STUDY.main)
