"""Report: one page that tells what a run came to, whole in one file; and its plots as PNG beside it."""

import base64
import math
import statistics
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from common.files import write_whole
from training.monitoring.profile_summary import operator_table, rank_table, read_summary
from training.monitoring.records import Curves, ReportData, WrongText, format_percent, format_time, wilson_interval
from training.monitoring.run_log import read_metrics

REPORT_FILE = "report.html"
MOST_WRONG_TEXTS = 20
LONGEST_TEXT = 700
PLOTS = {
    "loss": "Training and validation loss by step",
    "accuracy": "Validation accuracy and macro F1 by epoch",
    "learning_rate": "Learning rate by step",
    "throughput": "Samples per second by step",
    "gradient_norm": "Gradient norm by step",
    "confusion_matrix": "Confusion matrix of the test: true class by predicted class",
}


def write_report(run_dir: Path, report: ReportData) -> Path:
    """Write `report.html` and `plots/*.png` into `run_dir` from its metrics.jsonl.

    Returns:
        The page's path. It needs no other file and no network.
    """
    import jinja2

    # matplotlib takes a second to import; the hours before are not its time.
    from training.monitoring.plots import DARK, LIGHT, draw_all

    records = read_metrics(run_dir)
    curves = Curves(_last_of_each_step(records, "step"), _last_of_each_step(records, "epoch"))
    light, dark = (draw_all(curves, report.test, theme) for theme in (LIGHT, DARK))
    (run_dir / "plots").mkdir(exist_ok=True)
    for name, png in light.items():
        write_whole(run_dir / "plots" / f"{name}.png", png)

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": format_percent, "decimal": _decimal, "duration": format_time}
    page = environment.get_template(REPORT_FILE).render(
        report=report,
        test=report.test,
        headline=_headline(report, curves),
        epochs=curves.epochs,
        best_epoch=max((record["epoch"] for record in curves.epochs if record["is_best"]), default=None),
        plots={name: (alt, _data(light[name]), _data(dark[name])) for name, alt in PLOTS.items() if name in light},
        profile=_profile(run_dir),
        wrong_texts=_most_wrong(report.wrong_texts),
        written=datetime.now().astimezone().strftime("%d %B %Y, %H:%M %Z"),
    )
    write_whole(run_dir / REPORT_FILE, page.encode())
    return run_dir / REPORT_FILE


def _profile(run_dir: Path) -> dict[str, Any] | None:
    profiles = read_summary(run_dir)
    if not profiles:
        return None
    of = profiles[0]
    return {
        "steps": f"{of.first_step:,} to {of.last_step:,}",
        "rank": of.rank,
        "tables": [rank_table(profiles), operator_table(of)],
        "traces": [profile.trace for profile in profiles],
    }


def _last_of_each_step(records: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    # A run that stopped between an epoch's last checkpoint and its validation writes that line twice.
    by_step = {record["step"]: record for record in records if record["kind"] == kind}
    return [by_step[step] for step in sorted(by_step)]


def _headline(report: ReportData, curves: Curves) -> list[tuple[str, str, str]]:
    # (name, figure, small print)
    tiles = []
    if test := report.test:
        low, high = wilson_interval(test["accuracy"], test["rows"])
        tiles = [
            (
                "Test accuracy",
                format_percent(test["accuracy"]),
                f"95% interval {format_percent(low)} to {format_percent(high)}",
            ),
            (
                "Macro F1",
                format_percent(test["macro_f1"]),
                f"over {len(test['labels'])} classes, {test['rows']:,} texts",
            ),
            (
                "Calibration error",
                format_percent(test["calibration_error"]),
                "how far confidence is from accuracy",
            ),
        ]
    tiles.append(("Time", format_time(report.seconds), _step_count(curves)))
    if speeds := _known(curves, "samples_per_second"):
        tokens = statistics.median(_known(curves, "tokens_per_second") or [0.0])
        tiles.append(
            (
                "Samples per second",
                f"{statistics.median(speeds):,.1f}",
                f"median; {tokens:,.0f} tokens per second",
            )
        )
    return tiles


def _known(curves: Curves, name: str) -> list[float]:
    return [value for value in curves.column(name) if math.isfinite(value)]


def _step_count(curves: Curves) -> str:
    steps = max((record["step"] for record in [*curves.steps, *curves.epochs]), default=0)
    return f"{steps:,} optimizer steps" if steps else "no step was logged"


def _most_wrong(texts: Sequence[WrongText]) -> list[WrongText]:
    chosen = sorted(texts, key=lambda wrong: wrong.confidence, reverse=True)[:MOST_WRONG_TEXTS]
    return [WrongText(_cut(wrong.text), wrong.label, wrong.predicted, wrong.confidence) for wrong in chosen]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1].rstrip() + "…"


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _decimal(value: float | None) -> str:
    # metrics.jsonl holds null where a loss was not finite.
    return "not finite" if value is None else f"{value:.4f}"
