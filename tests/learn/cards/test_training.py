"""The cards train what a plain loop trains, on any number of real ranks, and show what each of them held."""

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from learn.cards.data import MAX_RANKS, global_batches
from learn.cards.model import build_mlp
from learn.cards.pipeline import DEFAULT_PIPELINE, Pipeline, read_pipeline
from learn.cards.registry import CARDS
from learn.cards.runner import Event, Runner
from learn.cards.storage import Storage

EPOCHS = 2
needs_deepspeed = pytest.mark.skipif(
    not importlib.util.find_spec("deepspeed"), reason="the extra deepspeed is not there"
)


def pipeline_on(num_workers: int, batch_size: int = 16, save_all_ranks: bool = True, **strategy: Any) -> Pipeline:
    pipeline = read_pipeline(DEFAULT_PIPELINE).configured("shard", num_workers=num_workers)
    pipeline = pipeline.configured("prepare", batch_size=batch_size).configured("strategy", **strategy)
    return pipeline.configured("save", epoch=EPOCHS, save_all_ranks=save_all_ranks)


def trained(folder: Path, pipeline: Pipeline) -> Runner:
    with Runner(pipeline, folder) as runner:
        runner.run()
    return runner


def weights_of(runner: Runner) -> dict[str, torch.Tensor]:
    return load_file(runner.storage.folder / "aggregate" / "rank_0" / "model.safetensors")


def plain_loop(runner: Runner) -> dict[str, torch.Tensor]:
    """One process, no group: the same rows in the same batches."""
    sharded = runner.outputs["shard"][0]["sharded_data"]
    strategy = runner.outputs["strategy"][0]["strategy_config"]
    data = runner.storage.tensors(sharded["prepared"]["tensors"])
    model = build_mlp(strategy["layers"], strategy["seed"])
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[strategy["optimizer"]]
    optimizer = kind(model.parameters(), lr=strategy["learning_rate"])
    for epoch in range(EPOCHS):
        for rows in global_batches(sharded["prepared"], epoch):
            F.cross_entropy(model(data["train_features"][rows]), data["train_labels"][rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def values(runner: Runner, node: str, moment: str, rank: int, *, first: bool = True) -> dict[str, torch.Tensor]:
    storage = runner.storage.at(node)
    storage = storage.first_pass() if first else storage
    return storage.tensors(storage.key(moment, rank))


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Two ranks, batches of 25 rows, so that one rank always has a row more."""
    return trained(tmp_path_factory.mktemp("ddp"), pipeline_on(2, 25))


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return trained(tmp_path_factory.mktemp("fsdp"), pipeline_on(2, 25, strategy="fsdp"))


@pytest.fixture(params=["ddp", "fsdp"])
def run(request: pytest.FixtureRequest) -> Iterator[Runner]:
    return request.getfixturevalue(request.param)


def test_two_ranks_train_what_a_plain_loop_trains(run: Runner) -> None:
    assert_equal(weights_of(run), plain_loop(run))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(
    ("strategy", "num_workers"),
    [
        *((strategy, num_workers) for strategy in ("ddp", "fsdp") for num_workers in (1, 3, 4)),
        *(pytest.param("deepspeed", num_workers, marks=needs_deepspeed) for num_workers in (1, 2, 3)),
    ],
)
def test_any_number_of_ranks_trains_what_a_plain_loop_trains(
    tmp_path: Path, strategy: str, num_workers: int, optimizer: str
) -> None:
    # The last of 120 training rows' batches of 17 has one row: some ranks have none.
    run = trained(tmp_path, pipeline_on(num_workers, 17, strategy=strategy, optimizer=optimizer))

    assert_equal(weights_of(run), plain_loop(run))


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_with_a_gpu_each_train_what_a_plain_loop_trains(tmp_path: Path, strategy: str) -> None:
    num_workers = min(torch.cuda.device_count(), MAX_RANKS)
    run = trained(tmp_path, pipeline_on(num_workers, 17, strategy=strategy).configured("group", backend="nccl"))

    assert run.outputs["group"][0]["process_group"]["device"] == "cuda:0"
    assert_equal(weights_of(run), plain_loop(run))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rank_0_alone_saves_the_whole_model(tmp_path: Path, strategy: str) -> None:
    run = trained(tmp_path, pipeline_on(3, save_all_ranks=False, strategy=strategy))

    assert [path.parent.name for path in run.storage.folder.glob("save/*/model.safetensors")] == ["rank_0"]
    assert_equal(load_file(run.storage.folder / "save/rank_0/model.safetensors"), plain_loop(run))
    assert_equal(weights_of(run), plain_loop(run))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["average", "weighted"])
def test_an_aggregate_counts_ranks_alike_or_by_their_rows(tmp_path: Path, method: str) -> None:
    pipeline = pipeline_on(2, 25).configured("aggregate", method=method)
    with Runner(pipeline, tmp_path) as runner:
        while runner.next_node.id != "aggregate":
            runner.step()
        # Models that differ, as if nothing had been all-reduced: constants, so that the mean is known.
        for rank in (0, 1):
            storage = Storage(runner.storage.folder, "save", rank)
            weights = storage.tensors(storage.key("model"))
            storage.save_tensors("model", {name: torch.full_like(one, 1.0 + rank) for name, one in weights.items()})
        runner.step()
        rows = [found["checkpoint"]["rows"] for found in runner.outputs["save"]]
        aggregate = runner.pipeline.node("aggregate").card
        preview = aggregate.get_output_preview(runner.outputs["aggregate"][0], runner.storage.at("aggregate"))

    assert rows[0] > rows[1]
    assert preview["columns"][3:] == ["on the ranks", "aggregated"]
    for *_, on_the_ranks, aggregated in preview["rows"]:
        first, second = on_the_ranks.removeprefix("2 different: ").split(", ")
        assert len({first, second, aggregated}) == 3
    expected = 1.5 if method == "average" else (rows[0] + 2 * rows[1]) / sum(rows)
    assert torch.allclose(weights_of(runner)["0.weight"], torch.tensor(expected))


def test_ranks_begin_with_weights_of_their_own_and_share_those_of_rank_0(ddp: Runner) -> None:
    before, broadcast = (ddp.storage.at("group").of_ranks(moment) for moment in ("before", "broadcast"))

    assert before[0] != before[1]
    assert broadcast[0] == broadcast[1] == before[0]


def test_gradients_differ_before_the_all_reduce_and_are_equal_after_it(ddp: Runner) -> None:
    before, after = ([values(ddp, "allreduce", moment, rank) for rank in (0, 1)] for moment in ("before", "after"))
    shares = [found["gradients"]["share"] for found in ddp.storage.at("backward").first_pass().of_ranks("outputs")]

    assert shares == [13 / 25, 12 / 25]
    for name in (name for name in before[0] if name.startswith("gradients/")):
        assert not torch.equal(before[0][name], before[1][name])
        assert torch.equal(after[0][name], after[1][name])
        mean = before[0][name] * shares[0] + before[1][name] * shares[1]
        torch.testing.assert_close(after[0][name], mean)


@pytest.mark.slow
@needs_deepspeed
def test_under_deepspeed_too_each_rank_shows_its_own_gradient_before_the_all_reduce(
    ddp: Runner, tmp_path: Path
) -> None:
    engine = trained(tmp_path, pipeline_on(2, 25, strategy="deepspeed"))

    for node, moment in (("backward", "after"), ("allreduce", "before"), ("allreduce", "after")):
        for rank in (0, 1):
            assert_equal(values(engine, node, moment, rank), values(ddp, node, moment, rank))


def test_fsdp_keeps_slices_which_together_are_the_gradient_of_all_rows(ddp: Runner, fsdp: Runner) -> None:
    whole = values(ddp, "allreduce", "after", 0)
    slices = [values(fsdp, "allreduce", "after", rank) for rank in (0, 1)]

    for name, tensor in whole.items():
        assert slices[0][name].numel() < tensor.numel()
        torch.testing.assert_close(torch.cat([slices[0][name], slices[1][name]]), tensor)


def test_weights_move_at_the_optimizer_step_alone_and_stay_equal(ddp: Runner) -> None:
    for node in ("forward", "backward", "allreduce", "step"):
        storage = ddp.storage.at(node).first_pass()
        for before, after in zip(storage.of_ranks("before"), storage.of_ranks("after"), strict=True):
            moved = [name for name in after if name.startswith("parameters/") and before[name] != after[name]]
            assert bool(moved) == (node == "step")
    after = ddp.storage.at("step").of_ranks("after")
    assert after[0] == after[1]


def test_each_rank_keeps_the_rows_it_saw_and_none_is_seen_twice(ddp: Runner) -> None:
    found = ddp.storage.tensors("shard/shards")
    shards = [found[f"rank_{rank}"].tolist() for rank in (0, 1)]
    seen = [batch["row"] for batch in ddp.storage.at("forward").first_pass().of_ranks("batch")]

    assert [len(rows) for rows in seen] == [13, 12]
    assert [shard[: len(rows)] for shard, rows in zip(shards, seen, strict=True)] == seen
    assert not set(shards[0]) & set(shards[1])


def test_the_first_and_the_last_pass_are_kept_and_none_between(ddp: Runner) -> None:
    batches = [storage.of_ranks("outputs")[0]["forward_output"] for storage in _passes(ddp)]

    assert [(batch["epoch"], batch["batch"]) for batch in batches] == [(1, 1), (EPOCHS, math.ceil(120 / 25))]


def _passes(runner: Runner) -> list[Any]:
    storage = runner.storage.at("forward")
    return [storage.first_pass(), storage]


def test_every_test_row_is_counted_once(run: Runner) -> None:
    found = [outputs["eval_metrics"] for outputs in run.outputs["evaluate"]]

    assert sum(metrics["own"]["rows"] for metrics in found) == 30
    assert [metrics["rows"] for metrics in found] == [30, 30]
    assert sum(metrics["own"]["correct"] for metrics in found) / 30 == found[0]["accuracy"]
    assert [sum(counts) for counts in found[0]["confusion"]] == [10, 10, 10]


def test_the_evaluated_model_is_the_one_in_the_file(run: Runner) -> None:
    data = run.storage.tensors(run.outputs["prepare"][0]["prepared_data"]["tensors"])
    model = build_mlp(json.loads((run.storage.folder / "aggregate/rank_0/model.json").read_text())["layers"])
    model.load_state_dict(weights_of(run))
    loss = F.cross_entropy(model(data["test_features"]), data["test_labels"]).item()

    assert run.outputs["evaluate"][0]["eval_metrics"]["loss"] == pytest.approx(loss, rel=1e-5)


def test_every_card_previews_what_it_did(run: Runner) -> None:
    for node in run.pipeline.nodes:
        preview = node.card.get_output_preview(run.outputs[node.id][0], run.storage.at(node.id))

        json.dumps(preview, allow_nan=False)
        assert preview["view"] == node.card.output_view_type
        assert preview["rows"]
        assert all(len(row) == len(preview["columns"]) for row in preview["rows"])
        assert all(set(outputs) == set(node.card.output_schema) for outputs in run.outputs[node.id])


def test_the_saved_checksums_are_those_after_the_last_step(ddp: Runner) -> None:
    step, save = (
        node.card.get_output_preview(ddp.outputs[node.id][0], ddp.storage.at(node.id))
        for node in map(ddp.pipeline.node, ("step", "save"))
    )

    assert [row[2] for row in save["rows"]] == [row[2] for row in step["rows"]]


def test_steps_run_a_card_each_and_tell_of_it(tmp_path: Path) -> None:
    events: list[Event] = []
    with Runner(pipeline_on(1), tmp_path, events.append) as runner:
        for _ in range(4):
            assert runner.step()

    names = [node.id for node in runner.pipeline.nodes[:4]]
    assert [(event.node, event.state) for event in events] == [
        (name, state) for name in names for state in ("running", "done")
    ]
    assert runner.next_node.id == "group"
    assert runner.total_passes == EPOCHS * 8


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_card_says_all_that_a_page_needs(card: Any) -> None:
    assert card.card_type.startswith("dist_")
    assert card.display_name
    assert card.description.endswith(".")
    assert card.look_at.endswith(".")
    assert card.category in ("data", "sharding", "distributed", "checkpointing", "aggregation", "evaluation")
    assert card.execution_mode in ("local", "distributed")
    assert card.output_view_type in ("table", "model_summary", "metrics")
    schema = card.config_schema.model_json_schema()
    assert all(field["description"] and "default" in field for field in schema.get("properties", {}).values())
    for kind in card.input_schema.values():
        assert sum(kind in other.output_schema.values() for other in CARDS.values()) == 1
