"""Loss spikes: steps whose loss is far above that of the steps before; they are flagged, and nothing else is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from training.monitoring.events import EventLog
from training.monitoring.exporter import Exporter
from training.monitoring.observer import Observer
from training.monitoring.records import StepMetrics

WINDOW = 100  # steps that a loss is compared with
LEAST_STEPS = 50  # before that a median says little
# Both bounds must be passed. A single hard batch late in a run lies a few deviations above the median; while nothing is
# learnt yet, and once all is learnt, losses hardly differ, and many deviations are still little.
DEVIATIONS = 10.0
LEAST_RISE = 0.5  # nats; guessing among four classes costs 1.39
# The standard deviation of a normal distribution, in median absolute deviations.
NORMAL = 1.4826


class LossSpikes(Observer):
    """Compares each loss with median and median absolute deviation of the last ones, which no spike moves.

    Args:
        events: takes each spike.
        exporter: counts them.
        say: prints a line on rank 0: for the first of several in a row.
    """

    def __init__(self, events: EventLog, exporter: Exporter, say: Callable[[str], None]) -> None:
        self.events = events
        self.exporter = exporter
        self.say = say
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.last_spike = -1

    def steps_agreed(self, steps: Sequence[StepMetrics]) -> None:
        """Look at those that updated the weights."""
        for metrics in steps:
            if not metrics.skipped:
                self._look(metrics)
                self.losses.append(metrics.loss)

    def rolled_back(self, step: int) -> None:
        """Begin anew: the steps compared with do not count any more."""
        self.losses.clear()
        self.last_spike = -1

    def _look(self, metrics: StepMetrics) -> None:
        if len(self.losses) < LEAST_STEPS:
            return
        usual = median(self.losses)
        if metrics.loss <= usual + LEAST_RISE:
            return  # as nearly always, at half the cost
        deviation = NORMAL * median(abs(loss - usual) for loss in self.losses)
        if metrics.loss <= usual + DEVIATIONS * deviation:
            return
        self.exporter.loss_spikes.inc()
        self.events.agreed("loss_spike", step=metrics.step, loss=metrics.loss, usual_loss=usual, deviation=deviation)
        if metrics.step > self.last_spike + 1:
            self.say(
                f"Loss spike at step {metrics.step}: {metrics.loss:.4f}; the median of the {len(self.losses)} steps "
                f"before is {usual:.4f}"
            )
        self.last_spike = metrics.step
