"""Which observers watch a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.monitoring.collectives import Collectives
from training.monitoring.divergence import ReplicaCheck
from training.monitoring.loss_spikes import LossSpikes
from training.monitoring.observer import Observer, Observers
from training.monitoring.profiler import Profiler
from training.monitoring.stragglers import Stragglers

if TYPE_CHECKING:
    from training.run.trainer import Trainer

LOOK_EVERY = 20  # optimizer steps between two looks at the ranks beside each other


def build_observers(trainer: Trainer) -> Observers:
    """Everything that watches this rank's part of a run; the order is that in which they are told."""
    trainer.exporter.leads = trainer.place.leads
    observers: list[Observer] = [trainer.exporter, trainer.status, trainer.watchdog]
    if trainer.config.profile:
        observers.append(Profiler(trainer.config, trainer.ranks, trainer.phases, trainer.console))
    if trainer.log:
        observers += [trainer.log, trainer.events]
    observers.append(LossSpikes(trainer.events, trainer.exporter, trainer.say))
    if trainer.ranks.world_size > 1:
        observers += _comparisons(trainer)
    return Observers(observers)


def _comparisons(trainer: Trainer) -> list[Observer]:
    """What the ranks show each other. They come last: a profiler that is to see a whole step begins before them."""
    ranks, exporter = trainer.ranks, trainer.exporter
    collectives = Collectives(exporter, ranks.backend, trainer.config.record_collectives_every)
    parameters, every = trainer.strategy.parameters, trainer.config.check_replicas_every
    return [
        collectives,
        Stragglers(trainer, collectives, LOOK_EVERY),
        ReplicaCheck(parameters, every, ranks, trainer.phases, exporter, trainer.events),
    ]
