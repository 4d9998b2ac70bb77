from __future__ import annotations

import math
from itertools import pairwise

import pytest
from torch import nn

from training.config import TrainConfig
from training.model.classifier import NewsClassifier
from training.model.optimizer import build_optimizer, learning_rate_at, scaled_learning_rate

PEAK = 2e-5


def rates(schedule: str, warmup: float = 0.1, total: int = 100) -> list[float]:
    return [learning_rate_at(step, total, PEAK, warmup, schedule) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_warm_up_rises_evenly_to_the_peak(schedule: str) -> None:
    found = rates(schedule)

    assert found[:10] == pytest.approx([PEAK * step / 10 for step in range(1, 11)])
    assert max(found) == pytest.approx(PEAK)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_after_the_warm_up_the_rate_only_falls_and_the_last_one_is_not_zero(schedule: str) -> None:
    found = rates(schedule)[9:]

    assert all(later <= earlier for earlier, later in pairwise(found))
    assert 0 < found[-1] < 0.02 * PEAK


def test_linear_decay_is_half_at_its_middle() -> None:
    found = rates("linear")

    assert found[10] == pytest.approx(PEAK)
    assert found[55] == pytest.approx(PEAK / 2)
    assert found[99] == pytest.approx(PEAK / 90)


def test_cosine_decay_follows_the_cosine() -> None:
    found = rates("cosine")

    assert found[10] == pytest.approx(PEAK)
    assert found[55] == pytest.approx(PEAK / 2)
    assert found[32] == pytest.approx(PEAK * 0.5 * (1 + math.cos(math.pi * 22 / 90)))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_without_a_warm_up_the_first_step_has_the_peak(schedule: str) -> None:
    assert rates(schedule, warmup=0)[0] == pytest.approx(PEAK)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 0.06, 0.5, 0.99])
@pytest.mark.parametrize("total", [1, 2, 3, 17])
def test_every_step_of_a_short_run_has_a_rate(schedule: str, warmup: float, total: int) -> None:
    assert all(0 < rate <= PEAK * (1 + 1e-12) for rate in rates(schedule, warmup, total))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse_sqrt", "constant"])
def test_a_warm_up_of_one_or_more_is_a_number_of_steps(schedule: str) -> None:
    assert rates(schedule, warmup=20) == pytest.approx(rates(schedule, warmup=0.2))
    assert rates(schedule, warmup=200)[-1] == pytest.approx(PEAK / 2)  # a run shorter than its warm-up


def test_a_constant_rate_stays_at_the_peak() -> None:
    assert rates("constant")[9:] == [PEAK] * 91


def test_the_inverse_square_root_halves_the_rate_when_the_steps_are_four_times_as_many() -> None:
    found = rates("inverse_sqrt")

    assert found[9] == pytest.approx(PEAK)
    assert found[39] == pytest.approx(PEAK / 2)
    assert rates("inverse_sqrt", warmup=0)[3] == pytest.approx(PEAK / 2)


def test_biases_and_layer_norms_have_no_weight_decay() -> None:
    model = NewsClassifier(pretrained_model="tiny", vocab_size=64)
    spared = {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(module, nn.LayerNorm) or name == "bias"
    }

    config = TrainConfig(weight_decay=0.1)
    decayed, others = build_optimizer(model, dict(model.named_parameters()), config).param_groups

    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert set(others["params"]) == spared
    assert set(decayed["params"]) == set(model.parameters()) - spared


def test_frozen_parameters_are_left_out() -> None:
    model = NewsClassifier(pretrained_model="tiny", vocab_size=64)
    model.requires_grad_(False).network.classifier.bias.requires_grad_(True)

    groups = build_optimizer(model, dict(model.named_parameters()), TrainConfig()).param_groups

    [parameter] = [parameter for group in groups for parameter in group["params"]]
    assert parameter is model.network.classifier.bias


@pytest.mark.parametrize(("scale_lr", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_the_learning_rate_is_scaled_by_the_ranks_as_asked(scale_lr: str, factor: float) -> None:
    config = TrainConfig(learning_rate=1e-4, scale_lr=scale_lr)

    assert scaled_learning_rate(config, data_ranks=4) == pytest.approx(factor * 1e-4)
    assert scaled_learning_rate(config, data_ranks=1) == pytest.approx(1e-4)
