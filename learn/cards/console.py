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
    title = f"{printable(pipeline.name)}: {len(pipeline.nodes)} cards, {num_workers} ranks, {epochs} epochs"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("", "node", "card", "runs on", "takes"):
        table.add_column(heading, no_wrap=True)
    for node in pipeline.nodes:
        runs = f"{num_workers} ranks" if node.card.execution_mode == "distributed" else "here"
        takes = "\n".join(printable(source) for source in node.inputs.values())
        table.add_row(_bracket(pipeline.loop, node), printable(node.id), node.card.display_name, runs, takes)
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
    lines = ["flowchart TD", *(f"    {boxes[node.id]}" for node in pipeline.nodes if not node.in_loop)]
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
        self._live = Live(console=self.console, get_renderable=self._table) if self.console.is_terminal else None

    def show(self, event: Event) -> None:
        if self._live is None and event.state == "done":
            self._print(event)

    def _print(self, event: Event) -> None:
        """A card's line when it is done for good; in the loop also one every few epochs."""
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
            f"{printable(name)} {value:.2%}" if name == "accuracy" else f"{printable(name)} {value:.4f}"
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
