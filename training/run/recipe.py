"""The recipe: what a run does where no flag says it, from the rows, the labels and the encoder.

A flag that is given always wins. Nothing here looks at a model's name: an encoder is its width, its
depth, and how its files say it was trained.

**Learning rate.** AdamW moves every weight by about the rate in each step, whatever the gradient's
size. A layer of width w sums w of them, and a narrow encoder has larger weights, so it takes a
higher rate: with the square of the width. Changes of successive blocks add up, so deep encoders
take a lower one. ``RATE`` is what is usual for BERT base, 768 wide, 12 blocks deep, with a random
head. Half of it is enough for a head that was fitted before: at the whole rate the loss rises at
first, and what the encoder knew of other texts than these rows is lost.

**Steps.** What fine-tuning needs is steps, not passes: a run of three epochs takes 9 steps with 80
rows, and a label that is seen three times is not learned. More labels need more steps, and several
labels per text twice as many. Pairs of texts need four times as many: the vector of a single text
says nothing about how it relates to another one.

**Few rows.** A tenth of few rows says nothing about a model, and is missed in training. Up to
``FEW_ROWS`` all rows train, and folds say how good the fitted head is on rows that it has not seen.
From there ten epochs are enough, and never more than twice the steps that a larger data set gets; a
network that trains longer learns the rows by heart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from common.problem_types import MULTI_LABEL
from training.config import CHOSEN, TrainConfig
from training.data.prepare import FEW_ROWS, validation_fraction
from training.facts import TINY
from training.run.fitted_head import can_be_fitted

if TYPE_CHECKING:
    from training.model.classifier import NewsClassifier

RATE, OF_FITTED_HEAD, WIDTH, DEPTH = 3e-5, 0.5, 768, 12
HIGHEST_RATE = 1e-3
RATE_OF_LORA, RATE_OF_RANDOM, USUAL_RATE = 2e-4, 1e-3, 2e-5
STEPS, STEPS_PER_LABEL, LEAST_EPOCHS, MOST_EPOCHS = 150, 5, 3, 20
BATCHES = ((2_000, 16), (math.inf, 32))  # up to so many rows, rows per batch
FEW_EPOCHS = 10
# Where a label has less than this of its even share of the rows, accuracy says little about it.
RARE = 0.1


def rate_for(config: TrainConfig, model: NewsClassifier) -> float:
    """The peak learning rate for this encoder."""
    if config.lora:
        return RATE_OF_LORA
    if config.model == TINY or config.network:
        return RATE_OF_RANDOM
    width, depth = (
        getattr(model.config, name, None) for name in ("hidden_size", "num_hidden_layers")
    )
    if not (width and depth):
        return USUAL_RATE
    rate = min(HIGHEST_RATE, RATE * (WIDTH / width) ** 2 * math.sqrt(DEPTH / depth))
    return float(f"{OF_FITTED_HEAD * rate if _has_fitted_head(config, model) else rate:.2g}")


def _has_fitted_head(config: TrainConfig, model: NewsClassifier) -> bool:
    return config.fits_head and can_be_fitted(model)


def settle_recipe(
    config: TrainConfig,
    model: NewsClassifier,
    labels: np.ndarray,
    num_rows: int,
    num_train: int,
    earlier: Mapping[str, Any],
) -> TrainConfig:
    """The configuration with what its flags leave open; a run that is resumed keeps what it began
    with.

    Args:
        labels: of the training rows that have one, as the task takes them.
        num_rows: those and the rows that are kept for validation.
        num_train: all training rows.
    """
    if config.budget:  # which makes its own choices, see budget.py
        return config
    if earlier:  # a run of an older version did as the defaults then were
        chosen = {name: earlier["config"].get(name, getattr(config, name)) for name in CHOSEN}
    else:
        chosen = _choose(config, model, labels, num_rows, num_train)
    return config.model_copy(
        update={name: chosen[name] for name in chosen if not config.gives(name)}
    )


def _choose(
    config: TrainConfig, model: NewsClassifier, labels: np.ndarray, num_rows: int, num_train: int
) -> dict[str, Any]:
    rate, num_labels = rate_for(config, model), len(model.task.label_names)
    if not config.is_pretrained:
        return {"learning_rate": rate}
    is_few = _has_fitted_head(config, model) and num_rows <= FEW_ROWS
    size = next(rows for most, rows in BATCHES if num_train <= most)
    times = 4 if config.columns.pair else 2 if config.task_facts.problem_type is MULTI_LABEL else 1
    steps = times * (STEPS + STEPS_PER_LABEL * num_labels)
    if is_few:
        epochs = min(FEW_EPOCHS, math.ceil(2 * steps * size / num_train))
    else:
        epochs = min(MOST_EPOCHS, max(LEAST_EPOCHS, math.ceil(steps * size / num_train)))
    chosen: dict[str, Any] = {
        # Written down with the rate, so that the run's own config.yaml begins another run in the
        # same way.
        "method": config.method
        if config.method != "auto"
        else "fine_tune"
        if config.fits_head
        else "auto",
        "learning_rate": rate,
        "validation_fraction": validation_fraction(config, num_rows),
        "batch_size": size,
        "epochs": epochs,
    }
    if config.task_facts.has_one_label:
        counts = np.bincount(labels, minlength=num_labels)
        if counts.min() < RARE * counts.mean():
            chosen["best_metric"] = "macro_f1"
    return chosen
