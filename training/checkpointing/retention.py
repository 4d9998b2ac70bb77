"""Which checkpoints are made and which stay."""

from __future__ import annotations

from collections.abc import Iterable


class SaveSchedule:
    """When the next checkpoint is due: by steps, which every rank counts alike, and by rank 0's clock.

    Args:
        every: optimizer steps between checkpoints; 0 = not by steps.
        minutes: between checkpoints; 0 = not by time.
        now: ``time.monotonic()``, which no change of the wall clock moves.
    """

    def __init__(self, every: int, minutes: float, now: float) -> None:
        self.every = every
        self.seconds = 60 * minutes
        self.last = now

    def due_by_step(self, step: int) -> bool:
        """Whether the number of steps alone says to save, which every rank knows."""
        return self.every > 0 and step % self.every == 0

    def due(self, step: int, now: float) -> bool:
        """Whether to save after ``step``. Clocks differ: rank 0's answer is agreed before it is acted on."""
        return self.due_by_step(step) or (self.seconds > 0 and now - self.last >= self.seconds)

    def saved(self, now: float) -> None:
        """A save began: the minutes count from here."""
        self.last = now


def steps_to_keep(steps: Iterable[int], keep_last: int, keep_every: int, best_step: int | None) -> set[int]:
    """Of the steps with a whole checkpoint the newest ones, the multiples of ``keep_every`` (0 = none) and the best."""
    rising = sorted(steps)
    newest = set(rising[-keep_last:])
    return {step for step in rising if step in newest or step == best_step or (keep_every and step % keep_every == 0)}
