"""RunState: what a checkpoint holds about a run besides weights and optimizer state, in plain values."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from common.text import counted
from training.config import TrainConfig
from training.monitoring import EpochMetrics, StepMetrics
from training.monitoring.records import score_of


class AverageMeter:
    """A running mean, weighted by rows."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def update(self, value: float, rows: int = 1) -> None:
        self.total += value * rows
        self.count += rows

    @property
    def average(self) -> float:
        return self.total / self.count if self.count else 0.0

    def to_plain(self) -> list[float]:
        return [self.total, self.count]

    def take(self, plain: Sequence[float]) -> None:
        self.total, self.count = plain


@dataclass
class BadStepCount:
    """The bad steps of a run so far: those skipped because loss or gradient norm was not finite.

    ``in_a_row``: consecutive ones since step ``last_good``, the last that updated the weights;
    ``suspects``: the rows blamed for them. ``went_back_from``: the failed step that caused the last
    rollback, 0 for none; ``excluded_rows``: the training rows left out since.
    """

    total: int = 0
    in_a_row: int = 0
    suspects: list[int] = field(default_factory=list)
    last_good: int = 0
    went_back_from: int = 0
    excluded_rows: list[int] = field(default_factory=list)

    def add(self, suspects: Iterable[int]) -> None:
        self.total += 1
        self.in_a_row += 1
        self.suspects += suspects

    def end_row(self, last_good: int) -> None:
        self.in_a_row, self.suspects, self.last_good = 0, [], last_good

    def leave_out(self, rows: Iterable[int], step: int) -> None:
        """Record a rollback from ``step``, after which ``rows`` are left out."""
        self.in_a_row, self.suspects = 0, []
        self.excluded_rows, self.went_back_from = sorted({*self.excluded_rows, *rows}), step


@dataclass
class RunState:
    """The position of a run.

    Row order, dropout and learning rate are functions of seed and step, so no generator state has
    to be saved. ``seconds_before``: time spent in earlier processes; ``epoch_seconds``: in this
    epoch so far.
    """

    step: int = 0
    epochs: list[EpochMetrics] = field(default_factory=list)
    epoch_loss: AverageMeter = field(default_factory=AverageMeter)
    epoch_accuracy: AverageMeter = field(default_factory=AverageMeter)
    epoch_seconds: float = 0.0
    skipped_steps: int = 0  # by the loss scale
    bad: BadStepCount = field(default_factory=BadStepCount)
    seconds_before: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    def begin_epoch(self) -> None:
        self.epoch_loss, self.epoch_accuracy, self.epoch_seconds = (
            AverageMeter(),
            AverageMeter(),
            0.0,
        )

    def count(self, steps: Iterable[StepMetrics]) -> None:
        """Add what all ranks know about the last steps to the means of this epoch."""
        for step in steps:
            # Its loss is not finite, and would make the mean of the whole epoch so.
            if step.bad:
                continue
            self.epoch_loss.update(step.loss, step.rows)
            if step.accuracy is not None:
                self.epoch_accuracy.update(step.accuracy, step.rows)
            self.skipped_steps += step.skipped

    @property
    def best(self) -> EpochMetrics | None:
        return next((epoch for epoch in reversed(self.epochs) if epoch.is_best), None)

    def first_best(self, metric: str) -> EpochMetrics:
        """The first evaluation that scored as well as the best one."""
        return max(self.epochs, key=lambda epoch: score_of(epoch.validation, metric))

    def no_longer_improves(self, config: TrainConfig) -> bool:
        """Whether the last ``--early_stopping`` evaluations were no better than one before them."""
        if not config.early_stopping or not self.epochs:
            return False
        since = len(self.epochs) - 1 - self.epochs.index(self.first_best(config.best_metric))
        return since >= config.early_stopping

    def notes(self, config: TrainConfig) -> Iterator[str]:
        """What the report says about the epochs, and about steps and rows that did not count."""
        last = self.epochs[-1]
        if not last.validation and config.method != "head":
            yield "No rows were kept for validation, so the last epoch is the one that was tested and written."
        if config.ema:
            yield f"Validated, tested and written: the moving average of the weights, --ema {config.ema:g}."
        if config.budget and last.epoch < config.epochs:
            epochs = counted(last.epoch, "epoch")
            yield f"Training ended after {epochs}, because its time (--budget {config.budget}) was up."
        elif last.epoch < config.epochs and config.method != "head":
            yield (
                f"Training stopped after epoch {last.epoch} of {config.epochs}, because "
                f"{config.early_stopping} "
                f"evaluations in a row had no better {config.best_metric} on the validation rows."
            )
        if self.skipped_steps:
            yield f"The loss scale skipped {counted(self.skipped_steps, 'step')}."
        if self.bad.total:
            yield f"Skipped {counted(self.bad.total, 'step')}, because loss or gradient was not finite."
        if excluded := self.bad.excluded_rows:
            yield f"After too many such steps in a row, {counted(len(excluded), 'training row')} had to be left out."

    def to_plain(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "epoch_loss": self.epoch_loss.to_plain(),
            "epoch_accuracy": self.epoch_accuracy.to_plain(),
            "epoch_seconds": self.epoch_seconds,
            "skipped_steps": self.skipped_steps,
            "bad": asdict(self.bad),
            "seconds": self.seconds,
        }

    def take(self, plain: dict[str, Any]) -> None:
        """Restore what :meth:`to_plain` returned."""
        self.step = plain["step"]
        self.epochs = [EpochMetrics(**epoch) for epoch in plain["epochs"]]
        self.epoch_loss.take(plain["epoch_loss"])
        # An older version did not keep it.
        self.epoch_accuracy.take(plain.get("epoch_accuracy", (0.0, 0)))
        self.epoch_seconds = plain["epoch_seconds"]
        self.skipped_steps = plain["skipped_steps"]
        self.bad = BadStepCount(**plain["bad"])
        self.seconds_before, self.started = plain["seconds"], time.perf_counter()
