"""The three functions of data parallelism by hand, on real ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learn.by_hand.cnn import CNN
from learn.by_hand.compare_with_ddp import compare, show
from learn.by_hand.data_parallel import average_gradients, broadcast_parameters, global_accuracy
from tests.learn.by_hand.printed import printed_by
from tests.processes import here

RunOnRanks = Callable[..., list[Any]]
WORLD_SIZES = [2, 3]


class WithBuffersAndUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.frozen = nn.Linear(4, 3).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + self.frozen(x)


def _broadcast() -> tuple[bool, bool, dict[str, torch.Tensor]]:
    torch.manual_seed(here().rank)
    model = WithBuffersAndUnused()
    model.used[1].running_mean += here().rank + 7
    model.used[1].num_batches_tracked += here().rank + 5
    before = list(model.parameters())
    requires = [parameter.requires_grad for parameter in before]
    broadcast_parameters(model)
    same_objects = all(one is other for one, other in zip(before, model.parameters(), strict=True))
    return same_objects, [p.requires_grad for p in model.parameters()] == requires, model.state_dict()


def _gradients(rows_per_rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """Averaged by hand; of the whole batch in one process; and which have none."""
    ranks = here()
    torch.manual_seed(3)
    model, alone = CNN(width=8).double(), CNN(width=8).double()
    alone.load_state_dict(model.state_dict())
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    images = torch.randn(rows_per_rank * ranks.world_size, 3, 32, 32, dtype=torch.float64)
    labels = torch.arange(len(images)) % 10
    share = slice(ranks.rank, None, ranks.world_size)
    F.cross_entropy(model(images[share]), labels[share]).backward()
    average_gradients(model)
    F.cross_entropy(alone(images), labels).backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return found, {name: parameter.grad for name, parameter in alone.named_parameters()}, without


def _average_in_half_precision() -> float:
    model = nn.Linear(1, 1, bias=False).half()
    model.weight.grad = torch.full_like(model.weight, 40_000)
    average_gradients(model)
    return model.weight.grad.item()


def _accuracies() -> tuple[float, float]:
    """Of shares of 10, 2 and 1 rows; and where the last rank has none."""
    rank = here().rank
    uneven = global_accuracy(correct=[9, 0, 1][rank], total=[10, 2, 1][rank])
    return uneven, global_accuracy(correct=[3, 3, 0][rank], total=[4, 4, 0][rank])


def _compare() -> list[tuple[float, ...]]:
    return list(compare(here()))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_ranks_get_rank_0s_weights_and_buffers_in_the_tensors_they_had(
    run_on_ranks: RunOnRanks, world_size: int
) -> None:
    (_, _, first), *others = results = run_on_ranks(world_size, _broadcast)

    assert all(same_objects and requires_grad_kept for same_objects, requires_grad_kept, _ in results)
    assert first["used.1.running_mean"].tolist() == [7.0, 7.0, 7.0]
    assert first["used.1.num_batches_tracked"] == 5
    for _, _, state in others:
        torch.testing.assert_close(state, first, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_averaged_gradients_are_those_of_the_global_batch(run_on_ranks: RunOnRanks, world_size: int) -> None:
    for averaged, alone, without in run_on_ranks(world_size, _gradients, 4):
        assert without == ["unused"]
        torch.testing.assert_close(averaged, alone, rtol=0, atol=1e-12)


def test_a_mean_of_large_gradients_in_half_precision_does_not_overflow(run_on_ranks: RunOnRanks) -> None:
    assert run_on_ranks(2, _average_in_half_precision) == [40_000.0] * 2


def test_accuracy_counts_rows_not_ranks(run_on_ranks: RunOnRanks) -> None:
    assert run_on_ranks(3, _accuracies) == [(10 / 13, 3 / 4)] * 3


def test_two_ranks_by_hand_equal_ddp_to_the_bit_after_every_step(run_on_ranks: RunOnRanks) -> None:
    for rows in run_on_ranks(2, _compare):
        assert len(rows) == 10
        assert all(by_hand == in_ddp and weights == 0 for by_hand, in_ddp, _, weights in rows)


def test_three_ranks_by_hand_equal_ddp_but_for_rounding(run_on_ranks: RunOnRanks) -> None:
    first, *others = run_on_ranks(3, printed_by, show)

    assert first.splitlines()[-1].startswith("weights: equal")
    assert others == ["", ""]
