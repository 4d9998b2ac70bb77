"""The norm of everything, whoever holds it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.processes import here, run_on_ranks
from training.parallelism.gradients import clip_divisor, global_norm, reduce_partial_gradients


def _with_gradient(gradient: torch.Tensor) -> nn.Parameter:

    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def _mixed() -> tuple[float, float]:
    """Plain, copied, shared out over one dimension and over two: of two stages with 2 x 1 ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    dp, stage = mesh["dp"], mesh["pp"].get_local_rank()
    whole = [torch.arange(6.0).reshape(3, 2) + i + 10 * stage for i in range(3)]
    placed = [
        _with_gradient(whole[0].clone()),
        _with_gradient(distribute_tensor(whole[1].clone(), dp, [Replicate()])),
        _with_gradient(distribute_tensor(whole[2].clone(), dp, [Shard(0)])),
        nn.Parameter(torch.zeros(1)),  # without a gradient
    ]
    norm = global_norm(placed, mesh["pp"].get_group())
    squares = sum(part.square().sum() for part in whole)
    dist.all_reduce(squares, group=mesh["pp"].get_group())
    return norm.item(), squares.sqrt().item()


def test_a_value_held_by_several_ranks_counts_once_and_stages_add_up() -> None:
    for norm, expected in run_on_ranks(4, _mixed):
        assert norm == pytest.approx(expected, rel=1e-6)


def _partial() -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))

    parameter.grad = DTensor.from_local(torch.full((3,), 1.0 + here().rank), mesh, [Partial()])
    reduce_partial_gradients([parameter])
    return parameter.grad.to_local().tolist()


def test_parts_of_a_copied_parameters_gradient_are_summed() -> None:
    assert run_on_ranks(2, _partial) == [[3.0, 3.0, 3.0]] * 2


def _as_updated_with(gradient: list[float], limit: float, scale: float = 1.0) -> list[float]:
    """The gradient that fused AdamW computes its moments from."""
    parameter = _with_gradient(torch.tensor(gradient))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.grad_scale = clip_divisor(global_norm([parameter]) / scale, limit, scale)
    optimizer.step()
    return (optimizer.state[parameter]["exp_avg"] * 10).tolist()


def test_a_norm_under_the_limit_changes_nothing_and_one_over_it_all_alike() -> None:
    assert _as_updated_with([0.3, 0.4], limit=1.0) == pytest.approx([0.3, 0.4])
    assert _as_updated_with([30.0, 40.0], limit=1.0) == pytest.approx([0.6, 0.8])
    assert _as_updated_with([30.0, 40.0], limit=float("inf")) == pytest.approx([30.0, 40.0])


def test_the_loss_scale_is_divided_out_and_counts_toward_no_limit() -> None:
    assert _as_updated_with([0.3 * 1024, 0.4 * 1024], limit=1.0, scale=1024.0) == pytest.approx([0.3, 0.4])
    assert _as_updated_with([30.0, 40.0], limit=1.0, scale=10.0) == pytest.approx([0.6, 0.8])
