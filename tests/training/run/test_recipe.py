from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    LlamaConfig,
    PreTrainedConfig,
)

from training.config import TrainConfig
from training.data.prepare import validation_fraction
from training.model.classifier import NewsClassifier
from training.run.recipe import rate_for, settle_recipe
from training.tasks import Classification


def classifier(config: PreTrainedConfig, labels: int = 4) -> NewsClassifier:
    """One that has the shapes of a network, and no weights."""
    config.num_labels = labels
    with torch.device("meta"):
        network = AutoModelForSequenceClassification.from_config(config)
    return NewsClassifier.around(network, Classification([str(i) for i in range(labels)]))


MINILM = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12)


def settled(config: TrainConfig, rows: int, labels: int = 4, earlier: dict[str, Any] | None = None) -> TrainConfig:
    targets = np.arange(rows) % labels
    return settle_recipe(config, classifier(MINILM, labels), targets, rows, rows, earlier or {})


def configuration(**values: Any) -> TrainConfig:
    return TrainConfig(model="some-encoder", dataset="rows.csv", **values)


@pytest.mark.parametrize(
    ("network", "low", "high"),
    [
        (BertConfig(), 2e-5, 5e-5),
        (DistilBertConfig(), 3e-5, 5e-5),
        (BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16), 8e-6, 2e-5),
        (MINILM, 1e-4, 2e-4),
        (DistilBertConfig(dim=256, n_layers=3, n_heads=8), 4e-4, 7e-4),
        (BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4), 1e-3, 1e-3),
    ],
    ids=["base", "distilled base", "large", "384 x 6", "256 x 3", "64 x 2"],
)
def test_narrow_and_shallow_encoders_learn_faster(network: PreTrainedConfig, low: float, high: float) -> None:
    with_random_head = configuration(loss="mine:loss")
    assert low <= rate_for(with_random_head, classifier(network)) <= high


def test_a_fitted_head_needs_half_the_rate_of_a_random_one() -> None:
    fitted, random = (rate_for(configuration(loss=loss), classifier(MINILM)) for loss in ("", "mine:loss"))

    assert fitted == pytest.approx(random / 2, rel=0.05)


def test_a_thousand_rows_are_not_learned_by_heart() -> None:
    assert settled(configuration(), 64).epochs == 10
    assert settled(configuration(), 1_000).epochs == 6


def test_pairs_of_texts_are_seen_more_often() -> None:
    single, pairs = (settled(configuration(task="regression", pair_column=pair), 3_000, 1) for pair in ("", "other"))

    assert single.epochs == 3
    assert pairs.epochs == 7


def test_a_head_that_cannot_be_fitted_learns_as_a_random_one_does() -> None:
    decoder = classifier(LlamaConfig(vocab_size=60, hidden_size=384, intermediate_size=64, num_hidden_layers=6))

    assert rate_for(configuration(), decoder) == rate_for(configuration(loss="mine:loss"), decoder)


def test_an_encoder_learns_at_the_same_rate_by_name_and_by_path(tmp_path: Path) -> None:
    by_name, by_path = (TrainConfig(model=model) for model in ("starter", str(tmp_path)))

    assert rate_for(by_name, classifier(MINILM)) == rate_for(by_path, classifier(MINILM))


@pytest.mark.parametrize(("rows", "labels"), [(80, 10), (600, 77), (2_000, 77), (6_000, 77), (100_000, 4)])
def test_every_label_is_seen_often_enough_and_no_row_too_often(rows: int, labels: int) -> None:
    config = settled(configuration(), rows, labels)

    steps = config.epochs * rows / config.batch_size
    assert 3 <= config.epochs <= 20
    assert steps >= min(20 * rows / config.batch_size, 10 * rows / 16 if rows <= 1_000 else 150 + 5 * labels)


@pytest.mark.parametrize(
    "given",
    [{"epochs": 2}, {"batch_size": 4}, {"learning_rate": 1e-6}, {"validation_fraction": 0.2}, {"best_metric": "loss"}],
    ids=lambda given: next(iter(given)),
)
def test_a_flag_that_is_given_wins(given: dict[str, Any]) -> None:
    config = settled(configuration(**given), 500)

    assert given.items() <= config.model_dump().items()


def test_a_rate_that_a_file_gives_as_null_is_chosen() -> None:
    assert settled(configuration(learning_rate=None), 500).learning_rate == settled(configuration(), 500).learning_rate


def test_few_rows_all_train_unless_a_flag_asks_for_validation() -> None:
    assert validation_fraction(configuration(), 500) == 0
    assert validation_fraction(configuration(), 5_000) == 0.1
    for flag in ({"early_stopping": 2}, {"evaluate_every": 5}, {"best_metric": "macro_f1"}):
        assert validation_fraction(configuration(**flag), 500) == 0.1


def test_a_rare_label_makes_macro_f1_the_metric_that_chooses() -> None:
    targets = np.array([0] * 1900 + [1] * 40)
    config = settle_recipe(configuration(), classifier(MINILM, 2), targets, 2_000, 1_940, {})

    assert config.best_metric == "macro_f1"
    assert settled(configuration(), 2_000).best_metric == "accuracy"


def test_a_resumed_run_keeps_what_it_began_with_when_its_data_has_grown() -> None:
    began = settled(configuration(), 500)
    resumed = settled(configuration(), 50_000, earlier={"config": began.model_dump(mode="json")})

    assert resumed == began


@pytest.mark.parametrize(
    "flags",
    [{"learning_rate": 1e-5}, {"budget": "5m"}, {"lora": 4}, {"model": "tiny"}, {"network": "mine:Net"}],
    ids=lambda flags: next(iter(flags)),
)
def test_a_recipe_of_the_users_own_begins_with_a_random_head(flags: dict[str, Any]) -> None:
    assert not TrainConfig(**flags).fits_head
    assert TrainConfig().fits_head
    assert TrainConfig(method="fine_tune", learning_rate=1e-5).fits_head
