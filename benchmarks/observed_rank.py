"""One rank of a run whose subscribers are clocked: python -m benchmarks.observed_rank FLAGS.

``benchmarks.observation_cost`` starts it. Prints as one line of JSON the seconds of each step and of the subscribers in
it, and those of what they do now and then: comparing the copies, a page of metrics, a status file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from prometheus_client import generate_latest

import training.run.trainer
from training.config import parse_config
from training.monitoring.events import Event, EventStream, StepsAgreed, StepStarted
from training.monitoring.replicas import first_difference
from training.parallelism.distributed import ranks
from training.run.trainer import Trainer

REPEATS = 5


class Clocked(EventStream):
    """An event stream with a clock: how long each step took, and how much of it the subscribers took.

    Attributes:
        seconds: of each step, from before its rows are read until all subscribers have received its last event.
        watching: seconds of each step inside the subscribers.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seconds: list[float] = []
        self.watching: list[float] = []
        self._began = self._watched = 0.0
        self._depth = 0

    def publish(self, event: Event) -> None:
        """Publish, and add up the time."""
        began = time.perf_counter()
        if isinstance(event, StepStarted):
            self._began, self._watched = began, 0.0
        self._depth += 1  # agreed steps publish the logged ones, whose time is within theirs
        super().publish(event)
        self._depth -= 1
        if not self._depth:
            self._watched += time.perf_counter() - began
        if isinstance(event, StepsAgreed):
            self.seconds.append(time.perf_counter() - self._began)
            self.watching.append(self._watched)


def main() -> None:
    """Train, and print what came of it."""
    config = parse_config(sys.argv[1:])
    training.run.trainer.EventStream = Clocked
    with ranks(config.device) as mine:
        trainer = Trainer(config, mine)
        trainer.fit()
        now_and_then = {
            "comparison": seconds_of(lambda: first_difference(trainer.context.strategy.parameters, mine), mine.barrier),
            "page": seconds_of(lambda: generate_latest(trainer.context.exporter.registry), mine.barrier),
            "status": seconds_of(trainer.context.status.write, mine.barrier),
        }
    events = trainer.context.events
    print(json.dumps({"seconds": events.seconds, "watching": events.watching} | now_and_then), flush=True)


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
