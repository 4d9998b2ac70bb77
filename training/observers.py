"""Which observers watch a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.monitoring.observer import Observer, Observers

if TYPE_CHECKING:
    from training.trainer import Trainer


def build_observers(trainer: Trainer) -> Observers:
    """Everything that watches this rank's part of a run; the order is that in which they are told."""
    trainer.exporter.leads = trainer.place.leads
    observers: list[Observer] = [trainer.exporter]
    if trainer.log:
        observers += [trainer.log, trainer.events]
    return Observers(observers)
