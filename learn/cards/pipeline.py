"""A pipeline: its cards, their settings and connections, read from YAML and checked before anything runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from common.errors import UserError, invalid_value
from learn.cards.base import BaseCard, CardConfig
from learn.cards.registry import CARDS, LOOP

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
        return self.card.card_type in LOOP


@dataclass(frozen=True)
class Pipeline:
    """A checked pipeline, its nodes in the order in which they run; those of the training loop stand together."""

    path: Path
    nodes: tuple[Node, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def loop(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.in_loop)

    @property
    def edges(self) -> Iterator[tuple[Source, Node, str]]:
        return ((source, node, name) for node in self.nodes for name, source in node.inputs.items())

    def node(self, node_id: str) -> Node:
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
        return self._changed(self.node(node_id), changes, f"{self.path}, node {node_id}")

    def with_setting(self, name: str, value: Any, where: str) -> Pipeline:
        """The same pipeline with another value of one of ``SETTINGS``."""
        card_type, field = SETTINGS[name]
        node = self.of_type(card_type)
        if node is None:
            raise UserError(f"{where}: there is no {card_type} card in {self.path}", code="pipeline-invalid")
        return self._changed(node, {field: value}, where)

    def _changed(self, node: Node, changes: Mapping[str, Any], where: str) -> Pipeline:
        changed = replace(node, config=read_config(node.card, node.config.model_dump() | changes, where))
        return replace(self, nodes=tuple(changed if other == node else other for other in self.nodes))


def read_config(card: BaseCard, values: Mapping[str, Any], where: str) -> CardConfig:
    """A card's configuration."""
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


DEFAULT_PIPELINE = Path(__file__).with_name("iris.yaml")
_NODE_FIELDS = ("id", "card", "config", "inputs")
_ID = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")  # it names a folder


def read_pipeline(path: Path) -> Pipeline:
    """Read a pipeline and check all of it."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})", code="pipeline-invalid"
        ) from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})", code="pipeline-invalid") from error
    return build_pipeline(document, path)


def build_pipeline(document: Any, path: Path) -> Pipeline:
    """Make a pipeline of what its file holds, and check all of it.

    Raises:
        UserError: what it says cannot be run; the first mistake is named.
    """
    if not isinstance(document, dict) or set(document) != {"nodes"} or not isinstance(document["nodes"], list):
        raise UserError(
            f"{path}: must hold one list, nodes, of cards with an id, a card, a config and inputs",
            code="pipeline-invalid",
        )
    nodes = {}
    for number, entry in enumerate(document["nodes"], start=1):
        node = _read_node(entry, f"{path}, node {number}", path)
        if node.id in nodes:
            raise UserError(f"{path}: two nodes have the id {node.id!r}", code="pipeline-invalid")
        nodes[node.id] = node
    if not nodes:
        raise UserError(f"{path}: nodes is empty; connect at least one card", code="pipeline-invalid")
    _check_one_of_each(nodes, path)
    _check_sources(nodes, path)
    order = _order(nodes, path)
    _check_inputs(nodes, path)
    return Pipeline(path, tuple(order))


def _read_node(entry: Any, where: str, path: Path) -> Node:
    if not isinstance(entry, dict) or not {"id", "card"} <= set(entry):
        raise UserError(f"{where}: must have an id and a card", code="pipeline-invalid")
    if not isinstance(entry["id"], str) or not _ID.fullmatch(entry["id"]):
        raise UserError(
            f"{where}: id {entry['id']!r} must be a word of letters, digits, - and _", code="pipeline-invalid"
        )
    where = f"{path}, node {entry['id']}"
    if unknown := set(entry) - set(_NODE_FIELDS):
        raise UserError(
            f"{where}: unknown field {min(map(str, unknown))!r}; a node has {', '.join(_NODE_FIELDS)}",
            code="pipeline-invalid",
        )
    card = CARDS.get(entry["card"]) if isinstance(entry["card"], str) else None
    if card is None:
        raise UserError(
            f"{where}: unknown card {entry['card']!r}; the cards are {', '.join(CARDS)}", code="pipeline-invalid"
        )
    values = {field: entry.get(field) or {} for field in ("config", "inputs")}
    for field, value in values.items():
        if not isinstance(value, dict):
            raise UserError(
                f"{where}: {field} must be names with values, such as {{name: value}}", code="pipeline-invalid"
            )
    sources = {name: _read_source(text, f"{where}: input {name}") for name, text in values["inputs"].items()}
    return Node(entry["id"], card, read_config(card, values["config"], where), sources)


def _read_source(text: Any, where: str) -> Source:
    node, dot, output = str(text).partition(".")
    if not (isinstance(text, str) and node and dot and output):
        raise UserError(
            f"{where}: {text!r} must be a node and one of its outputs, such as load.dataset", code="pipeline-invalid"
        )
    return Source(node, output)


def _check_one_of_each(nodes: Mapping[str, Node], path: Path) -> None:
    """One model is trained, in one group of processes: which card a flag or the loop means is never in doubt."""
    counts = Counter(node.card.card_type for node in nodes.values())
    for card_type, count in counts.items():
        if count > 1:
            ids = " and ".join(node.id for node in nodes.values() if node.card.card_type == card_type)
            raise UserError(
                f"{path}: nodes {ids} are both {card_type}; a pipeline has each card once", code="pipeline-invalid"
            )


def _check_sources(nodes: Mapping[str, Node], path: Path) -> None:
    """Every connection leads from an output that there is to an input that there is."""
    for node in nodes.values():
        for name, source in node.inputs.items():
            where = f"{path}, node {node.id}: input {name}"
            if name not in node.card.input_schema:
                known = ", ".join(node.card.input_schema) or "nothing"
                raise UserError(
                    f"{where}: {node.card.card_type} has no such input; it takes {known}", code="pipeline-invalid"
                )
            if source.node not in nodes:
                raise UserError(
                    f"{where}: no node {source.node!r}; there are {', '.join(nodes)}", code="pipeline-invalid"
                )
            outputs = nodes[source.node].card.output_schema
            if source.output not in outputs:
                raise UserError(
                    f"{where}: node {source.node} has no output {source.output!r}; it has {_list(outputs)}",
                    code="pipeline-invalid",
                )


def _check_inputs(nodes: Mapping[str, Node], path: Path) -> None:
    """Every input is connected, to a value of its type."""
    for node in nodes.values():
        for name, kind in node.card.input_schema.items():
            where = f"{path}, node {node.id}: input {name}"
            if name not in node.inputs:
                raise UserError(
                    f"{where} is not connected; it needs a {kind}, which {_makers(kind)} makes", code="pipeline-invalid"
                )
            source = node.inputs[name]
            found = nodes[source.node].card.output_schema[source.output]
            if found != kind:
                raise UserError(f"{where} needs a {kind}; {source} is a {found}", code="pipeline-invalid")


def _list(names: Mapping[str, str]) -> str:
    return ", ".join(names)


def _makers(kind: str) -> str:
    return " or ".join(card.card_type for card in CARDS.values() if kind in card.output_schema.values())


def _order(nodes: Mapping[str, Node], path: Path) -> list[Node]:
    """Nodes after those that feed them; what does not need the training loop stands before it."""
    sorter = TopologicalSorter({node.id: [source.node for source in node.inputs.values()] for node in nodes.values()})
    try:
        order = [nodes[node_id] for node_id in sorter.static_order()]
    except CycleError as error:
        raise UserError(
            f"{path}: nodes feed each other in a circle: {' -> '.join(error.args[1])}", code="pipeline-invalid"
        ) from error
    needs_loop: set[str] = set()
    for node in order:
        if node.in_loop or any(source.node in needs_loop for source in node.inputs.values()):
            needs_loop.add(node.id)
    return sorted(order, key=lambda node: (node.id in needs_loop) + (node.id in needs_loop and not node.in_loop))
