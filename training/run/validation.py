"""After an epoch's last step, or every so many steps: measure on the validation rows what training has achieved."""

from __future__ import annotations

import math

from common.errors import TrainingFailure
from training.distributed.failures import translate_errors
from training.evaluation.evaluator import ModelOnRanks, evaluate
from training.monitoring import EpochMetrics
from training.monitoring.records import score_of
from training.run.context import RunContext


def validate(context: RunContext) -> EpochMetrics:
    """Evaluate the current weights, or with ``--ema`` their average, on the validation rows, if
    there are any.

    Raises:
        EvaluationStopped: a rank was asked to stop.
        TrainingFailure: the loss is not finite.
    """
    state, averaged = context.state, context.strategy.averaged()
    epochs = state.step / context.plan.steps_per_epoch
    epoch = int(epochs) if epochs == int(epochs) else round(epochs, 3)
    if not len(context.data.validation_index):
        return EpochMetrics(
            epoch, state.step, state.epoch_loss.average, state.epoch_seconds, {}, is_best=True
        )
    with context.phases("evaluate"), translate_errors(context.ranks, state.step + 1), averaged:
        validation, _ = evaluate(
            ModelOnRanks.of_run(context.strategy, context.precision),
            context.data.validation_rows,
            context.data.validation_index,
            stops=context.stop_agreed,
        )
    if not math.isfinite(validation["loss"]):
        raise TrainingFailure(
            f"epoch {epoch}: the validation loss is {validation['loss']}. The last checkpoint is "
            "good and is kept; "
            f"lower --learning_rate, then {context.config.how_to_resume}",
            quiet=not context.ranks.is_first,
            code="loss-not-finite",
        )
    metric = context.config.best_metric
    # Of two that score the same the later one has learned longer, and at a lower rate.
    is_best = all(
        score_of(validation, metric) >= score_of(past.validation, metric) for past in state.epochs
    )
    accuracy = state.epoch_accuracy.average if state.epoch_accuracy.count else None
    return EpochMetrics(
        epoch,
        state.step,
        state.epoch_loss.average,
        state.epoch_seconds,
        validation,
        is_best,
        accuracy,
    )
