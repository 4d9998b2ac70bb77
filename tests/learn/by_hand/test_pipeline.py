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
from learn.by_hand.pipeline_timeline import IDLE, Event, slots
from tests.learn.by_hand.printed import printed_by

ORDERS = {"GPipe": gpipe, "1F1B": one_forward_one_backward}


def _pipeline_and_one_process(name: str, num_micro_batches: int) -> tuple[list, list, list[Event]]:
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
        ("GPipe", 2, 4),
        ("1F1B", 3, 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(["GPipe", "1F1B"], [2, 4], [1, 2, 9])
        ),
    ],
)
def test_stages_find_the_gradients_of_one_process_and_the_bubble_of_the_formula(
    run_on_ranks: Callable[..., list[Any]], name: str, world_size: int, num_micro_batches: int
) -> None:
    results = run_on_ranks(world_size, _pipeline_and_one_process, name, num_micro_batches)

    for piped, alone, _ in results:
        torch.testing.assert_close(piped, alone, rtol=0, atol=1e-15)
    rows = slots([events for _, _, events in results])
    assert {len(row) for row in rows} == {2 * (num_micro_batches + world_size - 1)}
    assert {row.count(IDLE) for row in rows} == {2 * (world_size - 1)}
    for stage, (_, _, events) in enumerate(results):
        kept = max(event.num_kept for event in events)
        assert kept == (num_micro_batches if name == "GPipe" else min(world_size - stage, num_micro_batches))


def test_the_orders_are_those_of_the_papers() -> None:
    def words(order: Callable[..., list[tuple[str, int]]], stage: int) -> str:
        return " ".join(f"{kind}{index}" for kind, index in order(stage, 3, 4))

    assert {words(gpipe, stage) for stage in range(3)} == {"F0 F1 F2 F3 B0 B1 B2 B3"}
    assert words(one_forward_one_backward, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words(one_forward_one_backward, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words(one_forward_one_backward, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_an_action_that_ends_before_what_it_needs_is_not_drawn() -> None:
    first = [Event(0, "F", 0, ended=2.0, num_kept=1)]
    too_early = [Event(1, "F", 0, ended=1.0, num_kept=1)]

    with pytest.raises(KeyError):
        slots([first, too_early])


def test_both_orders_are_drawn_as_they_ran(run_on_ranks: Callable[..., list[Any]]) -> None:
    printed, other = run_on_ranks(2, printed_by, show)

    assert other == ""
    lines = [line.rstrip() for line in printed.splitlines()]
    assert lines.count("in that order, if every action took one slot:") == 2
    assert lines.count("bubble, if so: 4 of 36 slots idle = 11.1%; by formula 11.1%") == 2
    assert "micro-batches whose activations are kept at once, by stage: [8, 8]" in lines
    assert "micro-batches whose activations are kept at once, by stage: [2, 1]" in lines
    one_by_one = "F0  F1  ..  B0  F2  B1  F3  B2  F4  B3  F5  B4  F6  B5  F7  B6  ..  B7"
    assert f"  stage 0 | {one_by_one}" in lines
    gaps = [line.rpartition(": ")[2].split(", ") for line in lines if line.startswith("largest difference")]
    assert len(gaps) == 2
    assert all(float(gap) < 1e-15 for of_order in gaps for gap in of_order)
