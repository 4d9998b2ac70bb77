"""Console: what rank 0 prints. Colours and a live bar in a terminal, plain lines anywhere else."""

from __future__ import annotations

import io
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich import console as rich_console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from common.escaping import printable
from common.text import counted
from training.monitoring.events import Event, Rescheduled, StepsAgreed, Subscriber
from training.monitoring.records import (
    EpochMetrics,
    StepMetrics,
    format_percent,
    format_time,
    metrics_of,
    wilson_interval,
)

PLAIN_WIDTH = 120
PLAIN_SECONDS = 30.0
PLAIN_SHARE = 0.1


@dataclass(frozen=True)
class Outcome:
    """What a finished run has achieved and left behind; ``exports``: it goes on and exports the model."""

    seconds: float
    best_epoch: int
    validation: Mapping[str, Any]
    test: Mapping[str, Any]
    model_folder: Path
    checkpoint_file: Path | None
    report: Path
    exports: bool = False
    by_folds: str = ""
    baseline: str = ""
    earlier_labels: str = ""
    hints: Sequence[str] = ()

    def facts(self) -> dict[str, str]:
        """Name and value of each line to print."""
        no_rows = "" if self.test["rows"] else "none, no row has a label"
        others = {
            "Test": no_rows,
            "Linear baseline": self.baseline,
            "Its old labels": self.earlier_labels,
            "Model folder": str(self.model_folder),
            "One file": str(self.checkpoint_file or ""),
            "Report": str(self.report),
            "Next": self._next_command(),
        }
        given = {name: value for name, value in others.items() if value}
        return self._chosen_by() | self._tested() | given

    def _chosen_by(self) -> dict[str, str]:
        if self.validation:
            name, metric = next(iter(metrics_of(self.validation).items()))
            value = f"validation {metric.title} {metric.shown(self.validation[name])}"
            return {"Best epoch": f"{self.best_epoch}, {value}"}
        why = "there were no validation rows to choose another one by"
        facts = {"Last epoch": f"{self.best_epoch}, {why}"} if self.best_epoch else {}
        return facts | ({"Fitted head": self.by_folds} if self.by_folds else {})

    def _tested(self) -> dict[str, str]:
        main, facts = next(iter(metrics_of(self.validation or self.test)), None), {}
        for name, metric in metrics_of(self.test).items():
            value, title = metric.shown(self.test[name]), metric.title[0].upper() + metric.title[1:]
            if name == main:
                title = f"Test {metric.title}"
                value += f" on {counted(self.test['rows'], 'row')}"
            if name == "accuracy":
                low, high = map(format_percent, wilson_interval(self.test[name], self.test["rows"]))
                value += f" (95% interval {low} to {high})"
            facts[title] = value
        return facts

    def _next_command(self) -> str:
        folder = shlex.quote(str(self.model_folder))
        if not self.checkpoint_file:
            # A language model: it is not served, but it can be trained further.
            return f"python -m training.train_single --model {folder} --dataset YOURS"
        # With --export the run goes on, and what it calls prints the next command itself.
        if self.exports:
            return ""
        rows = "" if self.test["rows"] else " --rows LABELLED.csv"
        return f"python -m inference.export {folder}{rows}"


class Console:
    """Prints to stdout; made on rank 0 only."""

    def __init__(self) -> None:
        # A times sign must not end a run on a terminal that only knows ASCII.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        self._epochs_shown: set[float] = set()
        self._has_accuracy = False  # of training, in the table of epochs
        # A dumb terminal cannot move its cursor back, which a live bar needs for every refresh.
        self.is_terminal = sys.stdout.isatty() and os.environ.get("TERM") not in (
            "dumb",
            "unknown",
            None,
        )
        # What is printed has other people's texts, labels and paths in it: their brackets are no
        # markup, their colons no emoji, and their numbers get no colours.
        self._rich = rich_console.Console(
            force_terminal=self.is_terminal,
            width=None if self.is_terminal else PLAIN_WIDTH,
            markup=False,
            highlight=False,
            emoji=False,
        )

    def say(self, text: str | Text) -> None:
        """Print one line, never wrapped, so that a path in it can be copied; a ``Text`` is printable already."""
        self._rich.print(printable(text) if isinstance(text, str) else text, soft_wrap=True)

    def banner(self, facts: Mapping[str, str]) -> None:
        self.facts("DistriNews training", facts)

    def progress(
        self, *, total_steps: int, first_step: int = 0, samples_done: int = 0
    ) -> ProgressBar:
        """The run's only progress bar; before a resume ``first_step`` steps and ``samples_done`` rows were done."""
        if first_step:
            self.say(
                f"Resuming after step {first_step:,} of {total_steps:,} ({samples_done:,} samples "
                "seen)"
            )
        return (
            LiveBar(self, total_steps, first_step)
            if self.is_terminal
            else PlainBar(self, total_steps)
        )

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show the progress of a loop over rows in a terminal; yields a function to call with the rows just done."""
        if not self.is_terminal:
            yield lambda rows: None
            return
        with Progress(console=self._rich, transient=True) as progress:
            task = progress.add_task(what, total=total)
            yield lambda rows: progress.advance(task, rows)

    def epoch_table(self, epochs: Sequence[EpochMetrics]) -> None:
        """Print a row for each epoch, below one heading for all of the run's."""
        shown = list(metrics_of(epochs[-1].validation).items())[:2]
        if not self._epochs_shown:
            # The first row may be that of a fitted head, which has learned from no step.
            last = epochs[-1]
            self._has_accuracy = last.train_accuracy is not None or "accuracy" in last.validation
        has_accuracy = self._has_accuracy
        # Widths are fixed, because the rows come one by one and have to align with those before.
        # They are of the longest value, such as 100.00%; with two usual metrics 73 columns.
        trained = ("train loss", *["accuracy"] * has_accuracy)
        validated = ("val loss", *(metric.title for _, metric in shown))
        widths = [max(8, len(title)) for title in (*trained, *validated)]
        if not self._epochs_shown:
            heading = _epoch_row("epoch", trained, validated, "time", widths)
            self.say(Text(printable(heading), "bold"))
        self._epochs_shown |= {metrics.epoch for metrics in epochs}
        # Several epochs may be marked: each was the best when it ended. The last of them still is.
        best = max(
            (metrics.epoch for metrics in epochs if metrics.is_best and metrics.validation),
            default=None,
        )
        for metrics in epochs:
            values = metrics.validation
            loss = [f"{values['loss']:.4f}" if values else "none"]
            accuracy = metrics.train_accuracy
            row = _epoch_row(
                f"{metrics.epoch:.4g}",
                [
                    f"{metrics.train_loss:.4f}",
                    *["" if accuracy is None else format_percent(accuracy)] * has_accuracy,
                ],
                loss + [metric.shown(values[name]) for name, metric in shown],
                format_time(metrics.seconds),
                widths,
            )
            is_best = metrics.epoch == best
            self.say(Text(row + "  * best" * is_best, "green" if is_best else ""))

    def rest_of_epochs(self, epochs: Sequence[EpochMetrics]) -> None:
        """Print the whole table if it has epochs that this process has not shown, those before a resume."""
        if not self._epochs_shown.issuperset(metrics.epoch for metrics in epochs):
            self._epochs_shown.clear()  # a second table, so with its own heading
            self.epoch_table(epochs)

    def table(self, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        table = self._table(headings)
        table.columns[0].justify = "left"
        for row in rows:
            table.add_row(*map(printable, row))
        self.say(Text(title, "bold"))
        self._rich.print(table)

    def examples(self, title: str, examples: Iterable[Iterable[Sequence[str]]]) -> None:
        """Groups of rows whose last column is a text, of which as much is shown as fits into a line."""
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for group in examples:
            for row in group:
                cells = [Text(printable(cell), no_wrap=True, overflow="ellipsis") for cell in row]
                table.add_row(" ", *cells)
            table.add_row("")
        self.say(Text(title, "bold"))
        self._rich.print(table)

    def _table(self, headings: Sequence[str]) -> Table:
        table = Table(
            box=box.SIMPLE_HEAD if self.is_terminal else None, pad_edge=False, show_edge=False
        )
        for heading in headings:
            table.add_column(heading, justify="right", header_style="bold", no_wrap=True)
        return table

    def finish(self, outcome: Outcome) -> None:
        """Print the results of the run, where its files are, and what would make it better."""
        facts = outcome.facts()
        self.facts(f"Done in {format_time(outcome.seconds)}", facts)
        for hint in outcome.hints:
            self.say(hint)
        if outcome.hints:
            self.say("")

    def facts(self, title: str, facts: Mapping[str, str]) -> None:
        width = max(map(len, facts), default=0)
        self.say("")
        self.say(Text(title, "bold"))
        for name, value in facts.items():
            self.say(Text.assemble("  ", (name.ljust(width), "cyan"), "  ", printable(value)))
        self.say("")


class ProgressBar(Subscriber):
    """The progress of the whole run, a context manager; lines printed meanwhile go above the bar."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total_steps = total_steps
        self._first_update: tuple[float, int] | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None: ...

    def receive(self, event: Event) -> None:
        """Move to the last step, and print a validated epoch."""
        match event:
            case StepsAgreed(steps):
                if steps:
                    self.update(steps[-1])
            case Rescheduled(total_steps):
                self._total_steps = total_steps
            case EpochMetrics():
                self._console.epoch_table([event])

    def update(self, metrics: StepMetrics) -> None:
        raise NotImplementedError

    def _eta(self, step: int) -> str:
        # The mean since the first update, including validations and saves, since those come again.
        # The first step is excluded: it starts threads, allocates and compiles, and takes many
        # times as long as the others.
        now = time.monotonic()
        first_time, first_step = self._first_update = self._first_update or (now, step)
        if step in (first_step, self._total_steps):
            return ""
        return (
            "ETA "
            f"{format_time((now - first_time) / (step - first_step) * (self._total_steps - step))}"
        )


class LiveBar(ProgressBar):
    """A bar that moves, with the figures of the last step on a line below it."""

    def __init__(self, console: Console, total_steps: int, first_step: int) -> None:
        super().__init__(console, total_steps)
        self._progress = _ProgressWithFigures(
            TextColumn("{task.description}", style="bold"),
            # rich's own colours are those of a warning.
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TaskProgressColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[time_left]}", style="cyan"),
            console=console._rich,
            refresh_per_second=2,
            expand=True,
        )
        self._task = self._progress.add_task(
            "starting", total=total_steps, completed=first_step, time_left=""
        )

    def __enter__(self) -> LiveBar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def update(self, metrics: StepMetrics) -> None:
        self._progress.figures = Text(
            "  ".join(_figures(metrics)), "dim", no_wrap=True, overflow="ellipsis"
        )
        fields = {"description": f"epoch {metrics.epoch}", "time_left": self._eta(metrics.step)}
        self._progress.update(self._task, completed=metrics.step, total=self._total_steps, **fields)


class _ProgressWithFigures(Progress):
    figures = Text("")

    def get_renderables(self) -> Iterable[rich_console.RenderableType]:
        # A Progress renders one table with a row per task. The figures need the whole width, so
        # they are no column of it but a second renderable below.
        yield self.make_tasks_table(self.tasks)
        yield self.figures


class PlainBar(ProgressBar):
    """A line for the first and the last step, and in between for each tenth of the run or every 30 s."""

    def __init__(self, console: Console, total_steps: int) -> None:
        super().__init__(console, total_steps)
        self._next_step = 0.0
        self._next_time = 0.0
        self._not_printed: StepMetrics | None = None

    def __exit__(self, *error: object) -> None:
        if self._not_printed is not None:
            self._print(self._not_printed)

    def update(self, metrics: StepMetrics) -> None:
        # Kept until it is printed, so that a run which stops between two lines shows its last step.
        self._not_printed = metrics
        is_last = metrics.step >= self._total_steps
        if is_last or metrics.step >= self._next_step or time.monotonic() >= self._next_time:
            self._print(metrics)

    def _print(self, metrics: StepMetrics) -> None:
        # The next line is due at the next full tenth, so a resumed run prints the same steps as an
        # undisturbed one.
        tenth = self._total_steps * PLAIN_SHARE
        self._next_step = (metrics.step // tenth + 1) * tenth
        self._next_time = time.monotonic() + PLAIN_SECONDS
        self._not_printed = None
        share = format_percent(metrics.step / self._total_steps, digits=0)
        progress = f"step {metrics.step:,}/{self._total_steps:,} ({share})  epoch {metrics.epoch}"
        self._console.say(
            "  ".join([progress, *_figures(metrics), self._eta(metrics.step)]).rstrip()
        )


def _epoch_row(
    epoch: str, trained: Sequence[str], validated: Sequence[str], time: str, widths: Sequence[int]
) -> str:
    cells = [cell.rjust(width) for cell, width in zip((*trained, *validated), widths, strict=True)]
    left, right = cells[: len(trained)], cells[len(trained) :]
    return f"{epoch:>6}  {'  '.join(left)} | {'  '.join(right)}  {time:>7}"


def _figures(metrics: StepMetrics) -> list[str]:
    return [
        f"loss {metrics.loss:.4f}",
        *(
            []
            if metrics.accuracy is None
            else [f"accuracy {format_percent(metrics.accuracy, digits=0)}"]
        ),
        f"lr {metrics.learning_rate:.2e}",
        f"{metrics.samples_per_second:,.1f} samples/s",
        f"{metrics.tokens_per_second:,.0f} tokens/s",
        *(
            []
            if metrics.gpu_utilization is None
            else [f"GPU {format_percent(metrics.gpu_utilization, digits=0)}"]
        ),
        *([] if metrics.mfu is None else [f"MFU {format_percent(metrics.mfu, digits=1)}"]),
    ]
