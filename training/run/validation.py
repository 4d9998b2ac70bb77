"""After an epoch's last step: what it has brought, measured on the validation rows."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from common.errors import TrainingFailure
from training.evaluation.evaluator import evaluate
from training.fault_tolerance.failures import explained
from training.monitoring import EpochMetrics

if TYPE_CHECKING:
    from training.run.trainer import Trainer


def validate_epoch(trainer: Trainer, epoch: int) -> EpochMetrics:
    """Evaluate the weights as they stand on the validation rows.

    Raises:
        EvaluationStopped: a rank was asked to stop.
        TrainingFailure: the loss is not finite.
    """
    state, tokens = trainer.state, trainer.news.tokens
    with trainer.phases("evaluate"), explained(trainer.ranks, state.step + 1):
        validation, _ = evaluate(
            partial(trainer.strategy.logits, precision=trainer.precision),
            trainer.news.validation_rows,
            trainer.ranks,
            tokens.label_names,
            trainer.place,
            trainer.news.validation_index,
            stops=trainer.stop_agreed,
        )
    if not math.isfinite(validation["loss"]):
        raise TrainingFailure(
            f"epoch {epoch}: the validation loss is {validation['loss']}. The last checkpoint is good and stays; "
            "lower --learning_rate, then start again",
            quiet=not trainer.ranks.is_first,
        )
    is_best = all(validation["accuracy"] > past.validation["accuracy"] for past in state.epochs)
    return EpochMetrics(epoch, state.step, state.epoch_loss.average, state.epoch_seconds, validation, is_best)
