"""Which observers watch a run."""

from __future__ import annotations

from training.fault_tolerance.watchdog import Watchdog
from training.monitoring import RunLog
from training.monitoring.collectives import Collectives
from training.monitoring.divergence import ReplicaCheck
from training.monitoring.loss_spikes import LossSpikes
from training.monitoring.observer import Observer, Observers
from training.monitoring.profiler import Profiler
from training.monitoring.stragglers import Stragglers
from training.run.context import RunContext

LOOK_EVERY = 20  # optimizer steps between two looks at the ranks beside each other


def build_observers(context: RunContext, watchdog: Watchdog, log: RunLog | None) -> Observers:
    """Everything that watches this rank's part of a run; the order is that in which they are told."""
    context.exporter.leads = context.strategy.place.leads
    observers: list[Observer] = [context.exporter, context.status, watchdog]
    if context.config.profile:
        observers.append(Profiler(context.config, context.ranks, context.phases, context.console))
    if log:
        observers += [log, context.events]
    observers.append(LossSpikes(context.events, context.exporter, context.say))
    if context.ranks.world_size > 1:
        observers += _comparisons(context)
    return Observers(observers)


def _comparisons(context: RunContext) -> list[Observer]:
    """What the ranks show each other. They come last: a profiler that is to see a whole step begins before them."""
    ranks, exporter = context.ranks, context.exporter
    collectives = Collectives(exporter, ranks.backend, context.config.record_collectives_every)
    parameters, every = context.strategy.parameters, context.config.check_replicas_every
    return [
        collectives,
        Stragglers(context, collectives, LOOK_EVERY),
        ReplicaCheck(parameters, every, ranks, context.phases, exporter, context.events),
    ]
