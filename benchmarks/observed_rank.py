"""One rank of a run with all or none of its watchers: python -m benchmarks.observed_rank on|off FLAGS.

``benchmarks.observation_cost`` starts it. Prints as one line of JSON the seconds of each step, watchers included, and
those of comparing the copies once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import training.trainer
from training.config import parse_config
from training.distributed import ranks
from training.monitoring import StepMetrics
from training.monitoring.divergence import first_difference
from training.monitoring.observer import Observer, Observers
from training.observers import build_observers
from training.trainer import Trainer

COMPARISONS = 5


class TimedObservers(Observers):
    """Observers that clock each step, from before they are told that it begins until after they were told all of it."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        super().__init__(observers)
        self.seconds: list[float] = []
        self._began = 0.0

    def step_begins(self, step: int) -> None:
        """Begin, then tell all."""
        self._began = time.perf_counter()
        super().step_begins(step)

    def steps_agreed(self, steps: Sequence[StepMetrics]) -> None:
        """Tell all, then end."""
        super().steps_agreed(steps)
        self.seconds.append(time.perf_counter() - self._began)


class NoThread(nullcontext):
    """In the place of what watches from a thread of its own."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__()

    def stopped(self) -> None:
        """Write nothing."""


def main() -> None:
    """Train, and print what came of it."""
    watched, config = sys.argv[1] == "on", parse_config(sys.argv[2:])
    if not watched:
        training.trainer.StatusFile = training.trainer.Watchdog = NoThread
    timed: list[TimedObservers] = []

    def build(trainer: Trainer) -> Observers:
        timed.append(TimedObservers(build_observers(trainer).observers if watched else []))
        return timed[-1]

    training.trainer.build_observers = build
    with ranks(config.device) as mine:
        trainer = Trainer(config, mine)
        trainer.fit()
        comparison = median(seconds_of_comparing(trainer) for _ in range(COMPARISONS))
    print(json.dumps({"seconds": timed[-1].seconds, "comparison": comparison}), flush=True)


def seconds_of_comparing(trainer: Trainer) -> float:
    """Compare the copies of the weights once."""
    trainer.ranks.barrier()
    began = time.perf_counter()
    first_difference(trainer.strategy.parameters, trainer.ranks)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
