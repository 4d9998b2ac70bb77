"""Assemble a run whose settings are known: the model on all ranks, the number and size of steps,
the context.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from training.checkpointing import Storage
from training.checkpointing.resume import Resumed, global_batch_size
from training.data.balance import Balance
from training.data.batching import LengthBucketSampler
from training.distributed.failures import translate_errors
from training.fault_tolerance.interruption import Interruption
from training.model.optimizer import scaled_learning_rate
from training.monitoring.monitors import Monitors
from training.parallelism.registry import STRATEGIES
from training.parallelism.strategy import Strategy
from training.run.batch_size import settle_batch_size
from training.run.budget import start_budget
from training.run.context import RunContext, StepPlan
from training.run.settle import Settled
from training.run.state import RunState
from training.run.suspects import suspects_of


def distribute(settled: Settled, monitors: Monitors) -> tuple[Settled, Strategy, int]:
    """Distribute the model over the ranks, and find with it the batch size that ``auto`` leaves
    open.

    Returns:
        What is settled, with a batch size; the strategy; how many rows a micro-batch may have on
        this rank.
    """
    config, data, ranks = settled.config, settled.data, monitors.ranks
    make = partial(
        STRATEGIES[config.strategy],
        settled.model,
        config,
        ranks,
        settled.precision,
        monitors.phases,
    )
    with translate_errors(ranks, step=1):
        strategy = ranks.run_on_all_ranks(make)
        targets = data.tokens.train.labels[data.train_index]
        config, rows_that_fit = settle_batch_size(
            strategy, ranks, targets, settled.earlier, monitors.say
        )
    return replace(settled, config=config), strategy, rows_that_fit


def make_context(
    settled: Settled,
    strategy: Strategy,
    rows_that_fit: int,
    resumed: Resumed | None,
    storage: Storage,
    monitors: Monitors,
    interruption: Interruption,
) -> RunContext:
    """What the parts of the run can use; a collective call, in which ``--budget`` times how long
    the end will take.

    ``rows_that_fit``: in a micro-batch of this rank. ``resumed``: decides what plan and budget keep
    from before; the state is that of a new run until the checkpoint is restored.
    """
    config, data, model, ranks = settled.config, settled.data, settled.model, monitors.ranks
    saved = resumed.state if resumed else {}
    global_batch, accumulation = global_batch_size(
        rows_that_fit, config, strategy.data_shard, resumed
    )
    train, labels = data.tokens.read_in_training, data.tokens.label_names
    lengths = train.lengths[data.epoch_index]
    balanced = train.labels[data.epoch_index] if config.sampling == "balanced" else None
    sampler = LengthBucketSampler(lengths, global_batch, config.seed, balanced)
    # Kept, because a resumed run may have another number of ranks, by which a new one would be
    # scaled.
    rate = (
        saved["peak_learning_rate"]
        if resumed
        else scaled_learning_rate(config, strategy.data_shard.size)
    )
    timed = model if config.balance == "auto" else None
    # One row in each micro-batch: a rank with less than that would have to compute a dummy row.
    least_share = accumulation / global_batch
    sizes = [(one.numel(), one.requires_grad) for one in model.network.parameters()]
    return RunContext(
        **vars(monitors),
        config=config,
        data=data,
        strategy=strategy,
        plan=StepPlan(
            global_batch_size=global_batch,
            accumulation=accumulation,
            tokens_per_step=global_batch * float(lengths.mean()),
            steps_per_epoch=len(sampler),
            # With --method head the fitted head is the model, and all that is left is to test and
            # write it.
            total_steps=0 if config.method == "head" else config.epochs * len(sampler),
            peak_learning_rate=rate,
            class_weights=settled.class_weights,
            sources=settled.sources,
            ideal_seconds=settled.ideal_seconds,
            start=settled.start,
        ),
        sampler=sampler,
        precision=settled.precision,
        model_config=model.config,
        num_parameters=sum(size for size, _ in sizes),
        num_trained=sum(size for size, is_trained in sizes if is_trained),
        state=RunState(),
        storage=storage,
        interruption=interruption,
        suspects=suspects_of(config, data.tokens.train, data.train_index, len(labels)),
        budget=start_budget(config, strategy, ranks, data, saved),
        balance=Balance(timed, ranks, strategy.data_shard, least_share, monitors.say),
    )
