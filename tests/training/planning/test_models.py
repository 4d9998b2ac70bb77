"""Models: networks known by name or by their config.json."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from common.errors import UserError
from training.planning.models import NAMED_SHAPES, find_shape

SMALL_LLAMA = {"hidden_size": 256, "intermediate_size": 700, "num_attention_heads": 8, "num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("config", "network"),
    [
        (DistilBertConfig(num_labels=4), DistilBertForSequenceClassification),
        (BertConfig(num_labels=7), BertForSequenceClassification),
        (RobertaConfig(num_labels=3, max_position_embeddings=514, type_vocab_size=1), RobertaForSequenceClassification),
        (GPT2Config(), GPT2LMHeadModel),
        (LlamaConfig(**SMALL_LLAMA, num_key_value_heads=2, num_labels=4), LlamaForSequenceClassification),
        (LlamaConfig(**SMALL_LLAMA, num_key_value_heads=2), LlamaForCausalLM),
        (LlamaConfig(**SMALL_LLAMA, tie_word_embeddings=True), LlamaForCausalLM),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_config_json_is_counted_to_the_last_parameter(
    config: PreTrainedConfig, network: type[PreTrainedModel], tmp_path: Path
) -> None:
    with torch.device("meta"):
        model = network(config)
    config.architectures = [network.__name__]
    config.save_pretrained(tmp_path)

    assert find_shape(str(tmp_path)).num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "network", "config"),
    [
        ("distilbert-base", DistilBertForSequenceClassification, DistilBertConfig(num_labels=4)),
        ("bert-base", BertForSequenceClassification, BertConfig(num_labels=4)),
        (
            "llama-13b",
            LlamaForCausalLM,
            LlamaConfig(hidden_size=5120, intermediate_size=13_824, num_hidden_layers=40, num_attention_heads=40),
        ),
        (
            "llama-70b",
            LlamaForCausalLM,
            LlamaConfig(
                hidden_size=8192,
                intermediate_size=28_672,
                num_hidden_layers=80,
                num_attention_heads=64,
                num_key_value_heads=8,
            ),
        ),
        (
            "gpt3-175b",
            GPT2LMHeadModel,
            GPT2Config(n_embd=12_288, n_layer=96, n_head=96, n_positions=2048),
        ),
    ],
)
def test_a_named_model_is_the_one_of_transformers(
    name: str, network: type[PreTrainedModel], config: PreTrainedConfig
) -> None:
    with torch.device("meta"):
        model = network(config)

    assert NAMED_SHAPES[name].num_parameters == sum(p.numel() for p in model.parameters())
    blocks = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    assert NAMED_SHAPES[name].block_parameters == sum(p.numel() for p in blocks[0].parameters())


def test_matrix_work_is_what_torch_counts(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL_LLAMA, num_key_value_heads=2, vocab_size=1000)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    config.save_pretrained(tmp_path)

    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 64, dtype=torch.int64), use_cache=False)

    # Torch counts the rotary frequencies too: a millionth of the whole in a network of any size.
    assert 2 * find_shape(str(tmp_path)).forward_flops(64) == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_the_last_block_of_a_classifier_is_counted_for_its_first_token_only() -> None:
    shape = NAMED_SHAPES["distilbert-base"]

    saved = 1 - shape.forward_flops(128) / (shape.layers * shape.block_flops(128))

    assert saved == pytest.approx(1 / 7, abs=0.03)


@pytest.mark.parametrize(
    ("model", "content", "message"),
    [
        ("lama-13b", None, "did you mean llama-13b"),
        ("zzz", None, "known: distilbert-base"),
        ("missing.json", None, "No such file"),
        ("broken.json", "{", "not valid JSON"),
        ("list.json", "[]", "model_type None: must be one of"),
        ("t5.json", '{"model_type": "t5"}', "model_type 't5': must be one of"),
        ("half.json", '{"model_type": "llama"}', "has no num_attention_heads"),
        ("kinds.json", '{"model_type": ["llama"]}', r"model_type \['llama'\]: must be one of"),
    ],
)
def test_a_model_that_cannot_be_read_is_refused_in_one_line(
    model: str, content: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(model).write_text(content)

    with pytest.raises(UserError, match=message) as raised:
        find_shape(model)

    assert str(raised.value).startswith(f"--model {model}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads 0: must be a whole number above 0"),
        ({"hidden_size": None}, "has no hidden_size, which a llama needs"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers '2': must be a whole number above 0"),
        ({"num_hidden_layers": -2}, "num_hidden_layers -2: must be a whole number above 0"),
        ({"vocab_size": 1e5}, "vocab_size 100000.0: must be a whole number above 0"),
        ({"hidden_size": 250}, "hidden_size 250: must be a multiple of num_attention_heads 8"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8: must be a multiple of num_key_value_heads 3"),
    ],
)
def test_a_size_that_is_missing_or_wrong_is_named(wrong: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    whole = {"model_type": "llama", **SMALL_LLAMA, "vocab_size": 1000, "max_position_embeddings": 128}
    path.write_text(json.dumps(whole))
    assert find_shape(str(path)).hidden == 256

    path.write_text(json.dumps(whole | wrong))

    with pytest.raises(UserError) as raised:
        find_shape(str(path))
    assert str(raised.value) == f"--model {path}: {message}"


def test_a_folder_can_be_trained_once_it_holds_weights(tmp_path: Path) -> None:
    folder = tmp_path / "llama-13b"
    LlamaConfig(**SMALL_LLAMA).save_pretrained(folder)
    assert find_shape(str(folder)).source == ""
    assert find_shape("llama-13b").source == "meta-llama/Llama-2-13b-hf"

    (folder / "model.safetensors").touch()

    assert find_shape(str(folder)).source == str(folder)
