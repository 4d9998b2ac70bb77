"""How accurate are trained models, compared with TF-IDF and a linear SVM fitted on the same rows?

Nothing is fine-tuned here: the models' own metrics.json are read, and the baseline is fitted and
tested.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import harness
from common.errors import UserError
from common.text import clean_text
from training.config import TrainConfig
from training.data.dataset import SAMPLE, LoadOptions, TextData, load_data, split_rows
from training.evaluation.baseline import fit_linear
from training.monitoring.events import read_metrics
from training.monitoring.records import format_percent, format_time, wilson_interval
from training.tasks import Classification

MODULE = "benchmarks.accuracy"
BASELINE = "TF-IDF of words and word pairs + linear SVM"
INTRODUCTION = """
The baseline is fitted here; the other rows are the test results in each model folder's `metrics.json`. All were tested
once, on the same rows. The interval is a Wilson score interval. The wall time runs to the last training step and, for
models, includes the validation after every epoch except the last.
"""


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    ``command``: what trained it; ``encoder``: the model that it began with, and what trained that,
    if it was made here.
    """

    name: str
    test: Mapping[str, Any]
    train_rows: int
    seconds: float | None
    command: str = ""
    encoder: tuple[str, str] = ("", "")


def _interval(entry: Entry) -> str:
    return " to ".join(
        map(format_percent, wilson_interval(entry.test["accuracy"], entry.test["rows"]))
    )


COLUMNS: dict[str, Callable[[Entry], str]] = {
    "model": lambda entry: entry.name,
    "accuracy": lambda entry: format_percent(entry.test["accuracy"]),
    "95% interval": _interval,
    "macro-F1": lambda entry: f"{entry.test['macro_f1']:.4f}",
    "test rows": lambda entry: f"{entry.test['rows']:,}",
    "training rows": lambda entry: f"{entry.train_rows:,}",
    "wall time": lambda entry: (
        harness.NONE if entry.seconds is None else format_time(entry.seconds)
    ),
}


def main() -> None:
    defaults = TrainConfig()
    fraction = defaults.validation_fraction
    parser = harness.Parser(MODULE, __doc__, page="accuracy.md")
    add = parser.add_argument
    add("--dataset", default=SAMPLE, help="as for training (default: the built-in sample)")
    add("--models", nargs="*", type=Path, default=[], metavar="FOLDER", help="model folders")
    add(
        "--validation_fraction", type=float, default=fraction, help="as for training (default: 0.1)"
    )
    add("--seed", type=int, default=defaults.seed, help="as for training (default: 42)")
    options = parser.parse_args()
    entries = [read_model(folder) for folder in options.models]
    data = load_data(options.dataset, LoadOptions(seed=options.seed))
    for folder, entry in zip(options.models, entries, strict=True):
        # A model that was tested on other rows cannot stand in one table with the baseline. The
        # number of rows is all that its metrics say about them.
        if entry.test["rows"] != len(data.test):
            message = (
                f"--models {folder}: was tested on {entry.test['rows']} rows, --dataset has "
                f"{len(data.test)}"
            )
            raise UserError(message, code="benchmark-input")
    entries = [fit_baseline(data, options), *entries]
    facts = harness.measurement_facts(MODULE, (*harness.PACKAGES, "scikit-learn"))
    facts |= {"Data": harness.rows_of(Path(data.name).name, len(data.train), len(data.test))}
    facts |= {
        f"Encoder {name}": f"`{command}`"
        for name, command in (entry.encoder for entry in entries)
        if command
    }
    facts |= {
        f"Trained by ({entry.name})": f"`{entry.command}`" for entry in entries if entry.command
    }
    text = harness.introduction(MODULE, "Accuracy", INTRODUCTION)
    page = (
        f"{text}{harness.fact_list(facts)}\n{harness.table(COLUMNS, entries)}{means(entries[1:])}"
    )
    harness.write_page(options.output, page)


def means(entries: Sequence[Entry]) -> str:
    """The mean accuracy of models that began with the same encoder and had a teacher or not, a paragraph each."""
    alike: dict[str, list[float]] = {}
    for entry in entries:
        kind = f"{'students' if '--distill' in entry.command else 'models'} from {entry.encoder[0]}"
        alike.setdefault(kind, []).append(entry.test["accuracy"])
    text = ""
    for kind, found in alike.items():
        if len(found) > 1:
            mean, least, most = map(format_percent, (np.mean(found), min(found), max(found)))
            text += f"\nThe mean of {len(found)} {kind} is {mean} ({least} to {most}).\n"
    return text


def fit_baseline(data: TextData, options: Namespace) -> Entry:
    """Fit the baseline on the rows that training takes, without those kept for validation."""
    # The same split with the same seed as in training, so the baseline has no row more than the
    # models.
    train, _ = split_rows(data.train.labels, options.validation_fraction, options.seed)
    harness.report(f"Fitting {BASELINE} on {len(train):,} rows ...")
    started = time.perf_counter()
    texts = [clean_text(data.train.texts[i]) for i in train]
    answer = fit_linear(texts, data.train.labels[train], len(data.label_names), options.seed)
    seconds = time.perf_counter() - started
    scores = answer([clean_text(text) for text in data.test.texts])
    test = Classification(data.label_names).metrics(scores, data.test.labels)
    return Entry(BASELINE, test, len(train), seconds)


def read_model(folder: Path) -> Entry:
    """A model folder's own test, and the time that its run took.

    Raises:
        UserError: the folder has no readable metrics.json with a test.
    """
    path = folder / "metrics.json"
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
        test, train_rows = metrics["test"], metrics["train_rows"]
        name = f"{folder.name}: {Path(metrics['base_model']).name}, epoch {metrics['best_epoch']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--models {folder}: {path} cannot be read ({error})", code="data-unreadable"
        ) from error
    run_dir = folder.with_name(f"{folder.name}.run")
    # A run that was interrupted and resumed counts its seconds on, so the largest is the whole
    # time.
    seconds = [record["seconds"] for record in read_metrics(run_dir) if record["kind"] == "step"]
    base = Path(metrics["base_model"])
    encoder = (base.name, training_command(base.with_name(f"{base.name}.run")))
    return Entry(
        name, test, train_rows, max(seconds, default=None), training_command(run_dir), encoder
    )


def training_command(run_dir: Path) -> str:
    """The command that makes a run's configuration, with paths cut to their last part; empty if it is not kept."""
    path = run_dir / "config.yaml"
    if not path.exists():
        return ""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    defaults = TrainConfig().model_dump(mode="json")
    words = ["training/run_ddp.sh"]
    for name, value in values.items():
        if name not in ("cache_dir", "output_dir", "resume") and value != defaults.get(name):
            is_absolute = isinstance(value, str) and Path(value).is_absolute()
            words.append(f"--{name} {f'.../{Path(value).name}' if is_absolute else value}")
    return " ".join(words)


if __name__ == "__main__":
    harness.run_benchmark(main)
