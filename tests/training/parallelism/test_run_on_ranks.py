"""The fixture that other tests stand on."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import RankFailure, here


def _add_up(value: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([value + here().rank])
    dist.all_reduce(total)
    return os.getpid(), total


def _fail_on_rank_1() -> None:
    if here().rank == 1:
        raise ValueError("this one")
    dist.barrier()


def _hang() -> None:
    time.sleep(600)


def _end_rank_1() -> None:
    if here().rank == 1:
        os._exit(1)
    _hang()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_rank_answers_in_order_and_none_is_left(run_on_ranks: Callable[..., list[Any]]) -> None:
    pids, totals = zip(*run_on_ranks(3, _add_up, 10), strict=True)

    assert [total.item() for total in totals] == [33, 33, 33]
    assert len(set(pids)) == 3
    assert not any(map(_is_running, pids))


@pytest.mark.parametrize(
    ("function", "complaint"),
    [(_fail_on_rank_1, "rank 1:\n.*ValueError: this one"), (_end_rank_1, "rank 1 ended without a word")],
)
def test_what_ends_a_rank_is_said_though_others_wait_for_it(
    run_on_ranks: Callable[..., list[Any]], function: Callable[[], None], complaint: str
) -> None:
    with pytest.raises(RankFailure, match=f"(?s){complaint}"):
        run_on_ranks(2, function)


def test_ranks_that_hang_are_ended_at_the_deadline(run_on_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankFailure, match="still at work"):
        run_on_ranks(2, _hang, seconds=2)
