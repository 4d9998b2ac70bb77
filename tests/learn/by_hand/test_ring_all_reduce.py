"""The ring, on real ranks: equal to the library's collective, and as thrifty as the paper says."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from learn.by_hand.ring_all_reduce import ring_all_reduce, show
from tests.learn.by_hand.printed import printed_by

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
SHAPES = ((), (1,), (2,), (5, 3), (64, 8))  # most are no multiple of the ranks, some have fewer elements


def _both(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    by_hand = torch.randint(0, 20, shape, generator=generator).to(dtype)  # whole numbers: no sum is rounded
    collective = by_hand.clone()
    dist.all_reduce(collective)
    return by_hand, collective, ring_all_reduce(by_hand)


def _both_for_all() -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    return [_both(shape, dtype) for shape in SHAPES for dtype in DTYPES]


def _bits_of_a_rounded_sum() -> torch.Tensor:
    torch.manual_seed(dist.get_rank())
    tensor = torch.randn(101)
    ring_all_reduce(tensor)
    return tensor


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_the_ring_equals_the_collective_for_every_type_and_length_and_sends_no_more(
    run_on_ranks: Callable[..., list[Any]], world_size: int
) -> None:
    for case in zip(*run_on_ranks(world_size, _both_for_all), strict=True):
        assert len(case) == world_size
        for by_hand, collective, _ in case:
            assert by_hand.dtype == collective.dtype
            assert torch.equal(by_hand, collective)
        # However unequal the chunks, together the ranks send this much.
        assert sum(sent for _, _, sent in case) == 2 * (world_size - 1) * case[0][0].nbytes


def test_a_rank_sends_2_n_minus_1_nths_of_a_tensor_that_the_ranks_divide(
    run_on_ranks: Callable[..., list[Any]],
) -> None:
    assert [sent for _, _, sent in run_on_ranks(4, _both, (64, 8), torch.float32)] == [2 * 3 * 64 * 8] * 4


@pytest.mark.slow
def test_all_ranks_hold_the_same_bits_of_a_rounded_sum(run_on_ranks: Callable[..., list[Any]]) -> None:
    first, *others = run_on_ranks(3, _bits_of_a_rounded_sum)

    assert all(torch.equal(first, other) for other in others)


def test_what_is_printed_after_each_step_names_the_ranks_in_every_sum(run_on_ranks: Callable[..., list[Any]]) -> None:
    printed, *others = run_on_ranks(3, printed_by, show)

    assert set(others) == {""}
    tables = [block.splitlines()[1:4] for block in re.split(r"\n\n", printed)[1:6]]
    assert [len(table) for table in tables] == [3] * 5  # before, and 2 + 2 steps
    assert tables[1][1] == "  rank 1 |*  11  22  33 |   40  50  60 |   70  80  90"
    assert tables[2][2] == "  rank 2 |* 111 222 333 |  440 550 660 |  700 800 900"
    assert {row.split("|", 1)[1].replace("*", " ") for row in tables[4]} == {
        "  111 222 333 |  444 555 666 |  777 888 999"
    }
    assert "bytes sent by each rank: [96, 96, 96]" in printed
    assert "2 (N - 1) / N of the tensor's 72 bytes: 96" in printed
    assert "equal to dist.all_reduce, rank by rank: [True, True, True]" in printed
