"""The strategies by the names that --strategy takes."""

from __future__ import annotations

from training.parallelism.ddp import DDPStrategy
from training.parallelism.deepspeed import DeepSpeedStrategy
from training.parallelism.mesh import MeshStrategy
from training.parallelism.strategy import Strategy
from training.parallelism.zero1 import Zero1Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    "ddp": DDPStrategy,
    "zero1": Zero1Strategy,
    "zero2": MeshStrategy,
    "zero3": MeshStrategy,
    "deepspeed": DeepSpeedStrategy,
    "tp": MeshStrategy,
    "pp": MeshStrategy,
    "3d": MeshStrategy,
}
