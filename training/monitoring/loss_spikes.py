"""Loss spikes: steps whose loss is far above that of the steps before. They are reported; nothing else is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from training.monitoring.events import Event, EventStream, RolledBack, StepsAgreed, Subscriber
from training.monitoring.exporter import Exporter
from training.monitoring.records import StepMetrics

WINDOW = 100  # steps that a loss is compared with
LEAST_STEPS = 50  # with fewer a median says little
# Both bounds must be exceeded. Late in a run a single hard batch is a few deviations above the
# median; while nothing is learnt yet, and once everything is, losses hardly differ, and many
# deviations are still little.
DEVIATIONS = 10.0
LEAST_RISE = 0.5  # nats; guessing among four classes costs 1.39
# The standard deviation of a normal distribution, in median absolute deviations.
NORMAL = 1.4826


class LossSpikes(Subscriber):
    """Compares each loss with median and median absolute deviation of the last ones, which a spike
    hardly moves.

    ``say`` prints a line on rank 0, for the first of consecutive spikes.
    """

    def __init__(self, events: EventStream, exporter: Exporter, say: Callable[[str], None]) -> None:
        self.events = events
        self.exporter = exporter
        self.say = say
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.last_spike = -1

    def receive(self, event: Event) -> None:
        """Check the steps that updated the weights."""
        match event:
            case StepsAgreed(steps):
                # A skipped step has changed nothing, and its loss may be NaN, with which no median
                # can be taken. A loss is compared before it is added, so never with itself. A spike
                # is added as well: if the loss stays up there, it becomes the usual one and is not
                # reported for ever.
                for metrics in steps:
                    if not metrics.skipped:
                        self._check(metrics)
                        self.losses.append(metrics.loss)
            case RolledBack():  # the steps compared with do not count any more
                self.losses.clear()
                self.last_spike = -1

    def _check(self, metrics: StepMetrics) -> None:
        if len(self.losses) < LEAST_STEPS:
            return
        usual = median(self.losses)
        if metrics.loss <= usual + LEAST_RISE:
            # Nearly every step ends here, at half the cost: the second median is not computed.
            return
        deviation = NORMAL * median(abs(loss - usual) for loss in self.losses)
        if metrics.loss <= usual + DEVIATIONS * deviation:
            return
        self.exporter.loss_spikes.inc()
        fields = {
            "step": metrics.step,
            "loss": metrics.loss,
            "usual_loss": usual,
            "deviation": deviation,
        }
        self.events.write_on_rank0("loss_spike", **fields)
        # All of them are counted and recorded, and only the first of a series is printed.
        if metrics.step > self.last_spike + 1:
            self.say(
                f"Loss spike at step {metrics.step}: {metrics.loss:.4f}; the median of the "
                f"{len(self.losses)} steps "
                f"before is {usual:.4f}"
            )
        self.last_spike = metrics.step
