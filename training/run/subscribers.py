"""Who reads a run's events, on which ranks."""

from __future__ import annotations

from training.fault_tolerance.watchdog import Watchdog
from training.monitoring.events import MetricsFile, Subscriber
from training.monitoring.loss_spikes import LossSpikes
from training.monitoring.profiler import Profiler
from training.monitoring.replicas import ReplicaCheck
from training.monitoring.stragglers import CollectiveRecorder, Stragglers
from training.monitoring.trackers import Trackers
from training.run.context import RunContext

COMPARE_EVERY = 20  # optimizer steps between two comparisons of the ranks' speeds
RECORD_EVERY = 20  # optimizer steps between two recordings of a step's collectives


def make_subscribers(context: RunContext, watchdog: Watchdog) -> list[Subscriber]:
    """This rank's readers, in the order in which they receive each event."""
    config, ranks, events, exporter = (
        context.config,
        context.ranks,
        context.events,
        context.exporter,
    )
    exporter.counts_rows = context.strategy.data_shard.is_replica_leader
    subscribers: list[Subscriber] = [exporter, context.status, watchdog]
    if config.profile:
        subscribers.append(Profiler(config, ranks, context.phases, context.console))
    # Readers that communicate must be on all ranks. These only write, and what they write is the
    # same on each, so one rank is enough.
    if ranks.is_first:
        step, flags = context.state.step, config.model_dump(mode="json")
        subscribers.append(MetricsFile(config.run_dir, step, context.say))
        subscribers.append(Trackers(config.run_dir, step, config.tracker_names, flags, context.say))
    subscribers.append(LossSpikes(events, exporter, context.say))
    if ranks.world_size > 1:
        # After the profiler, which is to see a whole step; CollectiveRecorder leaves a step to it
        # that both want.
        collectives = CollectiveRecorder(events, ranks.backend, RECORD_EVERY)
        subscribers.append(collectives)
        subscribers.append(
            Stragglers(
                context,
                config,
                collectives,
                COMPARE_EVERY,
                context.strategy.unsynchronized_model,
                context.strategy.parameters,
            )
        )
        # Last, because it may end the run: by then the others here have seen the event.
        copies = {**context.strategy.parameters, **context.strategy.buffers}
        subscribers.append(ReplicaCheck(copies, config, ranks, context.phases, exporter, events))
    return subscribers
