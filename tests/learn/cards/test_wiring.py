"""A pipeline is checked before anything runs; the first mistake is named by file and node."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import UserError
from learn.cards.console import as_mermaid
from learn.cards.pipeline import DEFAULT_PIPELINE, build_pipeline, read_pipeline
from learn.cards.registry import CARDS

IRIS = yaml.safe_load(DEFAULT_PIPELINE.read_text())
PATH = Path("mine.yaml")
Change = Callable[[dict[str, dict[str, Any]]], Any]


def changed(change: Change) -> dict[str, Any]:
    document = deepcopy(IRIS)
    change({node["id"]: node for node in document["nodes"]})
    return document


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
    ("change", "message"),
    [
        (
            lambda nodes: nodes["forward"]["inputs"].pop("process_group"),
            "node forward: input process_group is not connected; it needs a process_group, "
            "which dist_setup_process_group makes",
        ),
        (
            lambda nodes: (
                nodes["prepare"].update(inputs={"dataset": "shard.sharded_data"}) or nodes["shard"].pop("inputs")
            ),
            "node prepare: input dataset needs a dataset; shard.sharded_data is a sharded_data",
        ),
        (
            lambda nodes: nodes["prepare"].update(inputs={"dataset": "shard.sharded_data"}),
            "nodes feed each other in a circle: ",
        ),
        (
            lambda nodes: nodes["backward"].update(inputs={"forward_output": "load.dataset"}),
            "node backward: input forward_output needs a forward_output; load.dataset is a dataset",
        ),
        (
            lambda nodes: nodes["load"].update(card="dist_lod"),
            "node load: unknown card 'dist_lod'; the cards are",
        ),
        (
            lambda nodes: nodes["shard"].update(config={"workers": 2}),
            "node shard: dist_shard_data has no field 'workers'; it takes num_workers",
        ),
        (
            lambda nodes: nodes["prepare"]["config"].update(test_ratio=1.5),
            "node prepare: config test_ratio: 1.5: must be less than 1",
        ),
        (
            lambda nodes: nodes["prepare"]["config"].update(seed=2**64),
            "node prepare: config seed: 18446744073709551616: must be at most 4294967296",
        ),
        (
            # The store in a file stays when ranks are killed, and stops the next ones.
            lambda nodes: nodes["group"]["config"].update(init_method="file:///tmp/meeting"),
            "node group: config init_method: 'file:///tmp/meeting': String should match pattern '^(env|tcp)://'",
        ),
        (
            lambda nodes: nodes["strategy"]["config"].update(seed=10**20),
            "node strategy: config seed: 100000000000000000000: must be at most",
        ),
        (
            lambda nodes: nodes["strategy"]["config"].update(learning_rate=float("inf")),
            "node strategy: config learning_rate: inf: Input should be a finite number",
        ),
        (
            lambda nodes: nodes["prepare"].update(inputs={"dataset": "lod.dataset"}),
            "node prepare: input dataset: no node 'lod'; there are load,",
        ),
        (
            lambda nodes: nodes["prepare"].update(inputs={"dataset": "load.data"}),
            "node prepare: input dataset: node load has no output 'data'; it has dataset",
        ),
        (
            lambda nodes: nodes["prepare"].update(inputs={"data": "load.dataset"}),
            "node prepare: input data: dist_prepare_data has no such input; it takes dataset",
        ),
        (
            lambda nodes: nodes["prepare"].update(inputs={"dataset": "load"}),
            "node prepare: input dataset: 'load' must be a node and one of its outputs, such as load.dataset",
        ),
        (lambda nodes: nodes["step"].update(id="load"), "two nodes have the id 'load'"),
        (lambda nodes: nodes["step"].update(id="../up"), "node 9: id '../up' must be a word"),
        (lambda nodes: nodes["step"].update(id=7), "node 9: id 7 must be a word"),
        (lambda nodes: nodes["step"].pop("card"), "node 9: must have an id and a card"),
        (lambda nodes: nodes["step"].update(input={}), "node step: unknown field 'input'; a node has id, card, config"),
        (lambda nodes: nodes["step"].update(config=["x"]), "node step: config must be names with values"),
        (
            lambda nodes: nodes["step"].update(card="dist_forward", inputs={}),
            "nodes forward and step are both dist_forward; a pipeline has each card once",
        ),
    ],
)
def test_a_wrong_wiring_is_named(change: Change, message: str) -> None:
    said = refusal(changed(change))

    assert said.startswith("mine.yaml")
    assert message in said


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
