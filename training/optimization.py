"""The optimizer and its learning rate over the run."""

from __future__ import annotations

import math

import torch
from torch import nn

from training.config import TrainConfig


def build_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) with no decay on biases and LayerNorm weights."""
    decayed = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, fused=True)


def scaled_learning_rate(config: TrainConfig, world_size: int) -> float:
    """The peak learning rate for this many ranks (linear: Goyal et al., arXiv 1706.02677; sqrt: 1404.5997)."""
    factor = {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[config.scale_lr]
    return config.peak_learning_rate * factor


def learning_rate_at(step: int, total_steps: int, peak: float, warmup: float, schedule: str) -> float:
    """The learning rate of optimizer step ``step`` (counted from 1): a warm-up, then a fall to 0.

    A function of the step alone: nothing of it has to be saved or restored.
    """
    warmup_steps = round(total_steps * warmup)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    left = (total_steps - step + 1) / (total_steps - warmup_steps)
    return peak * (left if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * (1 - left))))
