"""The optimizer and its learning rate over the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from training.config import TrainConfig
from training.facts import EPSILON
from training.model.layers import rate_factors

MOMENTS = ("exp_avg", "exp_avg_sq")


def parameter_groups(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], config: TrainConfig
) -> list[dict[str, Any]]:
    """Groups for an optimizer: no weight decay on biases and norms, and only one device mesh per
    group.

    ``model``: the classifier, or a stage of one, whose ``parameters`` these are, by their names in
    it. A group's ``lr_factor`` is what the learning rate of a step is multiplied by.
    """
    factor_of = rate_factors(model.network, config.layer_decay)
    # Biases and norms are the parameters with one dimension. They come last, so that the groups
    # have a fixed order.
    groups: dict[tuple[bool, Any, float], dict[str, Any]] = {}
    trained = (item for item in parameters.items() if item[1].requires_grad)
    for name, parameter in sorted(trained, key=lambda item: item[1].dim() <= 1):
        decay = config.weight_decay if parameter.dim() > 1 else 0.0
        factor = factor_of(name.removeprefix("network."))
        group = {"params": [], "weight_decay": decay, "lr_factor": factor}
        key = parameter.dim() > 1, getattr(parameter, "device_mesh", None), factor
        groups.setdefault(key, group)["params"].append(parameter)
    return list(groups.values())


def adamw_settings(config: TrainConfig) -> dict[str, Any]:
    """The arguments of AdamW (Loshchilov & Hutter, arXiv 1711.05101); every step sets the learning
    rate.
    """
    return {"lr": 0.0, "betas": config.betas, "eps": EPSILON, "fused": True}


def build_optimizer(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], config: TrainConfig
) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameter_groups(model, parameters, config), **adamw_settings(config))


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Allocate AdamW's state as its first step would, so that a model too large for memory fails at
    once.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
            step = torch.zeros((), device=parameter.device)
            optimizer.state[parameter] = {"step": step, **moments}


def scaled_learning_rate(config: TrainConfig, data_ranks: int) -> float:
    """The peak learning rate for this many data ranks (linear: Goyal et al., arXiv 1706.02677;
    sqrt: 1404.5997).
    """
    assert config.learning_rate is not None  # settled by the recipe
    factors = {"none": 1.0, "linear": float(data_ranks), "sqrt": math.sqrt(data_ranks)}
    return config.learning_rate * factors[config.scale_lr]


def learning_rate_at(
    step: int, total_steps: int, peak: float, warmup: float, schedule: str
) -> float:
    """The learning rate of optimizer step ``step``, counted from 1: a warm-up, then a decay.

    It depends on the step only, so there is no scheduler state to save or restore. ``warmup`` is a
    share of all steps, or from 1 on their number; inverse_sqrt is the schedule of the Transformer
    (Vaswani et al., arXiv 1706.03762).
    """
    warmup_steps = round(total_steps * warmup) if warmup < 1 else int(warmup)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    if schedule == "inverse_sqrt":
        return peak * math.sqrt(max(warmup_steps, 1) / step)
    # Step total_steps still has a small rate; 0 would be reached one step later.
    left = (total_steps - step + 1) / (total_steps - warmup_steps)
    return peak * (left if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * (1 - left))))
