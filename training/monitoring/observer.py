"""Observer: what every watcher of a run is told, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.monitoring.records import EpochMetrics, SavedCheckpoint, StepMetrics

if TYPE_CHECKING:
    from training.data.batching import MicroBatch
    from training.parallelism.strategy import StepResult


class Observer:
    """Watches a run; a hook does nothing unless it is overridden.

    All ranks call each hook at the same place of the run, so that a hook may talk to the other ranks, and may end the
    run by an error that it raises on all of them.
    """

    def run_starts(self, step: int, total_steps: int, epochs: Sequence[EpochMetrics]) -> None:
        """Hear where the run stands before its first step here: after ``step`` steps and ``epochs``."""

    def step_begins(self, step: int) -> None:
        """Hear that optimizer step ``step`` begins, before its rows are read."""

    def step_ends(self, step: int, micro_batches: Sequence[MicroBatch], result: StepResult) -> None:
        """Look at this rank's share of a step; its tensors are still on the device, where a look may cost a wait."""

    def steps_agreed(self, steps: Sequence[StepMetrics]) -> None:
        """Take the steps since the last call, agreed upon by all ranks; there may be none."""

    def epoch_ends(self, epoch: EpochMetrics) -> None:
        """Take a validated epoch."""

    def checkpoint_begins(self, step: int) -> None:
        """Hear that the state after ``step`` is to be saved."""

    def checkpoint_failed(self, step: int) -> None:
        """Hear, after ``step`` steps, that a checkpoint could not be written, and that training goes on."""

    def checkpoint_saved(self, saved: SavedCheckpoint) -> None:
        """Hear that a checkpoint stands."""

    def rolled_back(self, step: int) -> None:
        """Hear that the run stands after ``step`` again: what came later does not count."""

    def close(self) -> None:
        """Let go of files, threads and ports: the run has ended, well or badly."""


class Observers(Observer):
    """Several observers as one, told in their order; closed in the reverse one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def run_starts(self, step: int, total_steps: int, epochs: Sequence[EpochMetrics]) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.run_starts(step, total_steps, epochs)

    def step_begins(self, step: int) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.step_begins(step)

    def step_ends(self, step: int, micro_batches: Sequence[MicroBatch], result: StepResult) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.step_ends(step, micro_batches, result)

    def steps_agreed(self, steps: Sequence[StepMetrics]) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.steps_agreed(steps)

    def epoch_ends(self, epoch: EpochMetrics) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.epoch_ends(epoch)

    def checkpoint_begins(self, step: int) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.checkpoint_begins(step)

    def checkpoint_failed(self, step: int) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.checkpoint_failed(step)

    def checkpoint_saved(self, saved: SavedCheckpoint) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.checkpoint_saved(saved)

    def rolled_back(self, step: int) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.rolled_back(step)

    def close(self) -> None:
        """Close all, the last first."""
        for observer in reversed(self.observers):
            observer.close()
