"""A step whose loss or gradient is not finite on one rank leaves no trace on any, however the model lies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.processes import run_on_ranks
from tests.training.parallelism.small_runs import GLOBAL_BATCH, small_rows, small_strategy, take_steps
from training.data.batching import micro_batches_of_rank
from training.parallelism.strategy import StepResult, Strategy, loss_share
from training.run.step import optimizer_step
from training.tasks import Classification

Tensors = dict[str, torch.Tensor]

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"strategy": "ddp"}),
    "copies": (2, {"strategy": "ddp"}),
    "compressed": (2, {"strategy": "ddp", "compress": "powersgd:2"}),
    "ZeRO 1": (2, {"strategy": "zero1"}),
    "ZeRO 2": (2, {"strategy": "zero2"}),
    "ZeRO 3": (2, {"strategy": "zero3"}),
    "offloaded": (2, {"strategy": "zero3", "cpu_offload": True}),
    "tensor parallel": (2, {"strategy": "tp"}),
    "pipeline": (2, {"strategy": "pp", "gradient_accumulation": 2}),
    "all together": (8, {"strategy": "3d", "pp": 2, "tp": 2, "gradient_accumulation": 2}),
}
SLOW = set(LAYOUTS) - {"ZeRO 3", "copies"}
# Beyond those that PowerSGD averages without approximation.
FIRST_STEPS = range(1, 13)
BAD_STEP, NEXT_STEP = 13, 14


def _bad_step(strategy: Strategy, accumulation: int) -> StepResult:
    """A step whose rows weigh infinitely much on the last rank that shares them out."""
    share = micro_batches_of_rank(small_rows(), np.arange(GLOBAL_BATCH), strategy.data_shard, accumulation)
    if strategy.data_shard.rank == strategy.data_shard.size - 1:
        share = [replace(batch, weights=batch.weights * math.inf) for batch in share]
    return optimizer_step(strategy, share, BAD_STEP, learning_rate=1e-3)


def _own(strategy: Strategy) -> Tensors:
    """A copy of all that this rank holds: weights, their average, moments, steps, the state of the compression."""
    tensors = strategy.state_dict().tensors
    return {name: getattr(tensor, "_local_tensor", tensor).clone() for name, tensor in tensors.items()}


def _differing(before: Tensors, after: Tensors) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name, tensor in before.items() if not tensor.equal(after[name])]


def _meet_a_bad_step(fields: dict[str, Any]) -> tuple[float, list[str], list[str]]:
    """The bad step's gradient norm, what it changed, and what differs a step later from a run without it."""
    accumulation = fields.get("gradient_accumulation", 1)
    met, spared = small_strategy(ema=0.9, **fields), small_strategy(ema=0.9, **fields)
    for strategy in (met, spared):
        take_steps(strategy, FIRST_STEPS, accumulation=accumulation)
    before = _own(met)
    norm = float(_bad_step(met, accumulation).grad_norm)
    changed = _differing(before, _own(met))
    for strategy in (met, spared):
        take_steps(strategy, [NEXT_STEP], accumulation=accumulation)
    assert _differing(before, _own(met))
    return norm, changed, _differing(_own(met), _own(spared))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in LAYOUTS])
def test_a_step_that_is_bad_on_one_rank_changes_nothing_on_any(name: str) -> None:
    world_size, fields = LAYOUTS[name]

    for norm, changed, later in run_on_ranks(world_size, _meet_a_bad_step, fields):
        assert not math.isfinite(norm)
        assert changed == []
        assert later == []


def _first_step_is_bad() -> list[str]:
    met, spared = small_strategy(strategy="ddp"), small_strategy(strategy="ddp")
    _bad_step(met, 1)
    for strategy in (met, spared):
        take_steps(strategy, [1, 2])
    return _differing(_own(met), _own(spared))


def test_the_very_first_step_may_be_bad() -> None:
    assert run_on_ranks(1, _first_step_is_bad) == [[]]


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_that_is_not_finite_always_shows_in_the_gradient(logit: float, smoothing: float) -> None:
    logits = torch.tensor([[0.5, 0.1], [logit, 0.3]], requires_grad=True)
    losses = Classification([]).row_losses(logits, torch.tensor([0, 0]), smoothing)

    loss_share(losses, torch.tensor([0.5, 0.5])).backward()

    assert not losses[1].isfinite()
    assert logits.grad[0].isfinite().all()
    assert not logits.grad[1].isfinite().any()


def test_finite_losses_give_the_gradient_that_they_did() -> None:
    logits, weights = torch.randn(8, 4, requires_grad=True), torch.rand(8)
    losses = Classification([]).row_losses(logits, torch.arange(8) % 4, 0.0)

    [found] = torch.autograd.grad(loss_share(losses, weights), logits, retain_graph=True)
    [plain] = torch.autograd.grad((losses * weights).sum(), logits)

    assert found.equal(plain)
