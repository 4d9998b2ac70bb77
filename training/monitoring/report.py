"""Report: one HTML page, complete in one file, of what a run achieved; and its plots as PNG files next to it."""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.files import write_whole
from common.text import counted
from training.config import FAULTS
from training.data.report import in_words
from training.monitoring.events import read_metrics
from training.monitoring.profiler import operator_table, rank_table, read_summary
from training.monitoring.records import (
    calibration_in_words,
    format_percent,
    format_time,
    metrics_of,
    wilson_interval,
)

if TYPE_CHECKING:
    from training.monitoring.plots import Curves
    from training.tasks.task import RowAnswer

REPORT_FILE = "report.html"
# Drawn below the tables of the test; all others are of the training.
PLOTS_OF_TEST = ("confusion_matrix", "reliability", "predictions")
MOST_WRONG_TEXTS = MOST_DOUBTED_TEXTS = 20
LONGEST_TEXT = 700
# The page's only script. Its hash is in the page's policy, so that nothing else can run there.
COPY_SCRIPT = """
for (const button of document.querySelectorAll("button.copy")) {
  button.hidden = !navigator.clipboard;  // not over plain HTTP
  button.onclick = async () => {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
  };
}
"""
PLOTS = {
    "loss": "Training and validation loss by step",
    "validation": "Metrics on the validation rows by epoch",
    "learning_rate": "Learning rate by step",
    "throughput": "Samples per second by step",
    "gradient_norm": "Gradient norm by step",
    "confusion_matrix": "Confusion matrix of the test: true class by predicted class",
    "reliability": "Share of right answers to test texts by the confidence of the answer",
    "predictions": "Test rows in tenths by predicted number: the mean true number of each",
}


@dataclass(frozen=True)
class WrongText:
    """A text that the model got wrong; ``certainty``: what the answer's figure of that name means."""

    text: str
    answer: RowAnswer
    certainty: str


@dataclass(frozen=True)
class DoubtedText:
    """A training text whose label the run finds improbable; ``doubt``: 1 minus its probability."""

    row: int
    label: str
    proposed: str
    doubt: float
    is_flagged: bool
    text: str


@dataclass(frozen=True)
class ReportData:
    """What the report shows in addition to the curves of metrics.jsonl; ``test`` is an evaluation,
    and ``baseline`` a figure to compare it with, and what that is.

    Of the ``wrong_texts`` it shows those whose answers are most wrong, and of the ``doubted_texts``
    the first ones. ``command``: starts the same run, empty if none does; ``changed``: the part of
    the configuration that is not as by default; ``figures``: of the data report; none of a language
    model.
    """

    title: str
    command: str
    configuration: dict[str, Any]
    changed: dict[str, Any]
    environment: dict[str, str]
    test: dict[str, Any]
    wrong_texts: Sequence[WrongText]
    doubted_texts: Sequence[DoubtedText]
    notes: list[str]
    seconds: float
    model_folder: str
    baseline: tuple[str, str] | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


def write_report(run_dir: Path, report: ReportData) -> Path:
    """Write ``report.html`` and ``plots/*.png`` into ``run_dir`` from its metrics.jsonl.

    Returns:
        The page's path. It needs no other file and no network.
    """
    import jinja2
    from markupsafe import Markup

    # Here and not at the top, because matplotlib takes a second to import.
    from training.monitoring.plots import DARK, LIGHT, Curves, draw_all

    records = read_metrics(run_dir)
    curves = Curves(_last_of_each_step(records, "step"), _last_of_each_step(records, "epoch"))
    # The page holds both sets and shows the one that the reader's screen asks for. The files beside
    # it are the light ones.
    light, dark = (draw_all(curves, report.test, theme) for theme in (LIGHT, DARK))
    (run_dir / "plots").mkdir(exist_ok=True)
    for name, png in light.items():
        write_whole(run_dir / "plots" / f"{name}.png", png)

    # The texts are other people's, so all of them are escaped. A name that the template misspells
    # is an error, where jinja2 would leave a hole in the page by default.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": format_percent,
        "decimal": _decimal,
        "duration": format_time,
        "shorten": _shorten,
    }
    page = environment.get_template(REPORT_FILE).render(
        report=report,
        test=report.test,
        **_training(report, curves, records),
        plots={
            name: (PLOTS[name], _data_url(light[name]), _data_url(dark[name]))
            for name in PLOTS
            if name in light
        },
        title=_title(report),
        script=Markup(COPY_SCRIPT),
        script_hash=base64.b64encode(hashlib.sha256(COPY_SCRIPT.encode()).digest()).decode(),
        plots_of_test=PLOTS_OF_TEST,
        calibration=calibration_in_words(report.test),
        profile=_profile(run_dir),
        data_facts=in_words(report.figures) if report.figures else {},
        faults={
            name: rows for name in FAULTS if (rows := report.figures.get(name, {}).get("rows"))
        },
        wrong_texts=sorted(report.wrong_texts, key=lambda wrong: -wrong.answer.surprise)[
            :MOST_WRONG_TEXTS
        ],
        doubted_texts=report.doubted_texts[:MOST_DOUBTED_TEXTS],
        written=datetime.now().astimezone().strftime("%d %B %Y, %H:%M %Z"),
    )
    write_whole(run_dir / REPORT_FILE, page.encode())
    return run_dir / REPORT_FILE


def _title(report: ReportData) -> str:
    """What was trained on what, and how good it is, such as for a bookmark."""
    if not report.test["rows"]:
        return report.title
    name, metric = next(iter(metrics_of(report.test).items()))
    return f"{report.title}: {metric.title} {metric.shown(report.test[name])}"


def _training(
    report: ReportData, curves: Curves, records: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What the page shows of the records of metrics.jsonl."""
    of_kind = {
        kind: [record for record in records if record["kind"] == kind]
        for kind in ("efficiency", "collectives")
    }
    efficiencies = [record["scaling_efficiency"] for record in of_kind["efficiency"]]
    collectives = [record["operations"] for record in of_kind["collectives"]]
    last = curves.validated[-1]["validation"] if curves.validated else {}
    best = [record["epoch"] for record in curves.validated if record["is_best"]]
    return {
        "headline": _headline(report, curves, efficiencies),
        "epochs": curves.epochs,
        "epoch_metrics": list(metrics_of(last).items())[:2],
        "has_train_accuracy": any(
            record.get("train_accuracy") is not None for record in curves.epochs
        ),
        "best_epoch": max(best, default=None),
        "collectives": collective_table(collectives) if collectives else None,
    }


def _profile(run_dir: Path) -> dict[str, Any] | None:
    profiles = read_summary(run_dir)
    if not profiles:
        return None
    first = profiles[0]
    return {
        "steps": f"{first.first_step:,} to {first.last_step:,}",
        "rank": first.rank,
        "tables": [rank_table(profiles), operator_table(first)],
        "traces": [one.trace for one in profiles],
    }


def collective_table(
    recorded: Sequence[dict[str, dict[str, float]]],
) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: what the recorded steps spent on each collective operation, per step, the longest first."""
    count, rows = len(recorded), []
    # A step that did not call an operation counts as 0 for it: all means are over the same steps.
    totals = {
        name: {
            key: sum(step.get(name, {}).get(key, 0) for step in recorded) / count
            for key in ("calls", "bytes", "seconds")
        }
        for name in {name for step in recorded for name in step}
    }
    for name, mean in sorted(totals.items(), key=lambda item: -item[1]["seconds"]):
        figures = (
            f"{mean['calls']:,.1f}",
            f"{mean['bytes'] / 1e6:,.2f} MB",
            f"{1000 * mean['seconds']:,.2f} ms",
        )
        rows.append([name, *figures])
    return ["Operation", "Calls per step", "Bytes per step", "Time per step"], rows


def _last_of_each_step(records: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    # A run that stopped between an epoch's last checkpoint and its validation writes that line
    # twice.
    by_step = {record["step"]: record for record in records if record["kind"] == kind}
    return [by_step[step] for step in sorted(by_step)]


# Medians at the top of the page: what they are of, the tile's title, digits after the point, small
# print.
SHARES = (
    (
        "efficiency",
        "Scaling efficiency",
        1,
        "median; what the ranks lost by waiting is missing from 100%",
    ),
    (
        "gpu_utilization",
        "GPU utilization",
        0,
        "median share of the time in which rank 0's GPU computed",
    ),
    ("mfu", "MFU", 1, "median share of the devices' peak"),
)


def _headline(
    report: ReportData, curves: Curves, efficiencies: Sequence[float]
) -> list[tuple[str, str, str]]:
    """The tiles at the top of the page: name, figure, small print."""
    tiles = _test_tiles(report.test) if report.test["rows"] else []
    if report.baseline:
        tiles.append(("Linear baseline", *report.baseline))
    steps = max((record["step"] for record in [*curves.steps, *curves.epochs]), default=0)
    steps_done = f"{steps:,} optimizer steps" if steps else "no step was logged"
    tiles.append(("Time", format_time(report.seconds), steps_done))
    # Medians, because a mean would show the first step, which starts threads and allocates memory.
    samples, tokens = (
        [value for value in curves.column(name) if math.isfinite(value)]
        for name in ("samples_per_second", "tokens_per_second")
    )
    if samples:
        small_print = f"median; {statistics.median(tokens or [0.0]):,.0f} tokens per second"
        tiles.append(("Samples/s", f"{statistics.median(samples):,.1f}", small_print))
    shares_of = {"efficiency": efficiencies} | {
        name: [record[name] for record in curves.steps if name in record]
        for name in ("gpu_utilization", "mfu")
    }
    for name, title, digits, small_print in SHARES:
        if shares := shares_of[name]:
            tiles.append((title, format_percent(statistics.median(shares), digits), small_print))
    return tiles


def _test_tiles(test: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    small_prints = {
        "macro_f1": f"over {len(test['labels'])} classes, {counted(test['rows'], 'text')}",
        "calibration_error": calibration_in_words(test) or "how far confidence is from accuracy",
        "micro_f1": "over all labels and texts",
        "exact_match": "share of the texts",
        "rmse": f"of {', '.join(test['labels'])}, {counted(test['rows'], 'text')}",
        "mae": f"of {', '.join(test['labels'])}",
        "r2": "share of the variance explained",
        "spearman": "correlation of the ranks",
        "perplexity": f"over {test.get('tokens', 0):,} tokens",
        "token_accuracy": "of those that are predicted",
    }
    if "accuracy" in test:
        low, high = map(format_percent, wilson_interval(test["accuracy"], test["rows"]))
        small_prints["accuracy"] = f"95% interval {low} to {high}"
    tiles = []
    for number, (name, metric) in enumerate(metrics_of(test).items()):
        title = metric.title if number else f"test {metric.title}"
        small_print = small_prints.get(name, "your own metric")
        tiles.append((title[0].upper() + title[1:], metric.shown(test[name]), small_print))
    return tiles


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1].rstrip() + "…"


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _decimal(value: float | None) -> str:
    # metrics.jsonl holds null if a loss was not finite.
    return "not finite" if value is None else f"{value:.4f}"
