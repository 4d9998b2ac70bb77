"""What do class weights and balanced batches gain where two labels are rare?

Two of four labels keep only a twentieth of the training rows that the other two have. The test rows
stay as they are, so that rare and frequent labels are measured equally well.
"""

from __future__ import annotations

from argparse import Namespace
from statistics import mean

import numpy as np

from benchmarks import harness, studies
from benchmarks.studies import Column, Figures, Row, Run, Trial
from common.errors import UserError
from training.data.dataset import TextData

TIMES_AS_RARE = 20
RARE = (2, 3)
INTRODUCTION = """
In the {rows:,} training rows, {rare} are each twenty times rarer than either of the other two labels; the test set is
left as it is, with all labels equally frequent. Each variant was trained {seeds} times, each time with another seed,
which also chooses the rows. Epochs: {epochs}; the best epoch is chosen by macro-F1. Figures are means over the runs,
with the lowest and the highest. *rare*, *frequent*: the mean recall of the two rare and of the two frequent labels.
"""


def measure(trial: Trial) -> Figures:
    """Train once on rows that the seed chooses, and return the test of the best epoch."""
    options, data = trial.options, trial.data
    generator, chosen = np.random.default_rng(trial.seed), []
    for label in range(len(data.label_names)):
        count = options.rows // TIMES_AS_RARE if label in RARE else options.rows
        chosen += generator.permutation(np.flatnonzero(data.train.labels == label))[:count].tolist()
    rows = trial.write_rows(train=data.train.take(np.array(sorted(chosen))), test=data.test)
    given = {"dataset": rows, "clean": "news", "model": options.model, "epochs": options.epochs}
    # By accuracy on validation rows, in which they are just as rare, an epoch that ignores the rare
    # labels could be the best one.
    given |= {"best_metric": "macro_f1", "learning_rate": 5e-5, "batch_size": 16, "max_length": 128}
    test, _ = trial.train(**given)
    return test


def about(options: Namespace, data: TextData) -> Run:
    names = data.label_names
    if len(names) != 4:
        raise UserError(f"--dataset {options.dataset}: needs four labels", code="benchmark-input")
    return {
        "rare": [names[label] for label in RARE],
        "frequent": [name for label, name in enumerate(names) if label not in RARE],
        "rows": options.rows * 2 + options.rows // TIMES_AS_RARE * 2,
    }


def recall(kind: str) -> Column:
    """The mean recall of the rare or of the frequent labels."""

    def cell(row: Row) -> str:
        found = [
            mean(test[label]["recall"] for label in row.run[kind])
            for test in row.values("per_class")
        ]
        return harness.mean_and_spread([100 * value for value in found])

    return cell


STUDY = studies.Study(
    "imbalance",
    __doc__,
    "Rare labels",
    INTRODUCTION,
    variants={
        "all rows alike": (),
        "`--class_weights auto`": ("--class_weights", "auto"),
        "`--sampling balanced`": ("--sampling", "balanced"),
    },
    measure=measure,
    flags={
        "dataset": studies.dataset("data with four labels"),
        "model": studies.ENCODER,
        "rows": studies.number(2000, "training rows of each frequent label"),
        "epochs": studies.number(1, "as for training"),
    },
    about=about,
    words=lambda run: {"rare": " and ".join(run["rare"])},
    columns={
        "variant": studies.row_name,
        "accuracy, %": studies.mean_percent("accuracy"),
        "macro-F1, %": studies.mean_percent("macro_f1"),
        "rare, %": recall("rare"),
        "frequent, %": recall("frequent"),
    },
)

if __name__ == "__main__":
    harness.run_benchmark(STUDY.main)
