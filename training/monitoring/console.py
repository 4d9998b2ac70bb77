"""Console: what a person sees on rank 0; colours and a live bar in a terminal, plain lines anywhere else."""

import io
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich import box
from rich import console as rich_console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from training.monitoring.records import EpochMetrics, StepMetrics, format_percent, format_time, wilson_interval

PLAIN_WIDTH = 120
PLAIN_SECONDS = 30.0
PLAIN_SHARE = 0.1


class Console:
    """Speaks to a person on stdout; made on rank 0 only."""

    def __init__(self) -> None:
        # A times sign must not end a run on a terminal that only knows ASCII.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        self._epochs_shown: set[int] = set()
        self.is_terminal = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown", None)
        self._rich = rich_console.Console(
            force_terminal=self.is_terminal,
            width=None if self.is_terminal else PLAIN_WIDTH,
            markup=False,
            highlight=False,
            emoji=False,
        )

    def say(self, text: str | Text) -> None:
        """Print one line; it is never broken, so that a path in it can be copied."""
        self._rich.print(text, soft_wrap=True)

    def banner(self, facts: Mapping[str, str]) -> None:
        """Print the facts of the run under one another, in their order."""
        self._facts("DistriNews training", facts)

    def progress(self, *, total_steps: int, first_step: int = 0, samples_done: int = 0) -> "ProgressBar":
        """Make the run's only progress bar, a context manager.

        Args:
            total_steps: optimizer steps of the whole run.
            first_step: steps done before a resume; 0 in a fresh run.
            samples_done: rows that those steps have seen.
        """
        if first_step:
            self.say(f"Going on after step {first_step:,} of {total_steps:,} ({samples_done:,} samples seen)")
        return LiveBar(self, total_steps, first_step) if self.is_terminal else PlainBar(self, total_steps)

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show how far a loop over rows is, where a terminal can; yields what to call with each part's rows."""
        if not self.is_terminal:
            yield lambda rows: None
            return
        with Progress(console=self._rich, transient=True) as progress:
            task = progress.add_task(what, total=total)
            yield lambda rows: progress.advance(task, rows)

    def epoch_table(self, epochs: Sequence[EpochMetrics]) -> None:
        """Print a table of the epochs; a star marks the best one."""
        self._epochs_shown |= {metrics.epoch for metrics in epochs}
        best = max((metrics.epoch for metrics in epochs if metrics.is_best), default=None)
        table = Table(box=box.SIMPLE_HEAD if self.is_terminal else None, pad_edge=False, show_edge=False)
        for heading in ("epoch", "train loss", "validation loss", "accuracy", "macro F1", "time", ""):
            table.add_column(heading, justify="right", header_style="bold", no_wrap=True)
        for metrics in epochs:
            is_best = metrics.epoch == best
            table.add_row(*_epoch_cells(metrics, is_best), style="green" if is_best else None)
        self._rich.print(table)

    def rest_of_epochs(self, epochs: Sequence[EpochMetrics]) -> None:
        """Print the whole table if it has epochs that this process has not shown yet: those before a resume."""
        if not self._epochs_shown.issuperset(metrics.epoch for metrics in epochs):
            self.epoch_table(epochs)

    def table(self, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table whose first column is words and whose others are figures."""
        table = Table(box=box.SIMPLE_HEAD if self.is_terminal else None, pad_edge=False, show_edge=False)
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="right" if number else "left", header_style="bold", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self.say(Text(title, "bold"))
        self._rich.print(table)

    def finish(
        self,
        *,
        seconds: float,
        best_epoch: int,
        validation_accuracy: float,
        test: Mapping[str, Any],
        model_folder: Path,
        checkpoint_file: Path,
        report: Path,
    ) -> None:
        """Print what the run came to and where its files are."""
        facts = {"Best epoch": f"{best_epoch}, validation accuracy {format_percent(validation_accuracy)}"}
        if test:
            low, high = wilson_interval(test["accuracy"], test["rows"])
            facts["Test accuracy"] = (
                f"{format_percent(test['accuracy'])} on {test['rows']:,} rows"
                f" (95% interval {format_percent(low)} to {format_percent(high)})"
            )
            facts["Macro F1"] = format_percent(test["macro_f1"])
            facts["Calibration error"] = format_percent(test["calibration_error"])
        facts |= {"Model folder": str(model_folder), "One file": str(checkpoint_file), "Report": str(report)}
        facts["Next"] = f"python -m inference.export {shlex.quote(str(model_folder))}"
        self._facts(f"Done in {format_time(seconds)}", facts)

    def _facts(self, title: str, facts: Mapping[str, str]) -> None:
        width = max(map(len, facts), default=0)
        self.say("")
        self.say(Text(title, "bold"))
        for name, value in facts.items():
            self.say(Text.assemble("  ", (name.ljust(width), "cyan"), "  ", value))
        self.say("")


class ProgressBar:
    """The progress of the whole run; what it says goes above the bar and never tears it."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total_steps = total_steps
        self._first_update: tuple[float, int] | None = None

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bar where it stands."""

    def update(self, metrics: StepMetrics) -> None:
        """Move to a logged step and show its figures."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.say(text)

    def epoch_table(self, epochs: Sequence[EpochMetrics]) -> None:
        """Print the table of epochs above the bar."""
        self._console.epoch_table(epochs)

    def _eta(self, step: int) -> list[str]:
        # The mean since the first update, validations and saves included, since those come again. The first step is
        # left out: it starts threads, allocates and compiles, and takes many times as long as the others.
        now = time.monotonic()
        first_time, first_step = self._first_update = self._first_update or (now, step)
        if step == first_step:
            return []
        return [f"ETA {format_time((now - first_time) / (step - first_step) * (self._total_steps - step))}"]


class LiveBar(ProgressBar):
    """A bar that moves, with the figures of the last logged step on a line below it."""

    def __init__(self, console: Console, total_steps: int, first_step: int) -> None:
        super().__init__(console, total_steps)
        self._progress = _ProgressWithFigures(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[time_left]}", style="cyan"),
            console=console._rich,
            refresh_per_second=2,
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=total_steps, completed=first_step, time_left="")

    def __enter__(self) -> "LiveBar":
        super().__enter__()
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, metrics: StepMetrics) -> None:
        """Move to a logged step and show its figures."""
        self._progress.figures = Text("  ".join(_figures(metrics)), "dim", no_wrap=True, overflow="ellipsis")
        self._progress.update(
            self._task,
            completed=metrics.step,
            description=f"epoch {metrics.epoch}",
            time_left="".join(self._eta(metrics.step)),
        )


class PlainBar(ProgressBar):
    """A line at the first and the last step, and between them at each tenth of the run or each 30 s."""

    def __init__(self, console: Console, total_steps: int) -> None:
        super().__init__(console, total_steps)
        self._next_step = 0.0
        self._next_time = 0.0
        self._unsaid: StepMetrics | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unsaid is not None:
            self._print(self._unsaid)

    def update(self, metrics: StepMetrics) -> None:
        """Print the step's figures if a line is due."""
        self._unsaid = metrics
        is_last = metrics.step >= self._total_steps
        if is_last or metrics.step >= self._next_step or time.monotonic() >= self._next_time:
            self._print(metrics)

    def _print(self, metrics: StepMetrics) -> None:
        tenth = self._total_steps * PLAIN_SHARE
        self._next_step = (metrics.step // tenth + 1) * tenth
        self._next_time = time.monotonic() + PLAIN_SECONDS
        self._unsaid = None
        share = format_percent(metrics.step / self._total_steps, digits=0)
        place = f"step {metrics.step:,}/{self._total_steps:,} ({share})  epoch {metrics.epoch}"
        self._console.say("  ".join([place, *_figures(metrics), *self._eta(metrics.step)]))


class _ProgressWithFigures(Progress):
    figures = Text("")

    def get_renderables(self) -> Iterable[rich_console.RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield self.figures


def _figures(metrics: StepMetrics) -> list[str]:
    return [
        f"loss {metrics.loss:.4f}",
        f"lr {metrics.learning_rate:.2e}",
        f"{metrics.samples_per_second:,.1f} samples/s",
        f"{metrics.tokens_per_second:,.0f} tokens/s",
    ]


def _epoch_cells(metrics: EpochMetrics, is_best: bool) -> list[str]:
    validation = metrics.validation
    return [
        str(metrics.epoch),
        f"{metrics.train_loss:.4f}",
        f"{validation['loss']:.4f}",
        format_percent(validation["accuracy"]),
        format_percent(validation["macro_f1"]),
        format_time(metrics.seconds),
        "* best" if is_best else "",
    ]
