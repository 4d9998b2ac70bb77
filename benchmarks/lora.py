"""What does LoRA save against full fine-tuning, and what does it cost in accuracy?

Both train the same encoder on the same rows, which are drawn with the seed, and are tested on the
same test rows.
"""

from __future__ import annotations

import numpy as np

from benchmarks import harness, studies
from benchmarks.processes import Layout
from benchmarks.studies import Figures, Row, Trial
from common.hardware import usable_cpus

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


def measure(trial: Trial) -> Figures:
    """Train once, on half of the written rows."""
    options, generator, drawn = trial.options, np.random.default_rng(0), {}
    # The written rows do not depend on the seed. Which half of them is trained on does, by
    # `max_train_rows`; the test rows are the same for all runs.
    for split, count in (("train", 2 * options.rows), ("test", options.test_rows)):
        rows = trial.data.splits[split]
        drawn[split] = rows.take(np.sort(generator.permutation(len(rows))[:count]))
    given = {
        "dataset": trial.write_rows(**drawn),
        "clean": "news",
        "model": options.model,
        "epochs": options.epochs,
    }
    given |= {"max_train_rows": options.rows, "batch_size": 16, "max_length": 64, "save_every": 0}
    test, rank = trial.train(Layout(1, usable_cpus()), **given)
    # There is one, at the end, because none is saved on the way.
    (checkpoint,) = trial.run_dir.glob("checkpoints/step_*")
    return {
        "accuracy": test["accuracy"],
        "seconds": rank["seconds"],
        "trained": rank["uncompressed"] // 4,
        "host_bytes": rank["host_bytes"],
        "checkpoint_bytes": sum(file.stat().st_size for file in checkpoint.iterdir()),
    }


def times_full(row: Row) -> str:
    full = Row(FULL, row.run)
    return f"{harness.median_ratio(row.values('seconds'), full.values('seconds')):.2f}"


STUDY = studies.Study(
    "lora",
    __doc__,
    "LoRA",
    INTRODUCTION,
    variants=VARIANTS,
    measure=measure,
    flags={
        "dataset": studies.dataset(),
        "model": studies.ENCODER,
        "rows": studies.number(3000, "training rows, those for validation among them"),
        "test_rows": studies.number(2000, "test rows, drawn from those of the data"),
        "epochs": studies.number(1, "as for training"),
    },
    about=lambda options, data: {
        "test_rows": min(options.test_rows, len(data.test)),
        "all_test_rows": len(data.test),
    },
    words=lambda run: {
        "rates": " and ".join(f"{flags[-1]} for {name}" for name, flags in VARIANTS.items())
    },
    columns={
        "variant": studies.row_name,
        "accuracy, %": studies.mean_percent("accuracy"),
        "training, s": studies.median_seconds,
        "time": times_full,
        "trained parameters": lambda row: f"{row.values('trained')[0]:,}",
        "optimizer state, MiB": lambda row: f"{row.values('trained')[0] * 8 / MIB:.1f}",
        "checkpoint, MiB": lambda row: f"{row.values('checkpoint_bytes')[0] / MIB:.1f}",
        "memory, MiB": lambda row: f"{max(row.values('host_bytes')) / MIB:,.0f}",
    },
    packages=(*harness.PACKAGES, "peft"),
)

if __name__ == "__main__":
    harness.run_benchmark(STUDY.main)
