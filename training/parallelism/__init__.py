"""Strategies: how the model lies over the processes. One file each, one line each in the registry."""

from __future__ import annotations

from training.parallelism.ddp import DDPStrategy
from training.parallelism.strategy import StepResult, Strategy

STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDPStrategy}

__all__ = ["STRATEGIES", "DDPStrategy", "StepResult", "Strategy"]
