from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
)

from training.model.pooling import (
    FIRST,
    MEAN,
    POOLING_FILE,
    add_mean_block,
    can_have_mean_block,
    trained_pooling,
)

SIZE = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ROBERTA = RobertaConfig(**SIZE, pad_token_id=1, bos_token_id=0, eos_token_id=2)
WITH_BLOCK = {
    "bert": BertConfig(**SIZE),
    "distilbert": DistilBertConfig(vocab_size=60, dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    "electra": ElectraConfig(**SIZE, embedding_size=16),
    "roberta": ROBERTA,
}
IDS = torch.tensor([[2, 7, 9, 11, 3], [2, 8, 3, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def network(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(copy.deepcopy(config)).eval()


def hidden_states(model: PreTrainedModel) -> tuple[torch.Tensor, ...]:
    body = getattr(model, model.base_model_prefix)
    return body(input_ids=IDS, attention_mask=MASK, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("family", WITH_BLOCK)
@torch.inference_mode()
def test_the_first_token_of_the_added_block_is_the_normalised_mean_of_all_tokens(family: str) -> None:
    model = network(WITH_BLOCK[family])
    before = hidden_states(model)[-1]
    mean = (before * MASK[..., None]).sum(dim=1) / MASK.sum(dim=1, keepdim=True)

    add_mean_block(model)
    after = hidden_states(model)

    assert model.config.num_hidden_layers == 3
    assert torch.equal(after[-2], before)  # what was there stays as it is
    expected = F.layer_norm(mean, mean.shape[1:])
    assert F.cosine_similarity(after[-1][:, 0], expected).min() > 0.995


@torch.inference_mode()
def test_plain_transformers_loads_a_model_with_the_block_and_answers_alike(tmp_path: Path) -> None:
    model = network(WITH_BLOCK["bert"])
    add_mean_block(model)
    model.save_pretrained(tmp_path)

    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()

    assert torch.equal(loaded(IDS, MASK).logits, model(IDS, MASK).logits)
    assert not can_have_mean_block(loaded)  # a second block would average averages


@pytest.mark.parametrize(
    "config",
    [MPNetConfig(**SIZE), ModernBertConfig(**SIZE, pad_token_id=0, cls_token_id=2, sep_token_id=3)],
    ids=["distances change the weights", "another kind of block"],
)
def test_no_block_is_added_where_it_would_not_be_a_plain_mean(config: PreTrainedConfig) -> None:
    assert not can_have_mean_block(network(config))


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ('{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}', MEAN),
        ('{"pooling_mode_cls_token": true}', FIRST),
        ('{"pooling_mode_max_tokens": true}', None),
        ("{", None),
        ("[1]", None),
        (None, None),
    ],
)
def test_an_encoder_is_read_as_its_files_say_it_was_trained(
    about: str | None, expected: str | None, tmp_path: Path
) -> None:
    if about is not None:
        (tmp_path / POOLING_FILE).parent.mkdir()
        (tmp_path / POOLING_FILE).write_text(about)

    assert trained_pooling(tmp_path) == expected


def test_training_moves_the_block_that_began_as_an_average() -> None:
    model = network(WITH_BLOCK["bert"]).train()
    add_mean_block(model)

    model(IDS, MASK, labels=torch.tensor([0, 1])).loss.backward()

    block = model.bert.encoder.layer[-1]
    names = ("attention.self.value", "attention.output.dense", "output.dense")
    assert all(block.get_submodule(name).weight.grad.abs().sum() > 0 for name in names)
