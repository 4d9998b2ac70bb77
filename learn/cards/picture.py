"""What the page and the report draw of a pipeline and its cards, as JSON."""

from __future__ import annotations

from dataclasses import asdict
from itertools import accumulate
from typing import Any

import torch
from pydantic import TypeAdapter

from common.errors import first_line
from learn.cards.base import LAID_OUT, BaseCard, Preview
from learn.cards.data import global_batches, rows_of
from learn.cards.history import writable
from learn.cards.pipeline import Node, Pipeline
from learn.cards.registry import CARDS
from learn.cards.runner import Runner, num_workers
from learn.cards.storage import Storage
from learn.cards.training_step import MAX_ROWS

MAX_SHARDED_ROWS = 1000
MAX_CELLS = 32  # of a tensor, along each of its dimensions

Picture = dict[str, Any]  # can be written as JSON


def pipeline_picture(pipeline: Pipeline) -> dict[str, Any]:
    """The wiring, and what every card says of itself and how it is set."""
    return {
        "name": pipeline.name,
        "workers": num_workers(pipeline),
        "loop": [node.id for node in pipeline.loop],
        "nodes": [_node_picture(node) for node in pipeline.nodes],
    }


def _node_picture(node: Node) -> dict[str, Any]:
    return {
        "id": node.id,
        **card_facts(node.card),
        "inputs": {name: asdict(source) for name, source in node.inputs.items()},
        "config": node.config.model_dump(mode="json"),
    }


def card_facts(card: BaseCard) -> dict[str, Any]:
    """What a card says of itself, wherever it is wired."""
    return {
        "card_type": card.card_type,
        "name": card.display_name,
        "description": card.description,
        "look_at": card.look_at,
        "execution_mode": card.execution_mode,
        "takes": card.input_schema,
        "gives": card.output_schema,
        "schema": card.config_schema.model_json_schema(),
    }


def card_picture(runner: Runner, node: Node) -> list[dict[str, Any]]:
    """A picture of what a card made and what each rank held.

    Of a card of the training loop there are two, once it has run twice: its first pass, and the
    latest that was kept.
    """
    storage = runner.storage.at(node.id)
    epoch, batch = runner.recorded[node.id]
    latest = _pass_picture(node, storage, runner.pipeline, epoch, batch)
    if (epoch, batch) in ((0, 0), (1, 1)):
        return [latest]
    return [_pass_picture(node, storage.first_pass(), runner.pipeline, 1, 1), latest]


def _pass_picture(
    node: Node,
    storage: Storage,
    pipeline: Pipeline,
    epoch: int,
    batch: int,
) -> Picture:
    # Of a distributed card rank 0's outputs stand for all: what differs by rank is drawn below.
    rank = 0 if node.card.execution_mode == "distributed" else None
    outputs = storage.load(storage.key("outputs", rank))
    title = f"epoch {epoch}, batch {batch}" if epoch else ""
    picture = {"pass": title, "preview": _preview(node, outputs, storage)}
    return writable(picture | _drawings(node, outputs, storage, pipeline))


_PREVIEW = TypeAdapter(Preview)


def _preview(node: Node, outputs: dict[str, Any], storage: Storage) -> Preview:
    """The card's preview; one of the user's own that fails is shown as what it says."""
    # The twelve are tested. A user's card may do anything, and the page must still be drawn.
    if node.card.card_type in CARDS:
        return node.card.get_output_preview(outputs, storage)
    try:
        return _PREVIEW.validate_python(node.card.get_output_preview(outputs, storage))
    except Exception as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        return node.card.preview([], [], get_output_preview_failed=problem)


def _drawings(node: Node, outputs: Picture, storage: Storage, pipeline: Pipeline) -> Picture:
    """What the page draws of this card beside its preview."""
    card_type = node.card.card_type
    if card_type == "dist_shard_data":
        return {"shards": _shards(outputs["sharded_data"], storage)}
    if card_type == "dist_forward":
        return {"batch": storage.of_ranks("batch"), "max_rows": MAX_ROWS}
    if card_type == "dist_evaluate":
        return {"counts": [found["eval_metrics"]["own"] for found in storage.of_ranks("outputs")]}
    group = pipeline.of_type("dist_setup_process_group")
    if node.card.held and group:
        held = _held(*node.card.held, storage, storage.at(group.id))
        return {"held": held} if held["moments"] else {}
    return {}


def _shards(sharded: dict[str, Any], storage: Storage) -> dict[str, Any]:
    """The global batches of the first epoch, as rows of the data set, and each row's rank."""
    tensors = storage.tensors(sharded["prepared"]["tensors"])
    train, test = tensors["train_rows"], tensors["test_rows"]
    batches, owners = [], []
    for batch in global_batches(sharded["prepared"], epoch=0):
        # Dealt out as the rows are: the owner's number is written where the owner's rows are.
        owner = torch.empty_like(batch)
        for rank in range(sharded["num_workers"]):
            rows_of(owner, rank, sharded["num_workers"]).fill_(rank)
        batches.append(train[batch].tolist())
        owners.append(owner.tolist())
        if sum(map(len, batches)) >= MAX_SHARDED_ROWS:
            break
    shown = {"batches": batches, "owners": owners, "test_rows": test[:MAX_SHARDED_ROWS].tolist()}
    return shown | {"rows": len(train) + len(test)}


def _held(kind: str, titles: dict[str, str], storage: Storage, group: Storage) -> dict[str, Any]:
    """What every rank held of parameters or gradients at each moment."""
    # Before the broadcast no rank has sharded anything yet, so rank 0 knows all whole shapes.
    before = group.of_ranks("before")[0]
    whole = {name.partition("/")[2]: facts["shape"] for name, facts in before.items()}
    # A card of the user's own may free gradients, or run before there are any.
    moments = [
        moment
        for moment in _moments(kind, titles, storage)
        if all(held.keys() == whole.keys() for held in moment["ranks"])
    ]
    for moment in moments:
        for name, shape in whole.items():
            _place([held[name] for held in moment["ranks"]], shape)
    return {"kind": kind, "whole": whole, "moments": moments}


def _moments(kind: str, titles: dict[str, str], storage: Storage) -> list[dict[str, Any]]:
    moments: list[dict[str, Any]] = []
    for moment, title in titles.items():
        ranks = [_held_by(rank, moment, kind, storage) for rank in storage.ranks()]
        # If every rank keeps all of the model, there is nothing to lay out after the broadcast.
        if title != LAID_OUT or ranks != moments[-1]["ranks"]:
            moments.append({"title": title, "ranks": ranks})
    return moments


def _held_by(rank: int, moment: str, kind: str, storage: Storage) -> dict[str, dict[str, Any]]:
    key = storage.key(moment, rank)
    checksums, tensors = storage.load(key), storage.tensors(key)
    return {
        name.partition("/")[2]: facts | {"values": _values(tensors[name])}
        for name, facts in checksums.items()
        if name.startswith(kind)
    }


def _place(slices: list[dict[str, Any]], whole: list[int]) -> None:
    """Say of what each rank holds of a tensor with which row of the whole it begins."""
    # Shards are consecutive rows, in the order of ranks: each begins where the one before ends.
    is_sliced = any(held["shape"][0] != whole[0] for held in slices)
    starts = accumulate((held["shape"][0] for held in slices[:-1]), initial=0)
    for held, start in zip(slices, starts, strict=True):
        held["first_row"] = start if is_sliced else 0


def _values(tensor: torch.Tensor) -> list[list[float]]:
    """Its upper left corner, to the seven digits of an fp32 number; a vector is a column."""
    matrix = tensor if tensor.dim() == 2 else tensor.unsqueeze(1)
    corner = matrix[:MAX_CELLS, :MAX_CELLS]
    return [[float(f"{value:.7g}") for value in row] for row in corner.tolist()]
