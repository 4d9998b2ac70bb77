"""One rank of a run whose watchers are clocked: python -m benchmarks.observed_rank FLAGS.

``benchmarks.observation_cost`` starts it. Prints as one line of JSON the seconds of each step and of the watchers in
it, and those of what they do now and then: comparing the copies, a page of metrics, a status file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

from prometheus_client import generate_latest

import training.run.trainer
from training.config import parse_config
from training.monitoring import StepMetrics
from training.monitoring.divergence import first_difference
from training.monitoring.observer import Observer, Observers
from training.parallelism.distributed import ranks
from training.run.observers import build_observers
from training.run.trainer import Trainer

if TYPE_CHECKING:
    from training.data.batching import MicroBatch
    from training.parallelism.strategy import StepResult

REPEATS = 5


class Clocked(Observers):
    """Observers with a clock: how long a step took, and how long of it they did.

    Attributes:
        seconds: of each step, from before its rows are read until all observers have heard all of it.
        watching: seconds of each step inside the observers.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        super().__init__(observers)
        self.seconds: list[float] = []
        self.watching: list[float] = []
        self._began = self._watched = 0.0

    def step_begins(self, step: int) -> None:
        """Begin, and tell all."""
        self._began, self._watched = time.perf_counter(), 0.0
        with self._watches():
            super().step_begins(step)

    def step_ends(self, step: int, micro_batches: Sequence[MicroBatch], result: StepResult) -> None:
        """Tell all."""
        with self._watches():
            super().step_ends(step, micro_batches, result)

    def steps_agreed(self, steps: Sequence[StepMetrics]) -> None:
        """Tell all, and end."""
        with self._watches():
            super().steps_agreed(steps)
        self.seconds.append(time.perf_counter() - self._began)
        self.watching.append(self._watched)

    @contextmanager
    def _watches(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._watched += time.perf_counter() - began


def main() -> None:
    """Train, and print what came of it."""
    config = parse_config(sys.argv[1:])
    clocked: list[Clocked] = []

    def build(*parts: Any) -> Observers:
        clocked.append(Clocked(build_observers(*parts).observers))
        return clocked[-1]

    training.run.trainer.build_observers = build
    with ranks(config.device) as mine:
        trainer = Trainer(config, mine)
        trainer.fit()
        now_and_then = {
            "comparison": seconds_of(lambda: first_difference(trainer.context.strategy.parameters, mine), mine.barrier),
            "page": seconds_of(lambda: generate_latest(trainer.context.exporter.registry), mine.barrier),
            "status": seconds_of(trainer.context.status.write, mine.barrier),
        }
    steps = {"seconds": clocked[-1].seconds, "watching": clocked[-1].watching}
    print(json.dumps(steps | now_and_then), flush=True)


def seconds_of(work: Callable[[], object], meet: Callable[[], None]) -> float:
    """Seconds of doing something once, after all ranks have met."""
    found = []
    for _ in range(REPEATS):
        meet()
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return median(found)


if __name__ == "__main__":
    main()
