"""Set trained models beside TF-IDF and a linear SVM fitted on the same rows.

Nothing is fine-tuned here: the models' own metrics.json are read, the baseline is fitted and tested.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import yaml

from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, write_table
from common.errors import UserError, run_command
from common.text import clean_text
from training.config import TrainConfig
from training.data.dataset import SAMPLE, NewsData, load_news, split_rows
from training.evaluation.metrics import classification_metrics
from training.monitoring.events import read_metrics
from training.monitoring.records import format_percent, format_time, wilson_interval

MODULE = "benchmarks.accuracy"
BASELINE = "TF-IDF of words and pairs + linear SVM"
HEADER = ["model", "accuracy", "95% interval", "macro-F1", "test rows", "trained on", "wall time"]


@dataclass(frozen=True)
class Entry:
    """A row of the table. ``command``: what trained it; ``dataset``: the name its metrics.json gives."""

    name: str
    test: Mapping[str, Any]
    train_rows: int
    seconds: float | None
    command: str = ""

    def cells(self) -> list[str]:
        """The row as Markdown."""
        low, high = wilson_interval(self.test["accuracy"], self.test["rows"])
        return [
            self.name,
            format_percent(self.test["accuracy"]),
            f"{format_percent(low)} to {format_percent(high)}",
            f"{self.test['macro_f1']:.4f}",
            f"{self.test['rows']:,}",
            f"{self.train_rows:,}",
            "–" if self.seconds is None else format_time(self.seconds),
        ]


def main() -> None:
    """Fit the baseline, read the models, write the page."""
    options = _parse()
    entries = [read_model(folder) for folder in options.models]
    data = load_news(options.dataset, options.seed)
    for folder, entry in zip(options.models, entries, strict=True):
        if entry.test["rows"] != len(data.test):
            raise UserError(
                f"--models {folder}: was tested on {entry.test['rows']} rows, --dataset has {len(data.test)}",
                code="benchmark-input",
            )
    entries = [fit_baseline(data, options), *entries]
    write_table(options.output, render(entries, data))
    print(f"Written: {options.output}")


def fit_baseline(data: NewsData, options: Namespace) -> Entry:
    """Fit TF-IDF + LinearSVC on the rows that training takes, without those kept for validation.

    Raises:
        UserError: scikit-learn is missing.
    """
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.svm import LinearSVC
    except ImportError as error:
        raise UserError("scikit-learn is missing: pip install '.[bench]'", code="package-missing") from error
    train, _ = split_rows(data.train.labels, options.validation_fraction, options.seed)
    print(f"Fitting {BASELINE} on {len(train):,} rows ...", flush=True)
    started = time.perf_counter()
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    features = vectorizer.fit_transform(clean_text(data.train.texts[i]) for i in train)
    svm = LinearSVC(random_state=options.seed).fit(features, data.train.labels[train])
    seconds = time.perf_counter() - started
    scores = svm.decision_function(vectorizer.transform(map(clean_text, data.test.texts)))
    if scores.ndim == 1:  # two classes have one score
        scores = np.stack([-scores, scores], axis=1)
    test = classification_metrics(scores, data.test.labels, data.label_names)
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
        raise UserError(f"--models {folder}: {path} cannot be read ({error})", code="data-unreadable") from error
    run_dir = folder.with_name(f"{folder.name}.run")
    seconds = [record["seconds"] for record in read_metrics(run_dir) if record["kind"] == "step"]
    return Entry(name, test, train_rows, max(seconds, default=None), training_command(run_dir))


def training_command(run_dir: Path) -> str:
    """The command that makes a run's configuration, with paths cut to their last part; empty if it is not kept."""
    path = run_dir / "config.yaml"
    if not path.exists():
        return ""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    defaults = TrainConfig().model_dump(mode="json")
    hidden = ("cache_dir", "output_dir", "resume")
    changed = [name for name in values if name not in hidden and values[name] != defaults.get(name)]
    flags = (f"--{name} {_short(values[name])}" for name in changed)
    return " ".join(["training/run_ddp.sh", *flags])


def _short(value: Any) -> str:
    return f".../{Path(value).name}" if isinstance(value, str) and Path(value).is_absolute() else str(value)


def render(entries: list[Entry], data: NewsData) -> str:
    """The page."""
    facts = circumstances(MODULE) | {"Data": f"{Path(data.name).name}; {len(data.test):,} test rows"}
    facts |= {f"Trained by ({entry.name})": f"`{entry.command}`" for entry in entries if entry.command}
    return (
        f"# Accuracy\n\nWritten by `python -m {MODULE}`: the baseline is fitted here, the other rows are the test in "
        "each model folder's `metrics.json`. All were tested once, on the same rows. The interval is Wilson's; the "
        "wall time runs to the last training step and, for models, includes the validation after each epoch but the "
        f"last.\n\n{fact_list(facts)}\n{markdown_table(HEADER, [entry.cells() for entry in entries])}"
    )


def _parse() -> Namespace:
    defaults = TrainConfig()
    parser = Parser(MODULE, str(__doc__).split("\n")[0])
    parser.add_argument("--dataset", default=SAMPLE, help="as in training (default: the built-in sample)")
    parser.add_argument("--models", nargs="*", type=Path, default=[], metavar="FOLDER", help="model folders")
    parser.add_argument(
        "--validation_fraction", type=float, default=defaults.validation_fraction, help="as in training (default: 0.1)"
    )
    parser.add_argument("--seed", type=int, default=defaults.seed, help="as in training (default: 42)")
    parser.add_argument(
        "--output", type=Path, default=HERE / "accuracy.md", help="the page (default: benchmarks/accuracy.md)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
