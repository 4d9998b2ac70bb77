"""When checkpoints are saved, and which are kept."""

from __future__ import annotations

from collections.abc import Iterable


class SaveSchedule:
    """When the next checkpoint is due: by steps, which all ranks count alike, or by rank 0's clock.

    Args:
        every: optimizer steps between checkpoints; 0 = off.
        minutes: minutes between checkpoints; 0 = off.
        now: ``time.monotonic()``, which does not jump when the clock is set.
    """

    def __init__(self, every: int, minutes: float, now: float) -> None:
        self.every = every
        self.seconds = 60 * minutes
        self.last = now

    def due_by_step(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def due(self, step: int, now: float) -> bool:
        """Whether to save after ``step``. Clocks differ, so only rank 0's answer counts."""
        return self.due_by_step(step) or (self.seconds > 0 and now - self.last >= self.seconds)

    def saved(self, now: float) -> None:
        self.last = now


def steps_to_keep(
    steps: Iterable[int], keep_last: int, keep_every: int, best_step: int | None
) -> set[int]:
    """The steps to keep: the newest, the multiples of ``keep_every`` (0 = off) and the best one."""
    rising = sorted(steps)
    newest = set(rising[-keep_last:])
    return {
        step
        for step in rising
        # The best one is kept for the end of the run, which writes the model from it.
        if step in newest or step == best_step or (keep_every and step % keep_every == 0)
    }
