"""The state of every card so far, which the page and the report show."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from learn.cards.pipeline import Pipeline
from learn.cards.runner import Event, num_epochs


class History:
    """Keeps every card's latest event, and the loss of every pass of the training loop."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.epochs = num_epochs(pipeline)
        self.losses: list[float] = []
        self.failure = ""  # why a card failed; empty as long as none has
        self.latest: dict[str, Event] = {}  # by node
        self.metrics: dict[str, dict[str, float]] = {}  # by node, of its latest event that had any
        self._nodes = [node.id for node in pipeline.nodes]

    def record(self, event: Event) -> None:
        self.latest[event.node] = event
        if event.state == "failed":
            self.failure = event.message
        if event.metrics:
            self.metrics[event.node] = event.metrics
        # One loss per pass, from the card that has it; outside the loop, a loss is a test's.
        if event.epoch and "loss" in event.metrics:
            self.losses.append(event.metrics["loss"])

    def has_run(self, node_id: str) -> bool:
        # In the loop a card runs many times: it has run if it is done, or in a later pass.
        event = self.latest.get(node_id)
        return event is not None and (event.state == "done" or (event.epoch, event.batch) > (1, 1))

    def state(self, losses_from: int = 0) -> dict[str, Any]:
        cards = {}
        for node_id in self._nodes:
            event = self.latest.get(node_id)
            waiting = {"node": node_id, "state": "waiting", "seconds": 0.0}
            latest = asdict(event) if event else waiting
            cards[node_id] = latest | {"metrics": self.metrics.get(node_id, {})}
        return writable(
            {
                "cards": cards,
                "epochs": self.epochs,
                "failure": self.failure,
                "losses_from": losses_from,
                "losses": self.losses[losses_from:],
            }
        )


def writable(value: Any) -> Any:
    """The same value with infinities and NaN, which JSON does not have, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: writable(part) for name, part in value.items()}
    if isinstance(value, list):
        return [writable(part) for part in value]
    return value
