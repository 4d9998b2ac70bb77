"""Layouts: those that are tried, and the command that launches each."""

import shlex
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore  # no public fake backend as of torch 2.13

from benchmarks.real_step import model_of
from common.errors import UserError
from training.config import parse_config
from training.model.classifier import NewsClassifier
from training.parallelism.dims import ParallelDims
from training.parallelism.pipeline import check_pipeline
from training.parallelism.schedules import SCHEDULES, stages_of
from training.parallelism.stages import split_stages
from training.parallelism.tensor_parallel import apply_tensor_parallel
from training.planning.hardware import GPUS, Cluster
from training.planning.layouts import STRATEGIES, Layout, Work, layouts_of, with_batches
from training.planning.models import NAMED_SHAPES, ModelShape, gpt
from training.planning.plan import (
    LONGEST_TEXT,
    SHORTEST_TEXT,
    Plan,
    best_plans,
    cautions,
    launch_command,
    training_flags,
)

CLUSTER = Cluster(GPUS["a100-80gb"], nodes=2, gpus_per_node=8)
LLAMA = NAMED_SHAPES["llama-13b"]
WORK = Work(rows=64, seq_len=2048, precision="bf16")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_degrees_of_every_layout_multiply_to_the_gpus(strategy: str) -> None:
    layouts = list(layouts_of(LLAMA, CLUSTER, strategy))

    assert layouts
    assert all(layout.ranks == CLUSTER.gpus for layout in layouts)
    assert len(set(layouts)) == len(layouts)


def test_tensor_parallelism_divides_the_heads_within_a_node() -> None:
    twelve_heads = NAMED_SHAPES["distilbert-base"]
    eight_key_heads = NAMED_SHAPES["llama-70b"]

    assert {layout.tp for layout in layouts_of(twelve_heads, CLUSTER, "tp")} == {2, 4}
    assert {layout.tp for layout in layouts_of(eight_key_heads, CLUSTER, "tp")} == {2, 4, 8}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_batch_is_the_global_one_and_the_trainer_accepts_it(strategy: str) -> None:
    batches = [batch for layout in layouts_of(LLAMA, CLUSTER, strategy) for batch in with_batches(LLAMA, layout, WORK)]

    assert {batch.tokens_per_step for batch in batches} == {64 * 2048}
    for batch in (batch for batch in batches if batch.pp > 1):
        assert batch.accumulation >= batch.pp
        check_pipeline(parse_config(training_flags(LLAMA, batch), environment={}), batch.pp)
        assert batch.activation_checkpointing == "none" or not SCHEDULES[batch.schedule].splits_backward


def test_no_pipeline_has_more_stages_than_blocks() -> None:
    six_blocks = NAMED_SHAPES["distilbert-base"]
    batches = [
        batch
        for layout in layouts_of(six_blocks, CLUSTER, "pp")
        for batch in with_batches(six_blocks, layout, replace(WORK, seq_len=128))
    ]

    assert {(batch.pp, batch.schedule) for batch in batches if batch.pp > 2} == {(4, "gpipe"), (4, "1f1b")}


SIX_GPUS = Cluster(GPUS["a100-80gb"], nodes=1, gpus_per_node=6)
SINGLE = Cluster(GPUS["a100-80gb"], nodes=1, gpus_per_node=1)
BERT = NAMED_SHAPES["bert-base"]
ROBERTA = replace(BERT, name="roberta", family="roberta", type_vocab=1, max_positions=514)
GPT = replace(gpt("gpt2", 12, 768, 12), source="gpt2")
SHORT = Work(rows=240, seq_len=240, precision="bf16")


@pytest.fixture(scope="module")
def fake_ranks() -> Iterator[None]:
    """A process group of eight that sends nothing."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("cluster", [CLUSTER, SIX_GPUS, SINGLE], ids=lambda cluster: cluster.name)
@pytest.mark.parametrize(
    ("shape", "work"),
    [(NAMED_SHAPES["distilbert-base"], SHORT), (BERT, SHORT), (LLAMA, WORK), (ROBERTA, SHORT), (GPT, SHORT)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_trainer_accepts_every_command_and_lays_it_out_as_planned(
    shape: ModelShape, work: Work, cluster: Cluster, fake_ranks: None
) -> None:
    work = replace(work, rows=work.rows * 3 // 2 if cluster is SIX_GPUS else work.rows)
    plans = [plan for plan in best_plans(shape, cluster, work, STRATEGIES) if plan.fits]

    assert plans or (shape, cluster) == (LLAMA, SINGLE)
    with torch.device("meta"):
        model = model_of(replace(shape, num_labels=4))
    for plan in plans:
        _check_against_the_trainer(plan, model, work, cluster)


def _check_against_the_trainer(plan: Plan, model: NewsClassifier, work: Work, cluster: Cluster) -> None:
    layout, (launcher, flags) = plan.layout, plan.launch.split(".py ")
    config = parse_config(shlex.split(flags), environment={})
    dims = ParallelDims.from_config(config, layout.ranks, min(layout.ranks, cluster.gpus_per_node))
    assert config.batch_size * config.gradient_accumulation * layout.dp == work.rows
    assert config.activation_checkpointing == layout.activation_checkpointing
    assert config.sequence_parallel == layout.sequence_parallel
    assert config.max_length == work.seq_len
    if config.strategy in ("ddp", "zero1"):  # these use no mesh
        assert (dims.pp, dims.tp) == (1, 1)
        return
    assert launcher.startswith("torchrun")  # a mesh needs processes
    assert dims.degrees == (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
    if dims.pp > 1:
        check_pipeline(config, dims.pp)
        held = stages_of(config.pp_schedule, 0, dims.pp)
        split_stages(model, held[:1], dims.pp * len(held), plan.launch)
    if dims.tp > 1:
        assert not (config.sequence_parallel and config.max_length % dims.tp)
        with torch.device("meta"):
            block = model_of(replace(plan.shape, layers=1, num_labels=4))
        ranks = DeviceMesh("cpu", list(range(dims.tp)))
        apply_tensor_parallel(block, ranks, sequence_parallel=config.sequence_parallel)


@pytest.mark.parametrize("shape", [ROBERTA, GPT], ids=lambda shape: shape.name)
def test_families_that_the_trainer_cannot_split_get_no_tensor_or_pipeline_layout(shape: ModelShape) -> None:
    layouts = [layout for strategy in STRATEGIES for layout in layouts_of(shape, CLUSTER, strategy)]

    assert {layout.strategy for layout in layouts} == {"ddp", "zero1", "zero2", "zero3"}
    assert {(layout.tp, layout.pp) for layout in layouts} == {(1, 1)}


def test_sequences_are_cut_only_as_the_trainer_pads_them() -> None:
    layouts = layouts_of(BERT, SIX_GPUS, "tp")
    batches = [batch for layout in layouts for batch in with_batches(BERT, layout, SHORT)]

    assert {(batch.tp, batch.sequence_parallel) for batch in batches} == {
        (2, False),
        (2, True),
        (3, False),
        (6, False),
    }


@pytest.mark.parametrize(
    ("gpus", "nodes", "start"),
    [
        (1, 1, "python training/train_single.py "),
        (4, 1, "torchrun --nproc_per_node=4 training/train_ddp.py "),
        (8, 2, "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29500 training/"),
    ],
)
def test_the_launcher_fits_the_number_of_machines(gpus: int, nodes: int, start: str) -> None:
    cluster = Cluster(GPUS["a100-80gb"], nodes=nodes, gpus_per_node=gpus // nodes)

    assert launch_command(LLAMA, Layout("ddp", dp_replicate=gpus), cluster).startswith(start)


def test_a_path_with_spaces_is_one_word_of_the_command() -> None:
    shape = replace(LLAMA, source="my models/it's mine")

    words = shlex.split(launch_command(shape, Layout("ddp", dp_replicate=4), CLUSTER))

    assert words[words.index("--model") + 1] == "my models/it's mine"


def test_if_there_is_no_command_the_answer_says_why() -> None:
    gpt3, layout = NAMED_SHAPES["gpt3-175b"], Layout("zero3", dp_shard=16)
    long = replace(layout, seq_len=16_384)

    assert launch_command(gpt3, layout, CLUSTER) is launch_command(LLAMA, long, CLUSTER) is None
    assert "only the dimensions of gpt3-175b are known" in " ".join(cautions(gpt3, layout))
    assert "texts of 8 to 8192 tokens" in " ".join(cautions(LLAMA, long))


def test_the_trainer_takes_the_lengths_that_the_planner_says() -> None:
    for length in (SHORTEST_TEXT, LONGEST_TEXT):
        parse_config(("--max_length", str(length)), environment={})
    for length in (SHORTEST_TEXT - 1, LONGEST_TEXT + 1):
        with pytest.raises(UserError, match="max_length"):
            parse_config(("--max_length", str(length)), environment={})


def test_the_command_trains_a_language_model_if_one_was_planned() -> None:
    layout = Layout("3d", dp_shard=2, tp=2, pp=2, micro_batch=4, accumulation=8)

    words = shlex.split(launch_command(LLAMA, layout, CLUSTER))
    assert words[words.index("--task") + 1] == "causal_lm"
    assert parse_config(words[words.index("--task") :], environment={}).task == "causal_lm"
    assert "--task" not in launch_command(BERT, layout, CLUSTER)


def test_a_head_that_is_the_embedding_table_is_planned_but_not_split() -> None:
    tied, split = replace(LLAMA, tied_embeddings=True), Layout("tp", tp=2)

    assert launch_command(tied, split, CLUSTER) is None
    assert "whose head is its embedding table" in " ".join(cautions(tied, split))
    assert launch_command(tied, Layout("zero3", dp_shard=2), CLUSTER)
