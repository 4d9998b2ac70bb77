"""Layouts: every way to lay a model over GPUs, and the command that does it."""

import shlex
from dataclasses import replace

import pytest

from training.config import parse_config
from training.parallelism.dims import ParallelDims
from training.planning.answer import best_plans
from training.planning.hardware import GPUS, Cluster
from training.planning.launch import cautions, launch_command
from training.planning.layouts import STRATEGIES, Work, degrees, with_batches
from training.planning.models import NAMED_SHAPES
from training.planning.shapes import Layout

CLUSTER = Cluster(GPUS["a100-80gb"], nodes=2, gpus_per_node=8)
LLAMA = NAMED_SHAPES["llama-13b"]
WORK = Work(rows=64, seq_len=2048, precision="bf16")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_degrees_of_every_layout_multiply_to_the_gpus(strategy: str) -> None:
    layouts = list(degrees(LLAMA, CLUSTER, strategy))

    assert layouts
    assert all(layout.ranks == CLUSTER.gpus for layout in layouts)
    assert len(set(layouts)) == len(layouts)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_batch_is_the_global_one(strategy: str) -> None:
    batches = [batch for layout in degrees(LLAMA, CLUSTER, strategy) for batch in with_batches(LLAMA, layout, WORK)]

    assert {batch.tokens_per_step for batch in batches} == {64 * 2048}


def test_tensor_parallelism_divides_the_heads_within_a_node() -> None:
    twelve_heads = NAMED_SHAPES["distilbert-base"]
    eight_key_heads = NAMED_SHAPES["llama-70b"]

    assert {layout.tp for layout in degrees(twelve_heads, CLUSTER, "tp")} == {2, 4}
    assert {layout.tp for layout in degrees(eight_key_heads, CLUSTER, "tp")} == {2, 4, 8}


def test_no_pipeline_has_more_stages_than_blocks() -> None:
    six_blocks = NAMED_SHAPES["distilbert-base"]
    batches = [
        batch
        for layout in degrees(six_blocks, CLUSTER, "pp")
        for batch in with_batches(six_blocks, layout, replace(WORK, seq_len=128))
    ]

    assert {(batch.pp, batch.schedule) for batch in batches if batch.pp > 2} == {(4, "gpipe"), (4, "1f1b")}


def test_a_pipeline_has_micro_batches_enough() -> None:
    batches = [batch for layout in degrees(LLAMA, CLUSTER, "pp") for batch in with_batches(LLAMA, layout, WORK)]

    assert batches
    assert all(batch.accumulation >= batch.pp for batch in batches)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_trainer_accepts_every_command_and_lays_it_out_as_planned(strategy: str) -> None:
    plans = best_plans(LLAMA, CLUSTER, WORK, [strategy])

    for plan in plans:
        layout, words = plan.layout, shlex.split(plan.launch)
        config = parse_config(words[words.index("training/train_ddp.py") + 1 :], environment={})
        dims = ParallelDims.from_config(config, layout.ranks)
        if strategy not in ("ddp", "zero1"):  # which know no mesh
            assert dims.degrees == (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
        assert config.batch_size * config.gradient_accumulation * layout.dp == WORK.rows
        assert config.activation_checkpointing == layout.activation_checkpointing
        assert config.sequence_parallel == layout.sequence_parallel
        assert config.max_length == WORK.seq_len


@pytest.mark.parametrize(
    ("gpus", "nodes", "start"),
    [
        (1, 1, "python training/train_single.py "),
        (4, 1, "torchrun --nproc_per_node=4 training/train_ddp.py "),
        (8, 2, "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29500 training/"),
    ],
)
def test_the_launcher_is_that_of_the_machines(gpus: int, nodes: int, start: str) -> None:
    cluster = Cluster(GPUS["a100-80gb"], nodes=nodes, gpus_per_node=gpus // nodes)

    assert launch_command(LLAMA, Layout("ddp", dp_replicate=gpus), cluster).startswith(start)


def test_what_the_trainer_cannot_do_is_said() -> None:
    gpt = NAMED_SHAPES["gpt3-175b"]

    said = " ".join(cautions(gpt, Layout("tp", tp=8, seq_len=16_384)))

    assert "classifier" in said
    assert "not gpt2" in said
    assert "8192" in said
    assert not cautions(NAMED_SHAPES["bert-base"], Layout("tp", tp=4))
