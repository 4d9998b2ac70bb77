"""A pipeline in the terminal: its wiring, as a table or Mermaid, and its progress in a run."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.table import Table

from common.escaping import printable
from learn.cards.history import History
from learn.cards.pipeline import Node, Pipeline
from learn.cards.runner import Event
from training.monitoring.records import format_time


def as_table(pipeline: Pipeline, num_workers: int, epochs: int) -> Table:
    """The cards in the order in which they run, with a bracket beside the training loop."""
    size = f"{len(pipeline.nodes)} cards, {num_workers} ranks, {epochs} epochs"
    title = f"{printable(pipeline.name)}: {size}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("", "node", "card", "runs on", "takes"):
        table.add_column(heading, no_wrap=True)
    for node in pipeline.nodes:
        runs = f"{num_workers} ranks" if node.card.execution_mode == "distributed" else "here"
        takes = "\n".join(printable(source) for source in node.inputs.values())
        bracket, name = _bracket(pipeline.loop, node), printable(node.id)
        table.add_row(bracket, name, node.card.display_name, runs, takes)
    return table


def _bracket(loop: tuple[Node, ...], node: Node) -> str:
    """A piece of the line from the loop's last card to its first, as high as the node's row."""
    if node not in loop:
        return ""
    if node == loop[-1]:
        return "│\n" * (len(node.inputs) - 1) + "╰──"
    rest = "\n│" * (len(node.inputs) - 1)
    return ("╭─▶" if node == loop[0] else "│") + rest


def as_mermaid(pipeline: Pipeline) -> str:
    """A flow chart; the training loop is a box of its own."""
    # Numbers, since a node may be called what Mermaid calls something else, such as end.
    names = {node.id: f"card{number}" for number, node in enumerate(pipeline.nodes, start=1)}
    boxes = {node.id: f'{names[node.id]}["{node.card.display_name}"]' for node in pipeline.nodes}
    alone = [f"    {boxes[node.id]}" for node in pipeline.nodes if not node.in_loop]
    lines = ["flowchart TD", *alone]
    if loop := pipeline.loop:
        lines += ['    subgraph loop["for every global batch of every epoch"]']
        lines += [f"        {boxes[node.id]}" for node in loop]
        lines += ["    end", f"    {names[loop[-1].id]} -. next batch .-> {names[loop[0].id]}"]
    lines += [
        f"    {names[source.node]} -- {printable(source.output)} --> {names[node.id]}"
        for source, node, _ in pipeline.edges
    ]
    return "\n".join(lines)


EPOCH_LINES = 10  # of the training loop, where there is no terminal


class Progress:
    def __init__(self, pipeline: Pipeline, history: History) -> None:
        self.pipeline = pipeline
        self.history = history
        self.console = Console(highlight=False, markup=False)
        # A table that is redrawn needs a terminal; a log gets lines.
        live = Live(console=self.console, get_renderable=self._table)
        self._live = live if self.console.is_terminal else None

    def show(self, event: Event) -> None:
        if self._live is None and event.state == "done":
            self._print(event)

    def _print(self, event: Event) -> None:
        """A card's line when it is done for good; in the loop also one every few epochs."""
        node = self.pipeline.node(event.node)
        epochs = self.history.epochs
        is_end_of_epoch = event.is_last_batch and (event.epoch % max(1, epochs // EPOCH_LINES) == 0)
        if event.metrics and is_end_of_epoch:
            last = f"{self._metrics(node)} on its last batch"
            self.console.print(f"  epoch {event.epoch} of {epochs}: {last}")
        is_end = event.is_last_batch and event.epoch == epochs
        if is_end and node.in_loop and node == self.pipeline.loop[-1]:
            for member in self.pipeline.loop:
                self.console.print(self._line(member))
        if not node.in_loop:
            self.console.print(self._line(node))

    def _line(self, node: Node) -> str:
        seconds = format_time(self.history.latest[node.id].seconds)
        return f"{node.card.display_name:<22} {seconds:>7}  {self._metrics(node)}".rstrip()

    def _metrics(self, node: Node) -> str:
        return ", ".join(
            f"{printable(name)} " + (f"{value:.2%}" if name == "accuracy" else f"{value:.4f}")
            for name, value in self.history.metrics.get(node.id, {}).items()
        )

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("", "card", "", "time", ""):
            justify = "right" if heading == "time" else "left"
            table.add_column(heading, justify=justify, no_wrap=True)
        for node in self.pipeline.nodes:
            event = self.history.latest.get(node.id)
            state = event.state if event else "waiting"
            mark, style = _MARKS[state]
            epoch = f"epoch {event.epoch}/{self.history.epochs}" if event and event.epoch else ""
            seconds = format_time(event.seconds) if event and event.seconds else ""
            name, metrics = node.card.display_name, self._metrics(node)
            table.add_row(mark, name, epoch, seconds, metrics, style=style)
        return table

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()


_MARKS = {
    "waiting": ("·", "dim"),
    "running": ("▶", "bold"),
    "done": ("✓", "green"),
    "failed": ("✗", "red"),
}
