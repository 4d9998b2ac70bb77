from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.processes import run_on_ranks
from tests.training.parallelism.small_models import VOCABULARY, small_config, small_model
from tests.training.parallelism.small_runs import small_strategy, take_steps
from training.model.classifier import NewsClassifier
from training.parallelism import embedding_rows
from training.parallelism.embedding_rows import large_tables
from training.tasks import CausalLanguageModel

WORDS = "network.distilbert.embeddings.word_embeddings.weight"


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_rows, "LEAST_ROWS", VOCABULARY)


def _trained(least_rows: int, fields: dict[str, Any], accumulation: int) -> tuple[list[str], dict[str, torch.Tensor]]:
    before, embedding_rows.LEAST_ROWS = embedding_rows.LEAST_ROWS, least_rows
    try:
        strategy = small_strategy(**fields)
    finally:
        embedding_rows.LEAST_ROWS = before
    take_steps(strategy, [1, 2, 3], accumulation=accumulation)
    names = strategy.embedding_rows.names if strategy.embedding_rows else []
    return names, {name: parameter.detach().clone() for name, parameter in strategy.parameters.items()}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_weights_are_to_the_bit_those_of_averaging_whole_tables(strategy: str, accumulation: int) -> None:
    fields = {"strategy": strategy, "gradient_accumulation": accumulation}
    by_rows = run_on_ranks(2, _trained, VOCABULARY, fields, accumulation)
    whole = run_on_ranks(2, _trained, VOCABULARY + 1, fields, accumulation)

    assert [names for names, _ in by_rows] == [[WORDS], [WORDS]]
    assert [names for names, _ in whole] == [[], []]
    for (_, found), (_, expected) in zip(by_rows, whole, strict=True):
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), name


def test_compressed_gradients_keep_the_whole_table() -> None:
    for names, _ in run_on_ranks(2, _trained, VOCABULARY, {"strategy": "ddp", "compress": "fp16"}, 1):
        assert not names


@pytest.mark.usefixtures("any_size")
def test_only_tables_whose_other_rows_have_no_gradient_are_taken() -> None:
    model, frozen, unknown = small_model("distilbert"), small_model("distilbert"), small_model("roberta")
    frozen.requires_grad_(False)

    assert list(large_tables(model)) == [WORDS]
    assert not large_tables(frozen)
    assert not large_tables(unknown)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("tied", [True, False])
def test_a_table_that_is_also_the_head_is_not_taken(tied: bool) -> None:
    config = small_config("llama")
    config.tie_word_embeddings = tied
    model = NewsClassifier.around(AutoModelForCausalLM.from_config(config), CausalLanguageModel(()))

    assert bool(large_tables(model)) is not tied


def test_small_tables_are_left_to_ddp() -> None:
    assert not large_tables(small_model("distilbert"))
