"""The wiring of a pipeline, drawn: a table for the terminal, and Mermaid for a page."""

from __future__ import annotations

from rich.table import Table

from learn.cards.pipeline import Node, Pipeline


def as_table(pipeline: Pipeline, num_workers: int, epochs: int) -> Table:
    """The cards in the order in which they run, and what each takes; a bracket stands beside the training loop."""
    title = f"{pipeline.name}: {len(pipeline.nodes)} cards, {num_workers} ranks, {epochs} epochs"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("", "node", "card", "runs on", "takes"):
        table.add_column(heading, no_wrap=True)
    for node in pipeline.nodes:
        runs = f"{num_workers} ranks" if node.card.execution_mode == "distributed" else "here"
        takes = "\n".join(map(str, node.inputs.values()))
        table.add_row(_bracket(pipeline.loop, node), node.id, node.card.display_name, runs, takes)
    return table


def _bracket(loop: tuple[Node, ...], node: Node) -> str:
    """A piece of the line that leads from the last card of the loop back to the first, as high as the node's row."""
    if node not in loop:
        return ""
    if node == loop[-1]:
        return "│\n" * (len(node.inputs) - 1) + "╰──"
    rest = "\n│" * (len(node.inputs) - 1)
    return ("╭─▶" if node == loop[0] else "│") + rest


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
