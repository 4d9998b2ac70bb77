"""What is at which depth of a network, so what is frozen and how fast the rest learns."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from torch import nn
from transformers import AutoModelForSequenceClassification

from common.encoders import FAMILIES
from common.errors import UserError
from tests.training.parallelism.small_models import small_config, small_model
from training.config import TrainConfig
from training.model.layers import check_depths, freeze_layers, rate_factors
from training.model.optimizer import build_optimizer

BLOCKS = 3


def _network(family: str) -> nn.Module:
    return AutoModelForSequenceClassification.from_config(small_config(family, layers=BLOCKS))


@pytest.mark.parametrize("family", ["distilbert", "bert", "roberta", "llama"])
def test_each_block_learns_slower_than_the_one_above_and_the_embeddings_slowest(family: str) -> None:
    network = _network(family)
    factor_of = rate_factors(network, 0.5)

    found = Counter(factor_of(name) for name, _ in network.named_parameters())

    [table] = [name for name, parameter in network.named_parameters() if parameter.shape == (97, 32)]
    assert sorted(found) == [0.0625, 0.125, 0.25, 0.5, 1]
    assert found[0.125] == found[0.25] == found[0.5]  # one block each
    assert factor_of(table) == 0.0625
    assert factor_of(list(network.state_dict())[-1]) == 1


def test_an_optimizer_has_a_group_for_each_depth_with_and_without_weight_decay() -> None:
    model = small_model("distilbert", layers=BLOCKS)

    groups = build_optimizer(model, dict(model.named_parameters()), TrainConfig(layer_decay=0.5)).param_groups

    assert sorted((group["lr_factor"], group["weight_decay"]) for group in groups) == [
        (factor, decay) for factor in (0.0625, 0.125, 0.25, 0.5, 1) for decay in (0, 0.01)
    ]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize(("freeze", "blocks"), [("none", None), ("embeddings", 0), ("2", 2), ("3", 3)])
def test_the_embeddings_and_so_many_of_the_lowest_blocks_are_frozen(freeze: str, blocks: int | None) -> None:
    network = _network("bert")
    freeze_layers(network, TrainConfig(freeze=freeze))

    layers = [network.bert.embeddings, *network.bert.encoder.layer, network.bert.pooler, network.classifier]
    trained = [all(parameter.requires_grad for parameter in layer.parameters()) for layer in layers]
    assert trained == [blocks is None or depth > blocks for depth in range(len(layers))]


def test_more_blocks_than_there_are_and_unknown_families_are_refused() -> None:
    with pytest.raises(UserError, match=r"^--freeze 4: --model small has 3 blocks; freeze at most that many$"):
        check_depths(_network("bert"), TrainConfig(freeze="4", model="small"))

    unknown = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=3))
    check_depths(unknown, TrainConfig())
    for flag, value in (("freeze", "embeddings"), ("layer_decay", 0.9)):
        with pytest.raises(
            UserError, match=rf"^--{flag} {value}: the layers of SimpleNamespace are not known"
        ) as found:
            check_depths(unknown, TrainConfig(**{flag: value}))
        assert found.value.code == "model-layers-unknown"
        assert all(family.name in str(found.value) for family in FAMILIES)
