"""What a person sees while a pipeline runs: a table of the cards in a terminal, lines anywhere else."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.table import Table

from learn.cards.history import History
from learn.cards.pipeline import Node, Pipeline
from learn.cards.runner import Event
from training.monitoring.records import format_time

EPOCH_LINES = 10  # of the training loop, where there is no terminal


class Progress:
    """Shows a run; a context manager, whose :meth:`show` is told of every event.

    Args:
        pipeline: that runs.
        history: of the run, which is told of every event first.
    """

    def __init__(self, pipeline: Pipeline, history: History) -> None:
        self.pipeline = pipeline
        self.history = history
        self.console = Console(highlight=False, markup=False)
        self._live = Live(console=self.console, get_renderable=self._table) if self.console.is_terminal else None

    def show(self, event: Event) -> None:
        """A card begins, is done, or failed."""
        if self._live is None and event.state == "done":
            self._print(event)

    def _print(self, event: Event) -> None:
        """A card's line when it is done for good; of the training loop, also one every few epochs."""
        node = self.pipeline.node(event.node)
        epochs = self.history.epochs
        is_end_of_epoch = event.is_last_batch and (event.epoch % max(1, epochs // EPOCH_LINES) == 0)
        if event.metrics and is_end_of_epoch:
            self.console.print(f"  epoch {event.epoch} of {epochs}: {self._metrics(node)} on its last batch")
        if node.in_loop and node == self.pipeline.loop[-1] and event.is_last_batch and event.epoch == epochs:
            for member in self.pipeline.loop:
                self.console.print(self._line(member))
        if not node.in_loop:
            self.console.print(self._line(node))

    def _line(self, node: Node) -> str:
        seconds = format_time(self.history.latest[node.id].seconds)
        return f"{node.card.display_name:<22} {seconds:>7}  {self._metrics(node)}".rstrip()

    def _metrics(self, node: Node) -> str:
        return ", ".join(
            f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4f}"
            for name, value in self.history.metrics.get(node.id, {}).items()
        )

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("", "card", "", "time", ""):
            table.add_column(heading, justify="right" if heading == "time" else "left", no_wrap=True)
        for node in self.pipeline.nodes:
            event = self.history.latest.get(node.id)
            state = event.state if event else "waiting"
            mark, style = _MARKS[state]
            epoch = f"epoch {event.epoch}/{self.history.epochs}" if event and event.epoch else ""
            seconds = format_time(event.seconds) if event and event.seconds else ""
            table.add_row(mark, node.card.display_name, epoch, seconds, self._metrics(node), style=style)
        return table

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()


_MARKS = {"waiting": ("·", "dim"), "running": ("▶", "bold"), "done": ("✓", "green"), "failed": ("✗", "red")}
