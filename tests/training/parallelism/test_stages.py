"""A model cut into stages is the same model."""

from __future__ import annotations

import gc
import weakref
from itertools import combinations, pairwise

import pytest
import torch

from common.errors import UserError
from tests.training.parallelism.small_models import small_batch, small_model
from training.model.classifier import NewsClassifier
from training.parallelism.stages import Stage, balanced_split, split_stages

FAMILIES = ("distilbert", "bert", "llama")


def _all_stages(model: NewsClassifier, num_stages: int) -> list[Stage]:
    return split_stages(model, range(num_stages), num_stages, "--pp")


@pytest.mark.parametrize(
    ("costs", "num_stages", "sizes"),
    [
        ([1] * 8, 4, [2, 2, 2, 2]),
        ([1] * 6, 4, [1, 1, 2, 2]),  # the first stage, which has the embeddings too, is not the longer one
        ([1, 1, 1, 1, 1, 1 / 6], 2, [3, 3]),
        ([1, 1, 1, 1 / 6], 2, [2, 2]),
        ([1, 1, 1, 5], 2, [3, 1]),
        ([1], 1, [1]),
    ],
)
def test_stages_are_even_by_cost(costs: list[float], num_stages: int, sizes: list[int]) -> None:
    runs = balanced_split(costs, num_stages)
    assert [len(run) for run in runs] == sizes
    assert [number for run in runs for number in run] == list(range(len(costs)))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 7])
def test_no_cut_has_a_cheaper_costliest_stage(num_stages: int) -> None:
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    cuts = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), num_stages - 1)]
    least = min(max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in cuts)
    assert max(sum(costs[i] for i in run) for run in balanced_split(costs, num_stages)) == least


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_stages_hold_each_parameter_of_the_model_once_under_its_name(family: str, num_stages: int) -> None:
    model = small_model(family, layers=5)
    held = [named for stage in _all_stages(model, num_stages) for named in stage.named_parameters()]
    whole = dict(model.named_parameters())
    assert sorted(name for name, _ in held) == sorted(whole)
    assert all(parameter is whole[name] for name, parameter in held)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_one_after_the_other_give_the_logits_of_the_model_with_its_dropout(family: str) -> None:
    model = small_model(family, dropout=0.0 if family == "llama" else 0.3, layers=5)
    ids, mask, _ = small_batch()
    model.seed_dropout(seed=11, step=2, first_row=8)
    expected = model(ids, mask)

    states = ids
    for stage in _all_stages(model, 3):
        stage.positions = iter([(11, 2, 8)])
        states = stage(states, mask)

    torch.testing.assert_close(states, expected, rtol=0, atol=1e-6)


def test_what_other_ranks_hold_is_freed_with_the_model() -> None:
    model = small_model("distilbert", layers=4)
    layer = model.network.distilbert.transformer.layer
    mine, other = (weakref.ref(block.ffn.lin1.weight) for block in (layer[3], layer[0]))
    stages = split_stages(model, [1], 2, "--pp")
    del model, layer
    gc.collect()
    assert mine() is dict(stages[0].named_parameters())["network.distilbert.transformer.layer.3.ffn.lin1.weight"]
    assert other() is None


def test_the_error_explains_why_a_model_cannot_be_split() -> None:
    with pytest.raises(UserError, match=r"^--pp: 4 stages, and the model has 3 blocks$"):
        _all_stages(small_model("distilbert", layers=3), 4)
    with pytest.raises(UserError, match=r"^--pp: RobertaForSequenceClassification cannot be split into stages; Distil"):
        _all_stages(small_model("roberta"), 2)
