"""The loss scale grows, shrinks and goes on after a resume."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from common.errors import TrainingFailure
from tests.training.parallelism.cases import ALONE, Case
from tests.training.parallelism.saved_states import whole_state
from tests.training.parallelism.small_runs import take_steps, whole_weights
from training.model import precision
from training.model.precision import LossScale, allow_tf32, choose_precision
from training.parallelism.strategy import Strategy


@pytest.mark.parametrize(("bf16_slower", "chosen"), [(2.0, "fp32"), (0.5, "bf16"), (0.95, "fp32")])
def test_auto_takes_bf16_on_a_cpu_only_if_it_is_faster(
    bf16_slower: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def multiply(one: torch.Tensor, other: torch.Tensor) -> None:
        now[0] += bf16_slower if one.dtype == torch.bfloat16 else 1.0

    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(precision.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(precision.torch, "mm", multiply)
    precision.cpu_gains_by_bf16.cache_clear()
    try:
        assert choose_precision("auto", torch.device("cpu")) == chosen
    finally:
        precision.cpu_gains_by_bf16.cache_clear()


def scaled(scale: float) -> Strategy:
    """One process in fp32 that scales its loss as fp16 does."""
    strategy = Case(1, {}).strategy(ALONE)
    strategy.loss_scale = LossScale(enabled=True)
    strategy.loss_scale.scale = scale
    return strategy


def test_the_scale_halves_at_once_and_doubles_after_many_good_steps() -> None:
    scale = LossScale(enabled=True)

    scale.update(finite=False)
    for _ in range(LossScale.GROWS_AFTER):
        scale.update(finite=True)
    scale.update(finite=False)

    assert scale.scale == LossScale.FIRST / 2 * 2 / 2


def test_a_bad_step_resets_the_count_and_a_checkpoint_keeps_it() -> None:
    scale, resumed = LossScale(enabled=True), LossScale(enabled=True)
    for _ in range(LossScale.GROWS_AFTER - 1):
        scale.update(finite=True)

    resumed.load_state_dict(scale.state_dict())
    resumed.update(finite=True)
    scale.update(finite=False)

    assert resumed.scale == 2 * LossScale.FIRST
    assert scale.state_dict() == {"scale": LossScale.FIRST / 2, "good_steps": 0}


def test_gradients_that_overflow_at_every_scale_end_the_run_with_one_line() -> None:
    strategy = scaled(2.0**-13)
    with torch.no_grad():
        strategy.parameters["network.classifier.bias"].fill_(math.inf)
    take_steps(strategy, [1], ranks=ALONE)

    with pytest.raises(TrainingFailure, match=r"^step 2: the gradients overflow in fp16 .*--precision bf16"):
        take_steps(strategy, [2], ranks=ALONE)


def test_a_checkpoint_of_another_precision_leaves_the_scale_at_its_first_value() -> None:
    scale = LossScale(enabled=True)

    scale.load_state_dict(LossScale(enabled=False).state_dict())

    assert scale.scale == LossScale.FIRST


def test_without_fp16_the_scale_stays_one() -> None:
    scale = LossScale(enabled=False)

    scale.update(finite=False)
    scale.load_state_dict({"scale": 8.0, "good_steps": 3})

    assert scale.scale == 1.0


def test_a_scaled_loss_trains_to_the_same_weights() -> None:
    found: list[Any] = []
    for strategy in (scaled(1.0), scaled(2.0**10)):
        losses = take_steps(strategy, [1, 2], ranks=ALONE)
        found.append((losses, whole_weights(strategy)))

    assert found[0][0] == found[1][0]
    for name, weight in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], weight, rtol=1e-6, atol=1e-9)


def test_a_step_whose_gradients_overflow_changes_no_weights_or_moments() -> None:
    strategy = scaled(1.0)
    take_steps(strategy, [1], ranks=ALONE)
    before, norms = whole_weights(strategy), []
    strategy.loss_scale.scale = math.inf

    take_steps(strategy, [2], ranks=ALONE, norms=norms)

    assert not math.isfinite(norms[0])
    for name, weight in before.items():
        assert torch.equal(whole_weights(strategy)[name], weight)
    steps = whole_state(strategy, ALONE).moments("step")
    assert steps
    assert all(step == 1 for step in steps.values())


@pytest.mark.parametrize(
    ("device", "wanted", "precision"), [("cuda", True, "high"), ("cuda", False, "highest"), ("cpu", True, "highest")]
)
def test_tf32_is_used_only_on_request_and_on_gpus(device: str, wanted: bool, precision: str) -> None:
    allow_tf32(wanted=wanted, device=torch.device(device))
    found = torch.get_float32_matmul_precision()
    allow_tf32(wanted=False, device=torch.device("cpu"))

    assert found == precision
