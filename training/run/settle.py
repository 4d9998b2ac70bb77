"""What a run is about: its configuration, data, model and precision, decided once before the model
is distributed.

Flags leave much open, and each decision needs the ones before it: an earlier start of the same run
decides first, then the data, then the model that reads it, then the recipe that fits both.
:func:`settle` asks them in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from common.errors import UserError
from training.checkpointing import Storage, check_storage, open_storage
from training.checkpointing.export import check_output, check_shared
from training.checkpointing.resume import cleaning_of, state_of_run
from training.config import TrainConfig
from training.data.earlier import with_earlier_settings
from training.data.prepare import (
    PreparedData,
    class_weights_of,
    prepare_data,
    prepare_model,
    settle_model,
)
from training.data.teacher import read_teachers
from training.distributed.ranks import Ranks, seed_everything
from training.model.classifier import NewsClassifier
from training.model.lora import check_lora, frozen_hash
from training.model.own import Own
from training.model.precision import allow_tf32, choose_precision
from training.monitoring.trackers import check_trackers
from training.run.budget import settle_flags, settle_learning
from training.run.head_start import Start, start_from_head, wanted_pooling
from training.run.recipe import settle_recipe
from training.run.utilization import flops_per_token, peak_flops


def check_run(config: TrainConfig, ranks: Ranks) -> Storage:
    """Check what can be refused before data and model are read, the cheapest first; nothing is
    written.

    Returns:
        Where the checkpoints are.
    """

    # A rank that fails a check must not leave the others waiting in the next one, so each is a
    # collective call.
    def on_first(check: Callable[[], object]) -> None:
        ranks.run_on_all_ranks(lambda: check() if ranks.is_first else None)

    storage = ranks.run_on_all_ranks(lambda: open_storage(config))
    on_first(lambda: check_output(config.output_dir))
    on_first(lambda: check_trackers(config.tracker_names))
    ranks.run_on_all_ranks(lambda: check_lora(config))
    on_first(lambda: read_teachers(config) if config.is_distilled else None)
    check_shared(config.output_dir, ranks)
    check_storage(storage, ranks)
    return storage


@dataclass(frozen=True)
class Settled:
    """The same on every rank.

    ``earlier``: the plain values of the run that is resumed, empty for a new one;
    ``class_weights``, ``sources``, ``ideal_seconds`` and ``start``: see
    :class:`training.run.context.StepPlan`.
    """

    config: TrainConfig
    data: PreparedData
    model: NewsClassifier
    precision: str  # of the training steps
    earlier: Mapping[str, Any]
    class_weights: np.ndarray | None
    sources: Mapping[str, str | None]
    ideal_seconds: float | None
    start: Start | None


def settle(
    config: TrainConfig,
    ranks: Ranks,
    storage: Storage,
    say: Callable[[str], None],
    own: Own | None,
) -> Settled:
    """Decide, read and load; a collective call. ``own``: None for what the flags name.

    Raises:
        UserError: the data, the model and the flags do not fit each other.
    """
    # Before the first random number: weights that no file has are drawn while the model is loaded.
    seed_everything(config.seed, deterministic=config.deterministic)
    allow_tf32(wanted=config.tf32, device=ranks.device)
    own = own or ranks.run_on_all_ranks(lambda: Own.of(config))
    # Rank 0 chooses: on CPUs the choice is timed, and all ranks must use the same.
    wanted = ranks.broadcast(
        ranks.run_on_all_ranks(lambda: choose_precision(config.precision, ranks.device))
    )
    earlier = state_of_run(config, ranks, storage)
    asked = _with_earlier_choices(config, ranks, earlier, say)
    read = prepare_data(asked, ranks, say, own)
    of_data, data = settle_flags(asked.model_copy(update={"clean": read.cleaning}), read, earlier)
    given = earlier.get("class_weights")
    class_weights = ranks.from_first(lambda: class_weights_of(of_data, data, given))

    fits = of_data.fits_head
    pooling = earlier.get("pooling", "") if earlier else wanted_pooling(of_data) if fits else ""
    load = partial(prepare_model, of_data, ranks, data, wanted, own=own)
    # The recipe comes after the model, whose width and depth decide the rate, and before the head,
    # which depends on the method that the recipe has chosen.
    model, precision = load(say, pooling=pooling)
    settled = _with_recipe(of_data, ranks, data, model, precision, earlier)
    start = Start(**earlier["start"]) if earlier.get("start") else None
    if fits and not earlier:
        # The head may like the encoder better without the block of the mean: then it is loaded once
        # more, without the lines that were already said.
        again = partial(load, _say_nothing)
        found = start_from_head(settled, model, ranks, data, precision, lambda: again()[0], say)
        model, start = found or (model, None)
        if start is None:
            _do_without_fitted_head(settled, ranks, say)
    # Checkpoints hold the adapters only, so a resumed run must begin with the same frozen weights.
    frozen = ranks.broadcast(frozen_hash(model) if settled.lora and ranks.is_first else None)
    ideal_seconds = None
    if settled.is_language_model:
        ideal_seconds = flops_per_token(model, settled.max_length) / peak_flops(ranks, precision)
    teacher = data.teacher.key if data.teacher else None
    sources = {"data_key": data.tokens.key, "frozen_hash": frozen, "teacher_key": teacher}
    return Settled(
        settled, data, model, precision, earlier, class_weights, sources, ideal_seconds, start
    )


def _with_earlier_choices(
    config: TrainConfig, ranks: Ranks, earlier: Mapping[str, Any], say: Callable[[str], None]
) -> TrainConfig:
    """The configuration with what an earlier start of this run, or the model of ``--from``, decides about the data."""
    kept: dict[str, Any] = {"clean": cleaning_of(config, earlier)}
    # The rows that a resumed run trains on must not change.
    if earlier and not config.gives("validation_fraction"):
        kept["validation_fraction"] = earlier["config"].get(
            "validation_fraction", config.validation_fraction
        )
    asked = config.model_copy(update=kept)
    if config.from_model:
        asked = ranks.run_on_all_ranks(partial(with_earlier_settings, asked))
    return settle_model(asked, ranks, earlier, say)


def _with_recipe(
    config: TrainConfig,
    ranks: Ranks,
    data: PreparedData,
    model: NewsClassifier,
    precision: str,
    earlier: Mapping[str, Any],
) -> TrainConfig:
    num_validated = 0 if data.tokens.validation else len(data.validation_index)
    labels = data.tokens.train.labels[data.labelled_index]
    num_rows = len(data.labelled_index) + num_validated
    chosen = settle_recipe(config, model, labels, num_rows, len(data.train_index), earlier)
    return settle_learning(chosen, model, ranks, data, precision, earlier)


def _do_without_fitted_head(config: TrainConfig, ranks: Ranks, say: Callable[[str], None]) -> None:
    say(f"No head can be fitted to --model {config.model}, so its head begins at random")
    if config.method != "head" and not config.unlabelled:
        return
    asked = "--method head" if config.method == "head" else f"--unlabelled {config.unlabelled}"
    remedy = "Leave it out" if config.unlabelled else "Use --method fine_tune"
    raise UserError(
        f"{asked}: no head can be fitted to --model {config.model}; its last layer is not known, "
        "it "
        "has too many weights, or what it says of the rows is not finite. "
        f"{remedy if config.dataset else 'Use another --model'}",
        quiet=not ranks.is_first,
        code="model-unusable",
    )


def _say_nothing(text: str) -> None: ...
