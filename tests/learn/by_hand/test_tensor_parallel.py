"""Layers cut by hand: equal to DTensor's and to one process, on real ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from learn.by_hand.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.processes import here

EXACT = {"rtol": 0.0, "atol": 1e-12}  # fp64: only the order of a sum may differ
Values = dict[str, torch.Tensor]


def _feed_forward(*, bias: bool) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 24, bias=bias), nn.GELU(), nn.Linear(24, 12, bias=bias)).double()


def _run(module: nn.Module) -> Values:
    """Output, and the gradients of the input and of every parameter, whole."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(3, 5, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    output = module(x)
    output.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in gradients.items()}
    return {"output": output.detach(), "input": x.grad, **whole}


def _gathered(shares: Values) -> Values:
    """The shares of the gradients of :func:`_by_hand`, put together in the order of ranks."""
    split_along = {"0.weight": 0, "0.bias": 0, "2.weight": 1}

    def whole(name: str, share: torch.Tensor) -> torch.Tensor:
        if name not in split_along:
            return share
        parts = [torch.empty_like(share) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, share.contiguous())
        return torch.cat(parts, dim=split_along[name])

    return {name: whole(name, share) for name, share in shares.items()}


def _by_hand(linears: nn.Sequential) -> nn.Sequential:
    first, activation, second = linears
    return nn.Sequential(ColumnParallelLinear.from_linear(first), activation, RowParallelLinear.from_linear(second))


def _three_ways(bias: bool) -> tuple[Values, Values, Values]:
    mesh = init_device_mesh("cpu", (here().world_size,))
    by_dtensor = parallelize_module(_feed_forward(bias=bias), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    by_hand = _by_hand(_feed_forward(bias=bias))
    return _run(_feed_forward(bias=bias)), _run(by_dtensor), _gathered(_run(by_hand))


def _count_calls() -> int:
    module = _by_hand(_feed_forward(bias=True))
    with CommDebugMode() as calls:
        _run(module)
    return calls.get_total_counts()


def _refuse() -> list[str]:
    messages = []
    for layer, linear in ((ColumnParallelLinear, nn.Linear(4, 7)), (RowParallelLinear, nn.Linear(7, 4))):
        with pytest.raises(ValueError, match="7 features") as refused:
            layer.from_linear(linear)
        messages.append(str(refused.value))
    return messages


@pytest.mark.parametrize(
    ("world_size", "bias"),
    [(2, True), (4, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, False), (4, True)))],
)
def test_a_pair_cut_by_hand_equals_dtensor_and_one_process(
    run_on_ranks: Callable[..., list[Any]], world_size: int, bias: bool
) -> None:
    for alone, by_dtensor, by_hand in run_on_ranks(world_size, _three_ways, bias):
        assert len(alone) == (6 if bias else 4)
        torch.testing.assert_close(by_dtensor, alone, **EXACT)
        torch.testing.assert_close(by_hand, alone, **EXACT)


def test_a_pair_calls_the_other_ranks_once_forward_and_once_backward(run_on_ranks: Callable[..., list[Any]]) -> None:
    assert run_on_ranks(2, _count_calls) == [2, 2]


def test_ranks_that_do_not_divide_the_features_are_refused(run_on_ranks: Callable[..., list[Any]]) -> None:
    message = "7 features over 2 ranks: the ranks must divide them"
    assert run_on_ranks(2, _refuse) == [[message] * 2] * 2
