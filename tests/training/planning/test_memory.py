"""Memory: the papers' formulas, what autograd keeps of a real block, and what real processes held."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from benchmarks.real_step import measure_memory, model_of
from tests.processes import here, run_on_ranks
from training.model.architectures import Architecture, Bert, DistilBert, Llama
from training.model.dropout import RowDropout
from training.model.precision import autocast
from training.parallelism.schedules import SCHEDULES
from training.parallelism.stages import balanced_split
from training.parallelism.timeline import simulate
from training.planning.layouts import (
    SPLIT_SCHEDULES,
    STAGES_PER_RANK,
    Layout,
    pipeline_ranks,
    rank_parameters,
    stages,
)
from training.planning.memory import (
    GRADIENT,
    MOMENTS,
    WEIGHT,
    BlockActivations,
    block_activations,
    estimate_memory,
    estimate_stage,
    in_flight,
    kept_bytes,
    zero_states,
)
from training.planning.models import NAMED_SHAPES, ModelShape

LLAMA = NAMED_SHAPES["llama-13b"]
ZERO3 = Layout("zero3", dp_shard=32)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_states_are_those_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    # Figure 1 of arXiv 1910.02054: 7.5 billion parameters on 64 GPUs, 2 + 2 + 12 bytes each.
    states = zero_states(7.5e9, 64, stage, (2, 2, 12))

    assert sum(states) / 1e9 == pytest.approx(gigabytes, abs=0.05)


# Arithmetic of arXiv 2205.05198, table 2, for GPT-3: s = 2048, h = 12288, a = 96, in bytes over s b h.
GPT3_SCORES = 5 * 96 * 2048 / 12_288
PAPER = BlockActivations(
    entry=2, norms=10, inputs=0, split=24, scores=GPT3_SCORES, products=24, whole_products=0
)  # fmt: skip


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "mode", "expected"),
    [
        (1, False, "none", 34 + GPT3_SCORES),
        (8, False, "none", 10 + 24 / 8 + GPT3_SCORES / 8),
        (8, True, "none", 34 / 8 + GPT3_SCORES / 8),
        (1, False, "full", 2),
        (8, True, "full", 2 / 8),
        (8, True, "selective", (2 + 24) / 8),  # equation 6, with the block's input and the products only
    ],
)
def test_activations_are_those_of_the_megatron_paper(
    tp: int, sequence_parallel: bool, mode: str, expected: float
) -> None:
    layout = Layout("tp", tp=tp, sequence_parallel=sequence_parallel, activation_checkpointing=mode)

    assert kept_bytes(PAPER, layout) == pytest.approx(expected)


SIZE = {"layers": 2, "hidden": 256, "heads": 4, "head_dim": 64, "intermediate": 640, "vocab": 99, "max_positions": 32}
SHAPES = {
    "distilbert": ModelShape("small", "distilbert", kv_heads=4, num_labels=4, **SIZE),
    "bert": ModelShape("small", "bert", kv_heads=4, type_vocab=2, num_labels=4, **SIZE),
    "llama": ModelShape("small", "llama", kv_heads=2, num_labels=4, **SIZE),
    "gpt2": ModelShape("small", "gpt2", kv_heads=4, num_labels=4, **SIZE),
}


class _DropoutOfGPUs(nn.Module):
    """CUDA's dropout keeps a mask of one byte per value."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, self.p, True)[0] if self.p else x


class _LayerNormOfGPUs(nn.LayerNorm):
    """CUDA's autocast runs LayerNorm in fp32, the CPU's does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


def _fused_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> tuple[torch.Tensor, None]:
    """Without a mask and dropout inside, a CPU keeps what the fused kernels of GPUs keep."""
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=module.is_causal, enable_gqa=True)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register("fused_as_on_gpus", _fused_attention)


def _kept_by_a_block(shape: ModelShape, precision: str, *, gathered: bool) -> float:
    """Bytes per token that autograd keeps of a real block, without weights and autocast's copies of them."""
    model = model_of(shape).train()
    model.network.set_attn_implementation("fused_as_on_gpus")
    for parent in model.network.modules():
        for name, child in list(parent.named_children()):
            if type(child) is nn.LayerNorm:
                child.__class__ = _LayerNormOfGPUs
            elif isinstance(child, nn.Dropout | RowDropout):
                is_inside_attention = name in ("dropout", "attn_dropout") and "Attention" in type(parent).__name__
                setattr(parent, name, _DropoutOfGPUs(0.0 if is_inside_attention else child.p))
    if gathered:
        model.to(torch.bfloat16)
    hidden = torch.randn(2, 32, shape.hidden, dtype=next(model.parameters()).dtype).requires_grad_()
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    copies = {parameter.numel() for parameter in model.parameters() if parameter.ndim == 2}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel() not in copies:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with autocast(precision, hidden.device):
        context = {}
        if model.architecture:
            context = model.architecture.context(model.network, hidden, torch.ones(2, 32, dtype=torch.int64))
            context["attention_mask"] = None  # no row is padded
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model.blocks[0](hidden.clone(), **context)  # of a leaf, autocast would make no more than one copy
    return sum(kept.values()) / (2 * 32)


@pytest.mark.parametrize(
    ("family", "precision", "gathered"),
    [
        *((family, "fp32", False) for family in SHAPES),
        *((family, "bf16", False) for family in ("distilbert", "bert")),
        *((family, "bf16", True) for family in ("distilbert", "bert", "llama")),
    ],
)
def test_a_block_keeps_what_autograd_keeps_of_a_real_one(family: str, precision: str, gathered: bool) -> None:
    block = block_activations(SHAPES[family], 32, precision=precision, gathered=gathered)

    counted = _kept_by_a_block(SHAPES[family], precision, gathered=gathered)

    # The statistics of norms and the maxima of softmax are not planned.
    assert kept_bytes(block, Layout("ddp")) == pytest.approx(counted, rel=0.02)


def test_the_stages_of_a_pipeline_hold_every_parameter_once() -> None:
    for schedule in ("1f1b", "interleaved", "zbv"):
        layout = Layout("pp", pp=4, schedule=schedule)
        held = [rank_parameters(LLAMA, layout, stage) for stage in pipeline_ranks(LLAMA, layout)]

        assert sum(held) == LLAMA.num_parameters


def test_the_stage_with_a_language_models_head_gets_fewer_blocks() -> None:
    *others, last = stages(NAMED_SHAPES["llama3-8b"], 4)

    assert last.blocks < min(stage.blocks for stage in others)


@pytest.mark.parametrize(
    ("name", "family"), [("distilbert-base", DistilBert), ("bert-large", Bert), ("llama-13b", Llama)]
)
def test_the_trainer_cuts_its_classifiers_into_the_same_stages(name: str, family: type[Architecture]) -> None:
    shape = replace(NAMED_SHAPES[name], num_labels=4)
    costs = [1.0] * (shape.layers - 1) + [family.last_block_work]

    for count in range(1, shape.layers + 1):
        planned = [stage.blocks for stage in stages(shape, count)]
        assert planned == [len(run) for run in balanced_split(costs, count)]


def test_the_schedules_are_those_of_the_trainer() -> None:
    assert {name: schedule.stages_per_rank for name, schedule in SCHEDULES.items()} == STAGES_PER_RANK
    assert {name for name, schedule in SCHEDULES.items() if schedule.splits_backward} == set(SPLIT_SCHEDULES)


def test_sharding_over_all_ranks_divides_the_states_equally() -> None:
    memory = estimate_memory(LLAMA, ZERO3)

    assert memory.parameters == WEIGHT * LLAMA.num_parameters / 32
    assert memory.optimizer == MOMENTS * LLAMA.num_parameters / 32


@pytest.mark.parametrize(
    ("layout", "share"), [(ZERO3, 1 / ZERO3.dp_shard), (replace(ZERO3, dp_replicate=32, dp_shard=1), 1)]
)
def test_gradients_are_carried_from_micro_batch_to_micro_batch_in_their_shards(layout: Layout, share: float) -> None:
    accumulating = replace(layout, accumulation=2)

    more = estimate_memory(LLAMA, accumulating).total - estimate_memory(LLAMA, layout).total

    assert more == pytest.approx(GRADIENT * LLAMA.num_parameters * share, rel=0.1)


def test_one_forward_one_backward_holds_no_more_micro_batches_than_stages() -> None:
    layout = Layout("pp", pp=4, accumulation=64)
    few = estimate_memory(LLAMA, replace(layout, accumulation=8))

    assert estimate_memory(LLAMA, layout).activations == few.activations
    assert estimate_memory(LLAMA, replace(layout, schedule="gpipe")).activations > 4 * few.activations


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 32), (8, 16)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_as_many_micro_batches_are_in_flight_as_torchs_order_keeps(
    schedule: str, stages: int, micro_batches: int
) -> None:
    layout = Layout("pp", pp=stages, accumulation=micro_batches, schedule=schedule)
    timeline = simulate(schedule, stages, micro_batches)

    for rank in range(stages):
        assert in_flight(layout, rank) == timeline.activations_kept(rank)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 6, 12])
def test_no_rank_needs_more_than_the_representative_ones(pp: int, schedule: str) -> None:
    for name in ("llama-13b", "bert-large", "llama3-8b"):
        shape = NAMED_SHAPES[name]
        layout = Layout("pp", pp=pp, accumulation=24, micro_batch=2, schedule=schedule)
        if pp * SCHEDULES[schedule].stages_per_rank > shape.layers:
            continue

        totals = [estimate_stage(shape, layout, rank).total for rank in pipeline_ranks(shape, layout)]

        assert estimate_memory(shape, layout).total == max(totals)


def test_attention_scores_written_out_are_counted() -> None:
    shape, layout = NAMED_SHAPES["distilbert-base"], Layout("ddp", micro_batch=32, seq_len=512, precision="fp32")

    written = estimate_memory(shape, layout, fused_attention=False).activations
    fused = estimate_memory(shape, layout).activations

    # A probability, its mask and what is left of it, for each pair of tokens in each head; 5.25 blocks have them all.
    assert written - fused == pytest.approx(32 * 512 * 5.25 * 9 * 12 * 512)


SMALL = ModelShape("small", "distilbert", 4, 256, 4, 4, 1024, vocab=4000, max_positions=128, head_dim=64, num_labels=4)
ROWS = {"micro_batch": 16, "seq_len": 64, "precision": "fp32"}
LAYOUTS = (
    Layout("ddp", dp_replicate=2, **ROWS),
    Layout("zero1", dp_replicate=2, **ROWS),
    Layout("zero2", dp_shard=2, **ROWS),
    Layout("zero3", dp_shard=2, **ROWS),
    Layout("zero3", dp_shard=2, accumulation=3, **ROWS),
    Layout("zero3", dp_shard=2, activation_checkpointing="full", **ROWS),
    Layout("tp", tp=2, **ROWS),
    Layout("tp", tp=2, sequence_parallel=True, **ROWS),
    Layout("pp", pp=2, accumulation=4, **ROWS),
)


def _measure() -> list[dict[str, float]]:
    return [measure_memory(SMALL, layout, here()) for layout in LAYOUTS]


@pytest.mark.slow
def test_the_formula_is_within_a_tenth_of_what_two_real_ranks_hold() -> None:
    for layout, *measured in zip(LAYOUTS, *run_on_ranks(2, _measure), strict=True):
        real = {kind: max(rank[kind] for rank in measured) for kind in measured[0]}
        planned = estimate_memory(SMALL, layout, fused_attention=False)

        assert planned.total == pytest.approx(real["peak"], rel=0.1), layout
        assert planned.parameters == pytest.approx(real["parameters"], rel=0.02), layout
        assert planned.optimizer == pytest.approx(real["optimizer"], rel=0.02), layout
