"""The wiring of a pipeline, drawn: a table for the terminal, and Mermaid for a page."""

from __future__ import annotations

from rich import box
from rich.table import Table

from training.cards.wiring import Node, Pipeline


def as_table(pipeline: Pipeline, num_workers: int, epochs: int) -> Table:
    """The cards in the order in which they run, what each takes and gives; a bracket stands beside the loop."""
    title = f"{pipeline.name}: {len(pipeline.nodes)} cards, {num_workers} ranks, {epochs} epochs"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("loop", "node", "card", "runs", "takes from", "gives"):
        table.add_column(heading, no_wrap=True)
    for node in pipeline.nodes:
        runs = f"on {num_workers} ranks" if node.card.execution_mode == "distributed" else "here"
        takes = ", ".join(source.node for source in node.inputs.values())
        gives = ", ".join(node.card.output_schema)
        table.add_row(_bracket(pipeline.loop, node), node.id, node.card.display_name, runs, takes, gives)
    return table


def _bracket(loop: tuple[Node, ...], node: Node) -> str:
    if node not in loop:
        return ""
    ends = {0: "╭─▶", len(loop) - 1: "╰──"}
    return ends.get(loop.index(node), "│")


def as_mermaid(pipeline: Pipeline) -> str:
    """A flow chart; the training loop is a box of its own, with the way back from its last card to its first."""
    # Numbers, since a node may be called what Mermaid calls something else, such as end.
    names = {node.id: f"card{number}" for number, node in enumerate(pipeline.nodes, start=1)}
    boxes = {node.id: f'{names[node.id]}["{node.card.display_name}"]' for node in pipeline.nodes}
    lines = ["flowchart TD", *(f"    {boxes[node.id]}" for node in pipeline.nodes if not node.in_loop)]
    if loop := pipeline.loop:
        lines += ['    subgraph loop["for every global batch of every epoch"]']
        lines += [f"        {boxes[node.id]}" for node in loop]
        lines += ["    end", f"    {names[loop[-1].id]} -. next batch .-> {names[loop[0].id]}"]
    lines += [f"    {names[source.node]} -- {source.output} --> {names[node.id]}" for source, node, _ in pipeline.edges]
    return "\n".join(lines)
