"""The diary of DDP's buckets: what it says happens, happens."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from learn.by_hand import ddp_buckets
from tests.learn.by_hand.printed import printed_by


@pytest.fixture(scope="module")
def steps(run_on_ranks: Callable[..., list[Any]]) -> list[str]:
    """What rank 0 prints of each backward pass."""
    return run_on_ranks(2, printed_by, ddp_buckets.show)[0].strip().split("\n\n")


def test_all_gradients_share_a_bucket_in_step_1_and_the_first_to_come_share_one_in_step_2(steps: list[str]) -> None:
    first, second = (re.findall(r"bucket \d launched: (\d+) gradients", step) for step in steps[:2])

    assert first == ["10"]
    assert len(second) == 2
    assert steps[1].index("head.weight") < steps[1].index("bucket 0") < steps[1].index("layers.0.weight")


def test_a_bucket_is_launched_before_the_backward_pass_has_ended(steps: list[str]) -> None:
    assert re.search(r"bucket 0 launched: .*; [1-9]\d* still to be computed", steps[1])


def test_without_sync_nothing_is_sent_and_gradients_differ(steps: list[str]) -> None:
    norms = [re.search(r"by rank: (\S+), (\S+)", step).groups() for step in steps]

    assert [one == other for one, other in norms] == [True, True, False, True]
    assert "launched" in steps[3]
    assert "launched" not in steps[2]
