"""Memory: the formulas of the papers, and what follows from them."""

from dataclasses import replace

import pytest

from training.planning.activations import BlockActivations, kept_bytes
from training.planning.memory import OURS, StateBytes, estimate_memory, zero_states
from training.planning.models import NAMED_SHAPES
from training.planning.partition import pipeline_ranks, rank_parameters, stages
from training.planning.shapes import Layout

LLAMA = NAMED_SHAPES["llama-13b"]
ZERO3 = Layout("zero3", dp_shard=32)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_states_are_those_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    # Figure 1 of arXiv 1910.02054: 7.5 billion parameters on 64 GPUs, 2 + 2 + 12 bytes each.
    states = zero_states(7.5e9, 64, stage, StateBytes(2, 2, 12))

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
    ],
)
def test_activations_are_those_of_the_megatron_paper(
    tp: int, sequence_parallel: bool, mode: str, expected: float
) -> None:
    layout = Layout("tp", tp=tp, sequence_parallel=sequence_parallel, activation_checkpointing=mode)

    assert kept_bytes(PAPER, layout) == pytest.approx(expected)


def test_selective_recomputation_without_scores_is_the_papers_equation_6() -> None:
    # Its choice keeps everything but the scores: 34 / t.
    everything_but_scores = replace(PAPER, entry=10)
    layout = Layout("tp", tp=8, sequence_parallel=True, activation_checkpointing="selective")

    assert kept_bytes(everything_but_scores, layout) == pytest.approx(34 / 8)


def test_the_stages_of_a_pipeline_hold_every_parameter_once() -> None:
    for schedule in ("1f1b", "interleaved", "zbv"):
        layout = Layout("pp", pp=4, schedule=schedule)
        held = [rank_parameters(LLAMA, layout, stage) for stage in pipeline_ranks(LLAMA, layout)]

        assert sum(held) == LLAMA.num_parameters


def test_the_stage_with_a_language_models_head_gets_fewer_blocks() -> None:
    *others, last = stages(NAMED_SHAPES["llama3-8b"], 4)

    assert last.blocks < min(stage.blocks for stage in others)


def test_sharding_over_all_ranks_leaves_each_an_equal_share_of_the_states() -> None:
    memory = estimate_memory(LLAMA, ZERO3)

    assert memory.parameters == OURS.parameter * LLAMA.num_parameters / 32
    assert memory.optimizer == OURS.optimizer * LLAMA.num_parameters / 32


@pytest.mark.parametrize(
    ("layout", "share"), [(ZERO3, 1 / ZERO3.dp_shard), (replace(ZERO3, dp_replicate=32, dp_shard=1), 1)]
)
def test_gradients_are_carried_from_micro_batch_to_micro_batch_in_their_shards(layout: Layout, share: float) -> None:
    accumulating = replace(layout, accumulation=2)

    more = estimate_memory(LLAMA, accumulating).total - estimate_memory(LLAMA, layout).total

    assert more == pytest.approx(OURS.gradient * LLAMA.num_parameters * share, rel=0.1)


def test_one_forward_one_backward_holds_no_more_micro_batches_than_stages() -> None:
    layout = Layout("pp", pp=4, accumulation=64)
    few = estimate_memory(LLAMA, replace(layout, accumulation=8))

    assert estimate_memory(LLAMA, layout).activations == few.activations
    assert estimate_memory(LLAMA, replace(layout, schedule="gpipe")).activations > 4 * few.activations


def test_more_checkpointing_holds_less() -> None:
    totals = [
        estimate_memory(LLAMA, replace(ZERO3, micro_batch=4, activation_checkpointing=mode)).total
        for mode in ("none", "selective", "full")
    ]

    assert totals == sorted(totals, reverse=True)
    assert totals[0] > 1.5 * totals[1] > 2 * totals[2]


def test_attention_scores_written_out_are_counted() -> None:
    shape, layout = NAMED_SHAPES["distilbert-base"], Layout("ddp", micro_batch=32, seq_len=512, precision="fp32")

    written = estimate_memory(shape, layout, fused_attention=False).activations
    fused = estimate_memory(shape, layout).activations

    # A probability, its mask and what is left of it, for each pair of tokens in each head; 5.25 blocks have them all.
    assert written - fused == pytest.approx(32 * 512 * 5.25 * 9 * 12 * 512)
