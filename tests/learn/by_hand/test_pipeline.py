"""The pipeline by hand, on real ranks: equal to one process, in the order and with the bubble that the papers give."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from learn.by_hand.pipeline import Stage, gpipe, one_forward_one_backward, show
from tests.learn.by_hand.printed import printed_by
from training.parallelism import timeline
from training.parallelism.schedules import Action

ORDERS = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def _pipeline_and_one_process(name: str, num_micro_batches: int) -> tuple[list, list, list[tuple[Action, int]]]:
    """This stage's gradients both ways, and what it did."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)) for _ in range(size))).double()
    inputs, targets = torch.randn(2, 2 * num_micro_batches, 6, dtype=torch.float64)
    module = layers[rank]
    alone = torch.autograd.grad(F.mse_loss(layers(inputs), targets), list(module.parameters()))
    stage = Stage(module, inputs.chunk(num_micro_batches), targets.chunk(num_micro_batches))
    events = stage.run(ORDERS[name](rank, size, num_micro_batches))
    return [parameter.grad for parameter in module.parameters()], list(alone), events


@pytest.mark.parametrize(
    ("name", "world_size", "num_micro_batches"),
    [
        ("gpipe", 2, 4),
        ("1f1b", 3, 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(["gpipe", "1f1b"], [2, 4], [1, 2, 9])
        ),
    ],
)
def test_stages_find_the_gradients_of_one_process_and_the_bubble_of_the_formula(
    run_on_ranks: Callable[..., list[Any]], name: str, world_size: int, num_micro_batches: int
) -> None:
    results = run_on_ranks(world_size, _pipeline_and_one_process, name, num_micro_batches)

    for piped, alone, _ in results:
        torch.testing.assert_close(piped, alone, rtol=0, atol=1e-15)
    ran = timeline.place([[action for action, _ in events] for _, _, events in results], name)
    assert ran.bubble_share == pytest.approx((world_size - 1) / (num_micro_batches + world_size - 1))
    for stage, (_, _, events) in enumerate(results):
        kept = max(num_kept for _, num_kept in events)
        assert kept == (num_micro_batches if name == "gpipe" else min(world_size - stage, num_micro_batches))
        assert kept == ran.activations_kept(stage)


def test_the_orders_are_those_of_the_papers() -> None:
    def words(order: Callable[..., list[tuple[str, int]]], stage: int) -> str:
        return " ".join(f"{kind}{index}" for kind, index in order(stage, 3, 4))

    assert {words(gpipe, stage) for stage in range(3)} == {"F0 F1 F2 F3 B0 B1 B2 B3"}
    assert words(one_forward_one_backward, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words(one_forward_one_backward, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words(one_forward_one_backward, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_both_orders_are_drawn_as_they_ran(run_on_ranks: Callable[..., list[Any]]) -> None:
    printed, other = run_on_ranks(2, printed_by, show)

    assert other == ""
    lines = [line.rstrip() for line in printed.splitlines()]
    assert "GPipe: 2 ranks, 8 micro-batches, bubble 11.1%" in lines
    assert "1F1B: 2 ranks, 8 micro-batches, bubble 11.1%" in lines
    kept = "micro-batches whose activations each rank keeps at most"
    assert [line for line in lines if line.startswith(kept)] == [f"{kept}: 8, 8", f"{kept}: 2, 1"]
    assert "rank 0 0 1 ····0▒▒▒2 1▒▒▒3 2▒▒▒4 3▒▒▒5 4▒▒▒6 5▒▒▒7 6▒▒▒··7▒▒▒" in lines
    gaps = [line.rpartition(": ")[2].split(", ") for line in lines if line.startswith("largest difference")]
    assert len(gaps) == 2
    assert all(float(gap) < 1e-15 for of_order in gaps for gap in of_order)
