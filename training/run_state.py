"""RunState: what a run knows of itself beside its weights, in plain values; each checkpoint holds it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from training.monitoring import EpochMetrics
from training.utils import AverageMeter


@dataclass
class RunState:
    """Where a run stands.

    The order of rows, dropout and the learning rate are functions of seed and step, so that no generator's state is
    kept. ``seconds_before``: spent in earlier processes; ``epoch_seconds``: in this epoch so far.
    """

    step: int = 0
    epochs: list[EpochMetrics] = field(default_factory=list)
    epoch_loss: AverageMeter = field(default_factory=AverageMeter)
    epoch_seconds: float = 0.0
    skipped_steps: int = 0
    seconds_before: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Time spent on this run so far, earlier processes included."""
        return self.seconds_before + time.perf_counter() - self.started

    @property
    def best(self) -> EpochMetrics | None:
        """The epoch with the best validation accuracy so far."""
        return next((epoch for epoch in reversed(self.epochs) if epoch.is_best), None)

    def to_plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "step": self.step,
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "epoch_loss": [self.epoch_loss.total, self.epoch_loss.count],
            "epoch_seconds": self.epoch_seconds,
            "skipped_steps": self.skipped_steps,
            "seconds": self.seconds,
        }

    def take(self, plain: dict[str, Any]) -> None:
        """Stand where :meth:`to_plain` was called."""
        self.step = plain["step"]
        self.epochs = [EpochMetrics(**epoch) for epoch in plain["epochs"]]
        self.epoch_loss.total, self.epoch_loss.count = plain["epoch_loss"]
        self.epoch_seconds = plain["epoch_seconds"]
        self.skipped_steps = plain["skipped_steps"]
        self.seconds_before, self.started = plain["seconds"], time.perf_counter()
