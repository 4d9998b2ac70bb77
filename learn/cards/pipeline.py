"""A pipeline: its cards, settings and connections, read from YAML and checked before it runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from common.errors import UserError, invalid_value
from learn.cards.base import BaseCard, CardConfig
from learn.cards.registry import CARDS, load_card

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
        return self.card.in_training_loop


@dataclass(frozen=True)
class Pipeline:
    """A checked pipeline; its nodes are in running order, those of the loop side by side."""

    path: Path
    nodes: tuple[Node, ...]
    # That it may use, by type: the twelve, and those that its file names by import path.
    cards: Mapping[str, BaseCard]

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
            f"{self.path}: no node {node_id!r}; there are "
            f"{', '.join(node.id for node in self.nodes)}",
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
            problem = f"there is no {card_type} card in {self.path}"
            raise UserError(f"{where}: {problem}", code="pipeline-invalid")
        return self._changed(node, {field: value}, where)

    def _changed(self, node: Node, changes: Mapping[str, Any], where: str) -> Pipeline:
        # All fields are read again, so that they are checked as if they were in the file.
        config = read_config(node.card, node.config.model_dump() | changes, where)
        changed = replace(node, config=config)
        nodes = (changed if other == node else other for other in self.nodes)
        return replace(self, nodes=tuple(nodes))


class WiringError(UserError):
    """A mistake in a pipeline.

    Args:
        path: of the pipeline's file.
        detail: what is wrong and what to do.
        node: the id of the node that is wrong; "" if the mistake is not one node's.
        place: its part, such as ``inputs.dataset`` or ``config.seed``.
    """

    code = "pipeline-invalid"

    def __init__(self, path: Path, detail: str, node: str = "", place: str = "") -> None:
        super().__init__(f"{path}, node {node}: {detail}" if node else f"{path}: {detail}")
        self.detail, self.node, self.place = detail, node, place


def read_config(card: BaseCard, values: Mapping[str, Any], where: str) -> CardConfig:
    """A card's configuration."""
    try:
        return card.config_schema.model_validate(values)
    except ValidationError as error:
        _, detail = _config_mistakes(card, error)[0]
        raise UserError(f"{where}: {detail}", code="pipeline-invalid") from error


def _config_mistakes(card: BaseCard, error: ValidationError) -> list[tuple[str, str]]:
    """Each field that the card does not take, with what is wrong."""
    mistakes = []
    for wrong in error.errors():
        name = ".".join(map(str, wrong["loc"]))
        if wrong["type"] == "extra_forbidden":
            known = ", ".join(card.config_schema.model_fields) or "nothing"
            mistakes.append((name, f"{card.card_type} has no field {name!r}; it takes {known}"))
        else:
            mistakes.append((name, f"config {name}: {wrong['input']!r}: {invalid_value(wrong)}"))
    return mistakes


DEFAULT_PIPELINE = Path(__file__).with_name("iris.yaml")
_NODE_FIELDS = ("id", "card", "config", "inputs")
_ID = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")  # it names a folder


def read_pipeline(path: Path) -> Pipeline:
    """Read a pipeline and check all of it; cards that it names by import path are imported."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise WiringError(path, f"cannot be read ({why})") from error
    except yaml.YAMLError as error:
        raise WiringError(path, f"not valid YAML ({' '.join(str(error).split())})") from error
    return build_pipeline(document, path, CARDS | _own_cards(document, path))


def _own_cards(document: Any, path: Path) -> dict[str, BaseCard]:
    nodes = document.get("nodes") if isinstance(document, dict) else None
    # Not checked yet: whatever has the wrong form here is reported by check_document.
    listed = nodes if isinstance(nodes, list) else []
    found = [entry.get("card") for entry in listed if isinstance(entry, dict)]
    # A card of the project is named by a plain word, one's own as module:Class.
    names = [name for name in found if isinstance(name, str) and ":" in name]
    return {name: load_card(name, f"{path}: card {name}", path.parent.absolute()) for name in names}


def build_pipeline(document: Any, path: Path, cards: Mapping[str, BaseCard] = CARDS) -> Pipeline:
    """Make a pipeline of what its file holds, and check all of it.

    Raises:
        WiringError: what it says cannot be run; the first mistake is named.
    """
    pipeline, mistakes = check_document(document, path, cards)
    if pipeline is None:
        raise mistakes[0]
    return pipeline


def check_document(
    document: Any, path: Path, cards: Mapping[str, BaseCard]
) -> tuple[Pipeline | None, list[WiringError]]:
    """The pipeline that a file describes, or the mistakes that are in the way.

    Mistakes that others would cause are left out: connections are checked once every node can be
    connected.
    """
    is_wrong = not isinstance(document, dict) or set(document) != {"nodes"}
    if is_wrong or not isinstance(document["nodes"], list):
        detail = "must hold one list, nodes, of cards with an id, a card, a config and inputs"
        return None, [WiringError(path, detail)]
    nodes, mistakes = _read_nodes(document["nodes"], path, cards)
    if not document["nodes"]:
        mistakes.append(WiringError(path, "nodes is empty; connect at least one card"))
    # Connections only if every node could be read: otherwise a node that is merely misspelled
    # would be reported as missing wherever it is connected.
    if not mistakes or len(nodes) == len(document["nodes"]):
        mistakes += [*_one_of_each(nodes, path), *_wrong_sources(nodes, path)]
        if not any(mistake.place.startswith("inputs.") for mistake in mistakes):
            order, unordered = _order(nodes, path)
            mistakes += [*unordered, *_wrong_inputs(nodes, path, cards)]
    return (None, mistakes) if mistakes else (Pipeline(path, tuple(order), cards), [])


def _read_nodes(
    entries: Sequence[Any], path: Path, cards: Mapping[str, BaseCard]
) -> tuple[dict[str, Node], list[WiringError]]:
    nodes: dict[str, Node] = {}
    mistakes: list[WiringError] = []
    for number, entry in enumerate(entries, start=1):
        # One mistake for such a node: what else is wrong with it would only be a guess.
        if mistake := _unreadable(entry, number, path, cards):
            mistakes.append(mistake)
            continue
        node, wrong = _read_node(entry, path, cards)
        mistakes += wrong
        if node.id in nodes:
            mistakes.append(WiringError(path, f"two nodes have the id {node.id!r}"))
        nodes[node.id] = node
    return nodes, mistakes


def _unreadable(
    entry: Any, number: int, path: Path, cards: Mapping[str, BaseCard]
) -> WiringError | None:
    """The mistake because of which nothing can be connected to a node."""
    if not isinstance(entry, dict) or not {"id", "card"} <= set(entry):
        return WiringError(path, "must have an id and a card", str(number))
    node_id = entry["id"]
    if not isinstance(node_id, str) or not _ID.fullmatch(node_id):
        detail = f"id {node_id!r} must be a word of letters, digits, - and _"
        return WiringError(path, detail, str(number), "id")
    if unknown := set(entry) - set(_NODE_FIELDS):
        detail = f"unknown field {min(map(str, unknown))!r}; a node has {', '.join(_NODE_FIELDS)}"
        return WiringError(path, detail, node_id)
    if not isinstance(entry["card"], str) or entry["card"] not in cards:
        detail = f"unknown card {entry['card']!r}; the cards are {', '.join(cards)}"
        return WiringError(path, detail, node_id, "card")
    for field in ("config", "inputs"):
        if not isinstance(entry.get(field) or {}, dict):
            detail = f"{field} must be names with values, such as {{name: value}}"
            return WiringError(path, detail, node_id)
    return None


def _read_node(
    entry: dict[str, Any], path: Path, cards: Mapping[str, BaseCard]
) -> tuple[Node, list[WiringError]]:
    """A node, and what is wrong with its config and its inputs."""
    node_id, card = entry["id"], cards[entry["card"]]
    mistakes, sources = [], {}
    try:
        config = card.config_schema.model_validate(entry.get("config") or {})
    except ValidationError as error:
        # So that the node's connections are checked all the same.
        config = card.config_schema.model_construct()
        wrong = _config_mistakes(card, error)
        mistakes += [WiringError(path, detail, node_id, f"config.{name}") for name, detail in wrong]
    for name, text in (entry.get("inputs") or {}).items():
        source, dot, output = text.partition(".") if isinstance(text, str) else ("", "", "")
        if source and dot and output:
            sources[name] = Source(source, output)
        else:
            example = "such as load.dataset"
            detail = f"input {name}: {text!r} must be a node and one of its outputs, {example}"
            mistakes.append(WiringError(path, detail, node_id, f"inputs.{name}"))
    return Node(node_id, card, config, sources), mistakes


def _one_of_each(nodes: Mapping[str, Node], path: Path) -> Iterator[WiringError]:
    """One model is trained by one group, so a flag or the loop always means one card."""
    counts = Counter(node.card.card_type for node in nodes.values())
    for card_type, count in counts.items():
        if count > 1:
            twins = [node.id for node in nodes.values() if node.card.card_type == card_type]
            detail = f"nodes {' and '.join(twins)} are both {card_type}"
            yield WiringError(path, f"{detail}; a pipeline has each card once")


def _wrong_sources(nodes: Mapping[str, Node], path: Path) -> Iterator[WiringError]:
    """Connections that begin at no output that there is, or end at no input."""
    for node in nodes.values():
        for name, source in node.inputs.items():
            if name not in node.card.input_schema:
                known = ", ".join(node.card.input_schema) or "nothing"
                detail = f"{node.card.card_type} has no such input; it takes {known}"
            elif source.node not in nodes:
                detail = f"no node {source.node!r}; there are {', '.join(nodes)}"
            elif source.output not in (outputs := nodes[source.node].card.output_schema):
                has = ", ".join(outputs) or "none"
                detail = f"node {source.node} has no output {source.output!r}; it has {has}"
            else:
                continue
            yield WiringError(path, f"input {name}: {detail}", node.id, f"inputs.{name}")


def _wrong_inputs(
    nodes: Mapping[str, Node],
    path: Path,
    cards: Mapping[str, BaseCard],
) -> Iterator[WiringError]:
    """Inputs without a connection, or with one to a value of another type."""
    for node in nodes.values():
        for name, kind in node.card.input_schema.items():
            if name not in node.inputs:
                able = [card for card in cards.values() if kind in card.output_schema.values()]
                makers = [card.card_type for card in able]
                makes = f"which {' or '.join(makers)} makes" if makers else "which no card makes"
                detail = f"input {name} is not connected; it needs a {kind}, {makes}"
            else:
                source = node.inputs[name]
                found = nodes[source.node].card.output_schema[source.output]
                if found == kind:
                    continue
                detail = f"input {name} needs a {kind}; {source} is a {found}"
            yield WiringError(path, detail, node.id, f"inputs.{name}")


def _order(nodes: Mapping[str, Node], path: Path) -> tuple[list[Node], list[WiringError]]:
    """Nodes after those that feed them: first those that do not need the training loop, then the
    loop, then the others.

    Returns the mistakes that leave no such order, too.
    """
    feeders = {node.id: [source.node for source in node.inputs.values()] for node in nodes.values()}
    try:
        order = list(TopologicalSorter(feeders).static_order())
    except CycleError as error:
        circle = " -> ".join(error.args[1])
        return [], [WiringError(path, f"nodes feed each other in a circle: {circle}")]
    # In this order the feeders of a node have their part already. The loop's nodes must stand
    # together, because the runner repeats from the first to the last of them.
    part: dict[str, int] = {}  # 0 before the training loop, 1 in it, 2 after it
    mistakes = []
    for node_id in order:
        after = [feeder for feeder in feeders[node_id] if part[feeder] == 2]
        # What takes anything from the loop, be it through other nodes, comes after the loop.
        needs_loop = max(map(part.get, feeders[node_id]), default=0) > 0
        part[node_id] = 1 if nodes[node_id].in_loop else 2 * needs_loop
        if nodes[node_id].in_loop and after:
            detail = (
                f"runs in the training loop, but takes what {after[0]} makes after the loop; "
                f"the class of {after[0]} must set in_training_loop = True"
            )
            mistakes.append(WiringError(path, detail, node_id))
    return [nodes[node_id] for node_id in sorted(order, key=part.get)], mistakes
