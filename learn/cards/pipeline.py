"""A pipeline: which cards, set how, fed by what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.errors import UserError, invalid_value
from learn.cards.base import BaseCard, CardConfig
from learn.cards.registry import LOOP

# What is set most often, by a short name: the card and its field.
SETTINGS = {
    "workers": ("dist_shard_data", "num_workers"),
    "epochs": ("dist_save_checkpoint", "epoch"),
    "strategy": ("dist_init_strategy", "strategy"),
}


@dataclass(frozen=True)
class Source:
    """An output of another node."""

    node: str
    output: str

    def __str__(self) -> str:
        return f"{self.node}.{self.output}"


@dataclass(frozen=True)
class Node:
    """A card in its place in a pipeline."""

    id: str
    card: BaseCard
    config: CardConfig
    inputs: Mapping[str, Source]

    @property
    def in_loop(self) -> bool:
        """Whether the training loop repeats it."""
        return self.card.card_type in LOOP


@dataclass(frozen=True)
class Pipeline:
    """A checked pipeline, its nodes in the order in which they run; those of the training loop stand together."""

    path: Path
    nodes: tuple[Node, ...]

    @property
    def name(self) -> str:
        """Of the folder that its values are kept in."""
        return self.path.stem

    @property
    def loop(self) -> tuple[Node, ...]:
        """The nodes that the training loop repeats."""
        return tuple(node for node in self.nodes if node.in_loop)

    @property
    def edges(self) -> Iterator[tuple[Source, Node, str]]:
        """Every connection: an output, the node that it goes to, and the input there."""
        return ((source, node, name) for node in self.nodes for name, source in node.inputs.items())

    def node(self, node_id: str) -> Node:
        """The node of an id.

        Raises:
            UserError: there is none.
        """
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise UserError(
            f"{self.path}: no node {node_id!r}; there are {', '.join(node.id for node in self.nodes)}",
            code="pipeline-invalid",
        )

    def of_type(self, card_type: str) -> Node | None:
        """The node of a type of card, of which a pipeline has one at most."""
        return next((node for node in self.nodes if node.card.card_type == card_type), None)

    def configured(self, node_id: str, **changes: Any) -> Pipeline:
        """The same pipeline with other values on one card.

        Raises:
            UserError: the card does not take them.
        """
        return self._changed(self.node(node_id), changes, f"{self.path}, node {node_id}")

    def with_setting(self, name: str, value: Any, where: str) -> Pipeline:
        """The same pipeline with another value of one of ``SETTINGS``.

        Raises:
            UserError: there is no card for it, or it does not take the value; said after ``where``.
        """
        card_type, field = SETTINGS[name]
        node = self.of_type(card_type)
        if node is None:
            raise UserError(f"{where}: there is no {card_type} card in {self.path}", code="pipeline-invalid")
        return self._changed(node, {field: value}, where)

    def _changed(self, node: Node, changes: Mapping[str, Any], where: str) -> Pipeline:
        changed = replace(node, config=read_config(node.card, node.config.model_dump() | changes, where))
        return replace(self, nodes=tuple(changed if other == node else other for other in self.nodes))


def read_config(card: BaseCard, values: Mapping[str, Any], where: str) -> CardConfig:
    """A card's configuration.

    Raises:
        UserError: a field is unknown, missing or wrong; the first is named, after ``where``.
    """
    try:
        return card.config_schema.model_validate(values)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(map(str, wrong["loc"]))
        if wrong["type"] == "extra_forbidden":
            known = ", ".join(card.config_schema.model_fields) or "nothing"
            raise UserError(
                f"{where}: {card.card_type} has no field {name!r}; it takes {known}", code="pipeline-invalid"
            ) from error
        raise UserError(
            f"{where}: config {name}: {wrong['input']!r}: {invalid_value(wrong)}", code="pipeline-invalid"
        ) from error
