from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from inference.exporting.encoder_graph import EncoderGraph, build_module

SIZES = {"vocab_size": 90, "max_position_embeddings": 40, "initializer_range": 0.25, "num_labels": 5}


def _distilbert(activation: str) -> PreTrainedModel:
    config = DistilBertConfig(n_layers=3, dim=32, hidden_dim=64, n_heads=2, activation=activation, **SIZES)
    return DistilBertForSequenceClassification(config)


def _bert(activation: str) -> PreTrainedModel:
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3}
    return BertForSequenceClassification(BertConfig(hidden_act=activation, **sizes, **SIZES))


def _roberta() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return RobertaForSequenceClassification(RobertaConfig(**sizes, **SIZES))


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 90, (4, 20))
    lengths = torch.tensor([20, 1, 7, 13])
    return ids, (torch.arange(20) < lengths[:, None]).long()


@pytest.mark.parametrize("make", [_distilbert, _bert])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@torch.inference_mode()
def test_the_lean_graph_equals_the_whole_model(make: type, activation: str) -> None:
    torch.manual_seed(0)
    model = make(activation).eval()
    graph, kind = build_module(model.config.to_dict(), model.state_dict(), int8=False)
    ids, mask = _inputs()
    assert kind == "lean"
    assert isinstance(graph, EncoderGraph)
    torch.testing.assert_close(graph(ids, mask), model(ids, mask).logits, atol=2e-5, rtol=1e-5)


@torch.inference_mode()
def test_small_embeddings_change_little() -> None:
    torch.manual_seed(0)
    model = _bert("gelu").eval()
    graph, _ = build_module(model.config.to_dict(), model.state_dict(), int8=True)
    ids, mask = _inputs()
    torch.testing.assert_close(graph(ids, mask), model(ids, mask).logits, atol=0.05, rtol=0.05)
    assert graph.word_embeddings.table.dtype is torch.int8


@torch.inference_mode()
def test_another_architecture_is_exported_whole() -> None:
    torch.manual_seed(0)
    model = _roberta().eval()
    module, kind = build_module(model.config.to_dict(), model.state_dict(), int8=True)
    ids, mask = _inputs()
    assert kind == "whole"
    assert (
        build_module(_bert("gelu").config.to_dict() | {"is_decoder": True}, _bert("gelu").state_dict(), int8=True)[1]
        == kind
    )
    torch.testing.assert_close(module(ids, mask), model(ids, mask).logits, atol=1e-5, rtol=1e-5)


def test_a_causal_bert_is_exported_whole() -> None:
    model = _bert("gelu")
    _, kind = build_module(model.config.to_dict() | {"is_decoder": True}, model.state_dict(), int8=False)
    assert kind == "whole"
