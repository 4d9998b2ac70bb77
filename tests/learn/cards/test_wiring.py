"""A pipeline is checked before anything runs; the first mistake is named by file and node."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import UserError
from learn.cards.console import as_mermaid
from learn.cards.pipeline import DEFAULT_PIPELINE, build_pipeline, check_document, read_pipeline
from learn.cards.registry import CARDS

IRIS = yaml.safe_load(DEFAULT_PIPELINE.read_text())
PATH = Path("mine.yaml")


def refusal(document: Any) -> str:
    with pytest.raises(UserError) as raised:
        build_pipeline(document, PATH)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_default_pipeline_has_each_card_once_and_the_loop_in_its_order() -> None:
    pipeline = read_pipeline(DEFAULT_PIPELINE)

    assert [node.card.card_type for node in pipeline.nodes] == list(CARDS)
    assert [node.id for node in pipeline.loop] == ["forward", "backward", "allreduce", "step"]


def test_the_order_of_a_file_does_not_matter() -> None:
    pipeline = build_pipeline({"nodes": IRIS["nodes"][::-1]}, PATH)
    places = {node.id: place for place, node in enumerate(pipeline.nodes)}

    assert all(places[source.node] < places[node.id] for source, node, _ in pipeline.edges)
    assert [node.id for node in pipeline.nodes[5:9]] == [node.id for node in pipeline.loop]


@pytest.mark.parametrize(
    ("node", "change", "message"),
    [
        (
            "forward",
            {"inputs": {"sharded_data": "shard.sharded_data"}},
            "input process_group is not connected; it needs a process_group, which dist_setup_process_group makes",
        ),
        ("prepare", {"inputs": {"dataset": "shard.sharded_data"}}, "nodes feed each other in a circle: "),
        (
            "backward",
            {"inputs": {"forward_output": "load.dataset"}},
            "needs a forward_output; load.dataset is a dataset",
        ),
        ("load", {"card": "dist_lod"}, "node load: unknown card 'dist_lod'; the cards are"),
        ("shard", {"config": {"workers": 2}}, "dist_shard_data has no field 'workers'; it takes num_workers"),
        ("prepare", {"config": {"test_ratio": 1.5}}, "config test_ratio: 1.5: must be less than 1"),
        ("prepare", {"config": {"seed": 2**64}}, "config seed: 18446744073709551616: must be at most 4294967296"),
        # A store in a file survives killed ranks, and stops the next ones.
        ("group", {"config": {"init_method": "file:///tmp/meeting"}}, "should match pattern '^(env|tcp)://'"),
        ("strategy", {"config": {"seed": 10**20}}, "config seed: 100000000000000000000: must be at most"),
        (
            "strategy",
            {"config": {"learning_rate": float("inf")}},
            "learning_rate: inf: Input should be a finite number",
        ),
        ("prepare", {"inputs": {"dataset": "lod.dataset"}}, "input dataset: no node 'lod'; there are load,"),
        ("prepare", {"inputs": {"dataset": "load.data"}}, "node load has no output 'data'; it has dataset"),
        ("prepare", {"inputs": {"data": "load.dataset"}}, "dist_prepare_data has no such input; it takes dataset"),
        (
            "prepare",
            {"inputs": {"dataset": "load"}},
            "'load' must be a node and one of its outputs, such as load.dataset",
        ),
        ("step", {"id": "load"}, "two nodes have the id 'load'"),
        ("step", {"id": "../up"}, "node 9: id '../up' must be a word"),
        ("step", {"id": 7}, "node 9: id 7 must be a word"),
        ("step", {"card": None}, "node step: unknown card None"),
        ("step", {"input": {}}, "node step: unknown field 'input'; a node has id, card, config"),
        ("step", {"config": ["x"]}, "node step: config must be names with values"),
        ("step", {"card": "dist_forward", "inputs": {}}, "nodes forward and step are both dist_forward"),
    ],
)
def test_a_wrong_wiring_is_named(node: str, change: dict[str, Any], message: str) -> None:
    document = deepcopy(IRIS)
    next(entry for entry in document["nodes"] if entry["id"] == node).update(change)

    found = refusal(document)

    assert found.startswith("mine.yaml")
    assert message in found


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "must hold one list, nodes"),
        ({"nodes": IRIS["nodes"], "name": "x"}, "must hold one list, nodes"),
        ({"nodes": []}, "nodes is empty"),
        ({"nodes": ["load"]}, "node 1: must have an id and a card"),
    ],
)
def test_a_file_that_is_no_pipeline_is_refused(document: Any, message: str) -> None:
    assert message in refusal(document)


@pytest.mark.parametrize(("text", "message"), [("nodes: [", "not valid YAML"), (None, "cannot be read")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)

    with pytest.raises(UserError, match=message):
        read_pipeline(path)


def test_a_configuration_is_checked_when_it_is_changed() -> None:
    pipeline = read_pipeline(DEFAULT_PIPELINE)

    assert pipeline.configured("shard", num_workers=2).node("shard").config.num_workers == 2
    assert pipeline.node("shard").config.num_workers == 4
    with pytest.raises(UserError, match="node shard: config num_workers: 0: must be at least 1"):
        pipeline.configured("shard", num_workers=0)
    with pytest.raises(UserError, match="no node 'sharder'; there are load"):
        pipeline.configured("sharder", num_workers=2)


def test_the_chart_has_every_connection_and_the_way_back() -> None:
    pipeline = read_pipeline(DEFAULT_PIPELINE)
    lines = as_mermaid(pipeline).splitlines()

    assert sum(" --> " in line for line in lines) == len(list(pipeline.edges))
    assert sum("-. next batch .->" in line for line in lines) == 1


def test_every_mistake_is_found_and_named_by_node_and_place() -> None:
    document = deepcopy(IRIS)
    nodes = {entry["id"]: entry for entry in document["nodes"]}
    nodes["prepare"]["config"] = {"test_ratio": 2, "colour": "red"}
    del nodes["forward"]["inputs"]["process_group"]
    pipeline, mistakes = check_document(document, PATH, CARDS)

    assert pipeline is None
    assert [(mistake.node, mistake.place) for mistake in mistakes] == [
        ("prepare", "config.test_ratio"),
        ("prepare", "config.colour"),
        ("forward", "inputs.process_group"),
    ]
