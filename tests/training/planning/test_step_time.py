"""Step time: rooflines, bubbles and recomputation."""

from dataclasses import replace

import pytest

from training.parallelism.schedules import SCHEDULES
from training.parallelism.timeline import Costs, simulate
from training.planning.hardware import GPUS, Cluster
from training.planning.layouts import Layout
from training.planning.models import NAMED_SHAPES, gpt
from training.planning.step_time import Roofline, bubble_seconds, estimate_step

A100 = Cluster(GPUS["a100-80gb"], nodes=4, gpus_per_node=8)
ONE = Cluster(GPUS["a100-80gb"], nodes=1, gpus_per_node=1)
LLAMA = NAMED_SHAPES["llama-13b"]


def test_a_large_product_reaches_the_gpus_share_of_its_peak() -> None:
    size = 2**17

    seconds = Roofline(ONE, "bf16").matrix_seconds(size, size, size)

    assert 2 * size**3 / seconds == pytest.approx(0.75 * 312e12, rel=0.01)


def test_a_thin_product_is_bound_by_memory() -> None:
    roofline = Roofline(ONE, "bf16")

    assert roofline.matrix_seconds(1, 8192, 8192) == pytest.approx(roofline.bytes_seconds(2 * 8192**2), rel=0.01)


# No head, so that stages are equal: a classifier's costs nothing. Causal, so that no block is cheaper.
EVEN = replace(gpt("even", 32, 1024, 16), num_labels=4)


@pytest.mark.parametrize(("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_bubble_is_that_of_the_papers(schedule: str, per_rank: int) -> None:
    layout = Layout("pp", pp=4, accumulation=8, schedule=schedule)

    time, _ = estimate_step(EVEN, layout, A100)

    # Of m + p - 1 rounds, p - 1 are bubble: arXiv 1811.06965; over v with v stages a rank: arXiv 2104.04473.
    busy = time.total - time.bubble - time.optimizer
    assert time.bubble / busy == pytest.approx(3 / per_rank / 8, rel=1e-6)


# For matrix products the backward pass takes twice as long as the forward pass, and longer with attention.
@pytest.mark.parametrize("backward", [2.0, 3.0])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 4), (4, 8), (8, 32)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_is_that_of_the_order_in_which_torch_runs(
    schedule: str, stages: int, micro_batches: int, backward: float
) -> None:
    layout = Layout("pp", pp=stages, accumulation=micro_batches, schedule=schedule)
    turns = SCHEDULES[schedule].stages_per_rank
    costs = Costs(1 / turns, backward / 2 / turns, backward / 2 / turns)

    waited = simulate(schedule, stages, micro_batches, costs=costs).duration - micro_batches * (1 + backward)

    assert bubble_seconds(layout, 1, backward, waited=0) == pytest.approx(waited)


def test_full_checkpointing_costs_a_third_more_computation() -> None:
    layout = Layout("zero3", dp_shard=32, micro_batch=4)

    plain, full = (
        estimate_step(LLAMA, replace(layout, activation_checkpointing=mode), A100)[0].compute
        for mode in ("none", "full")
    )

    assert full / plain == pytest.approx(4 / 3, abs=0.04)


def test_the_cpu_sets_the_pace_of_small_kernels() -> None:
    shape = NAMED_SHAPES["distilbert-base"]
    one, eight = (estimate_step(shape, Layout("ddp", micro_batch=rows, seq_len=16), ONE)[0] for rows in (1, 8))

    assert one.compute == pytest.approx(eight.compute)


def test_scores_that_go_to_memory_cost_more_the_longer_the_rows() -> None:
    unfused = replace(ONE, calibration=replace(ONE.calibration, score_passes=6.5))
    slower = []
    for seq_len in (256, 4096):
        layout = Layout("ddp", micro_batch=8192 // seq_len, seq_len=seq_len)
        times = [estimate_step(LLAMA, layout, cluster)[0].compute for cluster in (unfused, ONE)]
        slower.append(times[0] / times[1])

    assert 1 < slower[0] < slower[1]
