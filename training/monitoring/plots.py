"""Plots: the curves and the confusion matrix of a run as PNG, for a light and a dark page.

This module imports matplotlib, which takes a second, so only reports import it, when they are
written.
"""

import io
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, PercentFormatter

from common.escaping import printable
from training.monitoring.records import (
    METRICS,
    SMALLER_IS_BETTER,
    Metric,
    SearchedTrial,
    metrics_of,
)

DOTS_PER_INCH = 200
# Of width or height. A confusion matrix of many classes has fewer dots per inch, which saves memory
# and file size.
MOST_PIXELS = 2_600
# Small in inches, so that the letters can still be read when a phone shows the figure 360 pixels
# wide.
CURVE_INCHES = (4.6, 2.9)
LONGEST_LABEL = 20
FEWEST_TO_SMOOTH = 15
INCHES_PER_LETTER = 0.085
# With more classes a cell has no room for a legible number, only for its colour.
MOST_CLASSES_WITH_NUMBERS = 24
SEARCH_WIDTH = 7.2
MOST_NAMED_VALUES = 6


@dataclass(frozen=True)
class Curves:
    """The step and epoch records of metrics.jsonl, in the order of steps, each step once."""

    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]

    def column(self, name: str) -> list[float]:
        return _nan_for_null([record[name] for record in self.steps])

    @property
    def validated(self) -> list[dict[str, Any]]:
        """The epochs after which there was a validation: all or none."""
        return [record for record in self.epochs if record["validation"]]

    def validation(self, name: str) -> list[float]:
        return _nan_for_null([record["validation"][name] for record in self.validated])


def _nan_for_null(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


@dataclass(frozen=True)
class Theme:
    """Colours of one page; those of the two series can be told apart by colour-blind readers (Okabe and Ito)."""

    surface: str
    ink: str
    muted: str
    grid: str
    first: str
    second: str


LIGHT = Theme("#ffffff", "#1c2128", "#5b6470", "#e4e7eb", "#0072b2", "#d55e00")
DARK = Theme("#161b22", "#e6edf3", "#9aa5b1", "#2b323b", "#56b4e9", "#f0a23b")


def draw_all(curves: Curves, test: Mapping[str, Any], theme: Theme) -> dict[str, bytes]:
    """PNG bytes of each plot for which there are records.

    The names are loss, validation, learning_rate, throughput, gradient_norm, and of the test
    confusion_matrix and reliability, or predictions.
    """
    # The style holds within this context only, because both themes are drawn in one process.
    # Figures are made without pyplot, which would keep each of them until it is closed.
    with mpl.rc_context(_style(theme)):
        figures: dict[str, Figure] = {}
        # A run that fits a head alone has neither steps nor an epoch after 0, so no curve.
        if curves.steps or any(record["epoch"] for record in curves.epochs):
            figures["loss"] = _loss(curves, theme)
        if any(record["epoch"] for record in curves.validated):
            figures["validation"] = _validation(curves, test, theme)
        if curves.steps:
            figures["learning_rate"] = _learning_rate(curves, theme)
            figures["throughput"] = _throughput(curves, theme)
            figures["gradient_norm"] = _gradient_norm(curves, theme)
        if "confusion_matrix" in test:
            figures["confusion_matrix"] = _confusion_matrix(test, theme)
        if test.get("reliability"):
            figures["reliability"] = _reliability(test, theme)
        if "by_tenth" in test:
            figures["predictions"] = _predictions(test, theme)
        return {
            name: _png(figure, min(DOTS_PER_INCH, MOST_PIXELS / max(figure.get_size_inches())))
            for name, figure in figures.items()
        }


def draw_search(
    trials: Sequence[SearchedTrial], metric: str, log_scaled: Collection[str], theme: Theme
) -> bytes:
    """PNG bytes of a search: the metric of each trial with the best so far, and below it by each
    searched field.

    The best trial comes first in ``trials``; the fields in ``log_scaled`` have a logarithmic axis.
    """
    shown = [trial for trial in trials if trial.value is not None and math.isfinite(trial.value)]
    fields = list(trials[0].values)
    columns = 3 if len(fields) not in (1, 2, 4) else 2
    rows = math.ceil(len(fields) / columns)
    with mpl.rc_context(_style(theme)):
        figure = Figure(figsize=(SEARCH_WIDTH, 2.9 + 2.3 * rows), layout="constrained")
        grid = figure.add_gridspec(1 + rows, columns, height_ratios=[1.25, *[1] * rows])
        axes = figure.add_subplot(grid[0, :])
        _by_trial(axes, trials, shown, metric, theme)
        for index, name in enumerate(fields):
            row, column = divmod(index, columns)
            panel = figure.add_subplot(grid[1 + row, column], sharey=axes)
            _by_field(
                panel, shown, name, theme, is_log=name in log_scaled, inches=SEARCH_WIDTH / columns
            )
            panel.tick_params(axis="y", labelleft=column == 0)
        return _png(figure, DOTS_PER_INCH)


def _png(figure: Figure, dots: float) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dots)
    return buffer.getvalue()


def _by_trial(
    axes: Axes,
    trials: Sequence[SearchedTrial],
    shown: Sequence[SearchedTrial],
    metric: str,
    theme: Theme,
) -> None:
    """The figure of each trial, the best so far, and which trials have none."""
    shown_as = METRICS.get(metric, Metric(metric, is_share=False))
    axes.set_title(f"Validation {shown_as.title} by trial")
    if shown_as.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_xlabel("trial")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    finished = sorted(
        (trial for trial in shown if trial.state == "finished"), key=lambda trial: trial.number
    )
    if finished:
        better = np.minimum if metric in SMALLER_IS_BETTER else np.maximum
        so_far = better.accumulate([trial.value for trial in finished])
        # The line goes on to the last trial of all: one that failed or was pruned has not changed
        # the best so far.
        steps = [*(trial.number for trial in finished), max(trial.number for trial in trials)]
        axes.step(
            steps, [*so_far, so_far[-1]], where="post", color=theme.second, label="best so far"
        )
    _trial_points(axes, shown, [trial.number for trial in shown], theme)
    failed = [trial.number for trial in trials if trial.value is None]
    if failed:  # at the bottom: they have no figure
        bottom = axes.get_xaxis_transform()
        axes.plot(
            failed, [0.04] * len(failed), "x", color=theme.muted, label="failed", transform=bottom
        )
    _legend_above(axes, columns=4)


def _by_field(
    axes: Axes,
    trials: Sequence[SearchedTrial],
    name: str,
    theme: Theme,
    *,
    is_log: bool,
    inches: float,
) -> None:
    """The figure of each trial by its value of a searched field, on a panel that is ``inches`` wide."""
    values = [trial.values[name] for trial in trials]
    if is_log:
        axes.set_xscale("log")
    # Fractions keep a scale even if they are few, because their distances mean something.
    elif len(set(values)) <= MOST_NAMED_VALUES and not all(
        isinstance(value, float) for value in values
    ):
        # Few values: evenly spaced, under their names.
        names = sorted(set(values), key=lambda value: (isinstance(value, str), value))
        values = [names.index(value) for value in values]
        labels = [_shorten(str(value)) for value in names]
        is_narrow = INCHES_PER_LETTER * sum(map(len, labels)) > inches - 1
        small = {"fontsize": 7.5} if is_narrow else {}
        # A name that was shortened is broken where it was cut, and so needs half the width.
        labels = [label.replace("…", "…\n") for label in labels]
        axes.set_xticks(range(len(names)), labels, parse_math=False, **small)
        axes.set_xlim(-0.5, len(names) - 0.5)
    _trial_points(axes, trials, values, theme)
    axes.set_xlabel(name)
    axes.tick_params(which="minor", length=0)


def _trial_points(
    axes: Axes, trials: Sequence[SearchedTrial], positions: Sequence[Any], theme: Theme
) -> None:
    # A pruned trial is an empty circle: its figure is one of an earlier epoch, not of a whole run.
    fillings = {"finished": theme.first, "pruned": theme.surface}
    for state, filling in fillings.items():
        points = [
            (x, trial.value)
            for x, trial in zip(positions, trials, strict=True)
            if trial.state == state
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                "o",
                color=theme.first,
                markerfacecolor=filling,
                label=state,
            )
    # Trials come best first. The best one is drawn last, on top of the others.
    if trials and trials[0].state == "finished":
        axes.plot(positions[0], trials[0].value, "o", color=theme.second)


def _loss(curves: Curves, theme: Theme) -> Figure:
    figure, axes = _curve_axes("Loss", "step")
    if curves.steps:
        steps, losses = curves.column("step"), np.array(curves.column("loss"))
        if len(losses) < FEWEST_TO_SMOOTH:
            axes.plot(steps, losses, "o-", color=theme.first, label="training")
        else:
            # The loss of single batches jumps, so it stays pale in the background, and its mean
            # shows where it goes.
            window = max(3, len(losses) // 25)
            mean = _moving_mean(losses, window)
            axes.plot(steps, losses, color=theme.first, alpha=0.4, linewidth=0.8, label="training")
            axes.plot(steps, mean, color=theme.first, label=f"mean of {window:,} points")
    if curves.validated:
        steps = [record["step"] for record in curves.validated]
        axes.plot(steps, curves.validation("loss"), "o-", color=theme.second, label="validation")
    _legend_above(axes)
    return figure


def _validation(curves: Curves, test: Mapping[str, Any], theme: Theme) -> Figure:
    """The first metric of the task, and the second one if it is of the same kind."""
    (main, metric), (other, second), *_ = metrics_of(curves.validated[-1]["validation"]).items()
    figure, axes = _curve_axes(metric.title[0].upper() + metric.title[1:], "epoch")
    epochs = [record["epoch"] for record in curves.validated]
    shown = values = curves.validation(main)
    axes.plot(epochs, values, "o-", color=theme.first, label="validation")
    if metric.is_share == second.is_share:
        others = curves.validation(other)
        axes.plot(epochs, others, "s--", color=theme.second, label=second.title, linewidth=1.2)
        shown = [*values, *others]
    # With dropout, and while the weights still changed, so it may be below the others.
    trained = _nan_for_null([record.get("train_accuracy") for record in curves.validated])
    if main == "accuracy" and np.isfinite(trained).any():
        axes.plot(epochs, trained, "^:", color=theme.muted, label="training", linewidth=1.2)
        shown = [*shown, *trained]
    if test:
        axes.axhline(test[main], color=theme.muted, linestyle=":", label="test, best epoch")
        shown = [*shown, test[main]]
    low, high = np.nanmin(shown), np.nanmax(shown)
    # At least a hundredth of the values, or a flat curve would be blown up until its noise fills
    # the plot.
    margin = max(0.01 * max(1.0, abs(high)), 0.15 * (high - low))
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(min(epochs) - 0.5, max(epochs) + 0.5)
    if metric.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    _legend_above(axes, columns=2)
    return figure


def _learning_rate(curves: Curves, theme: Theme) -> Figure:
    figure, axes = _curve_axes("Learning rate", "step")
    axes.plot(
        curves.column("step"), curves.column("learning_rate"), _mark(curves), color=theme.first
    )
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    axes.set_ylim(bottom=0)
    return figure


def _throughput(curves: Curves, theme: Theme) -> Figure:
    figure, axes = _curve_axes("Throughput, samples per second", "step")
    # The first interval starts threads and allocates: beside it, the others would seem unsteady.
    first = 1 if len(curves.steps) > 2 else 0
    steps, speed = (curves.column(name)[first:] for name in ("step", "samples_per_second"))
    axes.plot(steps, speed, _mark(curves), color=theme.first, linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if known := [value for value in speed if math.isfinite(value)]:
        median = statistics.median(known)
        axes.axhline(median, color=theme.second, linestyle="--", label=f"median {median:,.1f}")
        _legend_above(axes)
    return figure


def _gradient_norm(curves: Curves, theme: Theme) -> Figure:
    figure, axes = _curve_axes("Gradient norm before clipping", "step")
    norms = curves.column("grad_norm")
    axes.plot(curves.column("step"), norms, _mark(curves), color=theme.first, linewidth=1.2)
    known = [norm for norm in norms if math.isfinite(norm)]
    # On a linear axis, one spike of a hundred times the rest would press the curve into the floor.
    if known and min(known) > 0 and max(known) > 20 * statistics.median(known):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    return figure


def _reliability(test: Mapping[str, Any], theme: Theme) -> Figure:
    """A bar for each tenth of the confidences: the share of its answers that is right."""
    figure, axes = _curve_axes("Right answers by confidence", "confidence")
    axes.plot([0, 1], [0, 1], color=theme.muted, linestyle=":", label="confidence = share right")
    for count, confidence, right in test["reliability"]:
        middle = min(int(confidence * 10), 9) / 10 + 0.05
        axes.bar(middle, right, width=0.09, color=theme.first, zorder=2)
        axes.text(middle, right + 0.02, f"{count:,}", ha="center", color=theme.muted, fontsize=7.5)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.1)
    axes.xaxis.set_major_locator(MultipleLocator(0.2))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_locator(MultipleLocator(0.2))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend_above(axes)
    return figure


def _predictions(test: Mapping[str, Any], theme: Theme) -> Figure:
    figure, axes = _curve_axes(f"True {test['labels'][0]} by predicted", "predicted")
    predicted, actual = zip(*test["by_tenth"], strict=True)
    ends = [min(*predicted, *actual), max(*predicted, *actual)]
    axes.plot(ends, ends, color=theme.muted, linestyle=":", label="equal")
    axes.plot(predicted, actual, "o-", color=theme.first, label="mean of a tenth of the rows")
    _legend_above(axes)
    return figure


def _confusion_matrix(test: Mapping[str, Any], theme: Theme) -> Figure:
    counts = np.asarray(test["confusion_matrix"], dtype=np.int64)  # (true, predicted)
    # Of each true class, so that a rare one can be seen beside a frequent one. A class without a
    # row stays empty instead of becoming NaN.
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    classes = len(counts)
    labels = [_shorten(label) for label in test["labels"]]
    # Inches per cell. Two classes get large cells; from 20 on they shrink no more, and from 40 on
    # the figure does not grow any further either.
    cell = float(np.interp(classes, [2, 4, 20], [1.2, 0.9, 0.52]))
    side = cell * min(classes, 40)
    longest = INCHES_PER_LETTER * max(map(len, labels))
    is_slanted = longest > cell
    width = side + longest + 0.65
    height = side + (longest if is_slanted else 0.25) + 0.75
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    colours = LinearSegmentedColormap.from_list("share", [theme.surface, theme.first])
    # The exponent makes small shares visible, which are the confusions.
    # Squares instead of an image, which matplotlib would compute in float64 for each of millions of
    # pixels.
    edges = np.arange(classes + 1) - 0.5
    squares = {
        "cmap": colours,
        "norm": PowerNorm(0.6, 0, 1),
        "edgecolors": theme.grid,
        "linewidth": 0.8,
    }
    axes.pcolormesh(edges, edges, shares, **squares)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.set_title("Confusion matrix", pad=10)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    # A label is a name, not mathematics: parse_math would stumble over a dollar sign.
    axes.set_xticks(range(classes), labels, parse_math=False)
    axes.set_yticks(range(classes), labels, parse_math=False)
    axes.grid(False)
    if is_slanted:
        axes.tick_params(axis="x", labelrotation=45, labelrotation_mode="xtick")
    if classes <= MOST_CLASSES_WITH_NUMBERS:
        size = float(np.interp(classes, [4, 20], [11, 7.5]))
        for row, column in np.ndindex(counts.shape):
            count, share = int(counts[row, column]), float(shares[row, column])
            text = f"{count:,}\n{share:.1%}" if count else "0"
            # A cell that is nearly full is dark on a light page, and light on a dark one: the
            # number takes the page's colour there.
            colour = theme.surface if share > 0.7 else (theme.ink if count else theme.muted)
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=size)
    return figure


def _curve_axes(title: str, x_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=CURVE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return figure, axes


def _legend_above(axes: Axes, columns: int = 3) -> None:
    # Between title and curves, so that no curve runs through it. A legend that is wider than the
    # axes would make the layout shrink them, so a long one has two rows, and the title moves up.
    rows = math.ceil(len(axes.get_legend_handles_labels()[1]) / columns)
    axes.set_title(axes.get_title("left"), pad=mpl.rcParams["axes.titlepad"] + 14 * (rows - 1))
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.99),
        ncols=columns,
        borderpad=0,
        columnspacing=1.4,
    )


def _moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    # Centred, so that it does not lag; over fewer values at both ends and next to a gap.
    known = np.isfinite(values)
    ones = np.ones(window)
    # Values and their number are summed up apart, so one that is not finite is left out, where it
    # would turn its whole window into NaN.
    count = np.convolve(known, ones, mode="same")
    total = np.convolve(np.where(known, values, 0.0), ones, mode="same")
    return np.where(count > 0, total / np.maximum(1, count), np.nan)


def _mark(curves: Curves) -> str:
    return "o-" if len(curves.steps) < FEWEST_TO_SMOOTH else "-"


def _shorten(label: str) -> str:
    # A character without a glyph would go to the terminal in matplotlib's warning.
    label = printable(label)
    # Cut in the middle, because names of one family differ at their ends.
    return label if len(label) <= LONGEST_LABEL else f"{label[:10]}…{label[-9:]}"


def _style(theme: Theme) -> dict[str, Any]:
    return {
        "figure.facecolor": theme.surface,
        "axes.facecolor": theme.surface,
        "axes.edgecolor": theme.grid,
        "axes.labelcolor": theme.muted,
        "axes.titlecolor": theme.ink,
        "axes.titlelocation": "left",
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "axes.titlepad": 26,
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": theme.grid,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "text.color": theme.ink,
        "font.size": 10,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.8,
    }
