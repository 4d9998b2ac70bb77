"""ZeRO-1 by hand, on real ranks: plain Adam's weights for a share of its memory."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from learn.by_hand.zero1 import create_sharded_adam, moment_bytes, show, zero1_step
from tests.learn.by_hand.printed import printed_by


def _train(num_steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor], int, int]:
    """Weights by ZeRO-1 on this rank's rows and by Adam on all rows; the bytes of moments of each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model, alone = (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double() for _ in range(2))
    alone.load_state_dict(model.state_dict())
    parameters, sharded = list(model.parameters()), create_sharded_adam(list(model.parameters()), 0.05)
    plain = torch.optim.Adam(alone.parameters(), lr=0.05)
    for _ in range(num_steps):
        inputs, labels = torch.randn(4 * size, 5, dtype=torch.float64), torch.randint(2, (4 * size,))
        own = slice(4 * rank, 4 * (rank + 1))
        for trained, rows in ((model, own), (alone, slice(None))):
            trained.zero_grad()
            F.cross_entropy(trained(inputs[rows]), labels[rows]).backward()
        zero1_step(parameters, sharded)
        plain.step()
    weights = ([parameter.detach() for parameter in trained.parameters()] for trained in (model, alone))
    return *weights, moment_bytes(sharded), moment_bytes(plain)


@pytest.fixture(scope="module")
def on_three_ranks(run_on_ranks: Callable[..., list[Any]]) -> list[Any]:
    """Six steps on three ranks."""
    return run_on_ranks(3, _train, 6)


def test_zero_1_trains_every_rank_to_the_weights_of_plain_adam(on_three_ranks: list[Any]) -> None:
    for sharded, plain, _, _ in on_three_ranks:
        torch.testing.assert_close(sharded, plain, rtol=0, atol=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(sharded, on_three_ranks[0][0], strict=True))


def test_each_rank_keeps_the_moments_of_its_share_alone(on_three_ranks: list[Any]) -> None:
    num_weights = 5 * 7 + 7 + 7 * 2 + 2  # 58: over 3 ranks 20 each, 2 of them padding

    for _, _, sharded, plain in on_three_ranks:
        assert plain == 2 * 8 * num_weights
        assert sharded == 2 * 8 * 20


def test_the_printed_bytes_and_differences_are_those_of_adam(run_on_ranks: Callable[..., list[Any]]) -> None:
    printed, other = run_on_ranks(2, printed_by, show)

    assert other == ""
    assert printed.startswith("387 weights; each of 2 ranks owns 194, padding included\n")
    assert printed.endswith("bytes of moments on each rank: ZeRO-1 [1552, 1552], plain Adam 3096\n")
    gaps = re.findall(r"^step \d: loss \d\.\d{4}, largest difference to the weights of plain Adam (.+)$", printed, re.M)
    assert len(gaps) == 5
    assert all(float(gap) < 1e-5 for gap in gaps)
