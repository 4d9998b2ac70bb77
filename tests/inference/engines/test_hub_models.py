"""Model folders as they lie on the hub: written by older versions of transformers, or for another framework."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig

from common.errors import ModelLoadError
from common.model_folder import read_saved_model
from common.weights import read_weights
from inference.engines.model_loader import ModelLoader
from inference.engines.native.engine import NativeEngine
from inference.engines.native.quantize import write_native
from inference.engines.torch_engine import TorchEngine
from tests.inference.engines.native_models import MODELS
from training.model.classifier import NewsClassifier

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def answers(model_folder: Path, texts: list[str]) -> list[Any]:
    return ModelLoader(model_folder, "torch").predict_batch(texts)


def _edit(path: Path, **changes: Any) -> None:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def _refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as refusal:
        ModelLoader(path, "torch")
    line = str(refusal.value)
    assert len(line.splitlines()) == 1
    return line


def _change_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


_LEFT_OVER = {
    "cls.seq_relationship.weight": torch.ones(2, 4),
    "vocab_projector.bias": torch.ones(4),
    "distilbert.pooler.dense.weight": torch.ones(4, 4),
    "distilbert.embeddings.position_ids": torch.arange(64)[None],
    "loss_fct.weight": torch.ones(3),
}


@pytest.mark.parametrize("name", _LEFT_OVER)
def test_a_left_over_weight_that_changes_no_answer_is_ignored(
    folder_copy: Path, texts: list[str], answers: list[Any], name: str
) -> None:
    _change_weights(folder_copy, lambda weights: weights | {name: _LEFT_OVER[name]})
    assert ModelLoader(folder_copy, "torch").predict_batch(texts) == answers
    NewsClassifier.from_saved(read_saved_model(folder_copy))


@pytest.mark.parametrize(
    "name",
    [
        "distilbert.transformer.layer.2.output_layer_norm.weight",
        "distilbert.transformer.layer.0.lora_A.weight",
        "classifier.scale",
        "bias",
    ],
)
def test_a_weight_that_would_change_answers_is_an_error_with_its_name(folder_copy: Path, name: str) -> None:
    _change_weights(folder_copy, lambda weights: weights | {name: torch.ones(3)})
    assert f"1 unexpected keys for DistilBertForSequenceClassification, first {name}" in _refusal(folder_copy)


def test_a_roberta_may_have_the_pooler_that_its_classifier_does_not_read() -> None:
    model = MODELS["roberta"]()
    size = model.config.hidden_size
    more = {"roberta.pooler.dense.weight": torch.ones(size, size), "lm_head.bias": torch.ones(3)}
    TorchEngine(_config(model), {**model.state_dict(), **more}, "fp32", device="cpu")


def _config(model: transformers.PreTrainedModel) -> dict[str, Any]:
    return {**model.config.to_dict(), "id2label": {str(i): str(i) for i in range(model.config.num_labels)}}


def test_the_old_names_of_a_layer_norm_are_read_by_torch_and_by_the_native_export(tmp_path: Path) -> None:
    model = MODELS["bert"]()
    config, weights = _config(model), {name: value.clone() for name, value in model.state_dict().items()}
    old = {n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): weights[n] for n in weights}
    assert old.keys() != weights.keys()
    save_file(old, tmp_path / "model.safetensors")
    read = read_weights(tmp_path / "model.safetensors")
    assert read.keys() == weights.keys()
    TorchEngine(config, tmp_path / "model.safetensors", "fp32", device="cpu")
    write_native(config, read, tmp_path)
    NativeEngine(tmp_path, config, threads=1)


@pytest.mark.parametrize("length", [..., None, 10**30, 1e30, "1e30", "512"])
def test_without_a_usable_model_max_length_the_positions_are_the_limit(folder_copy: Path, length: object) -> None:
    _edit(folder_copy / "tokenizer_config.json", model_max_length=length)
    assert read_saved_model(folder_copy).max_length == 64


@pytest.mark.parametrize("length", [24, 24.0, "24"])
def test_model_max_length_may_be_written_in_another_type(folder_copy: Path, length: object) -> None:
    _edit(folder_copy / "tokenizer_config.json", model_max_length=length)
    assert read_saved_model(folder_copy).max_length == 24


def test_positions_that_roberta_keeps_for_padding_are_no_limit(folder_copy: Path) -> None:
    _edit(folder_copy / "tokenizer_config.json", model_max_length=...)
    _edit(folder_copy / "config.json", model_type="roberta", max_position_embeddings=66, pad_token_id=1)
    assert read_saved_model(folder_copy).max_length == 64


@pytest.mark.parametrize("length", [24.5, "many", [24], 0, -1])
def test_a_model_max_length_that_is_no_number_of_tokens_is_refused(folder_copy: Path, length: object) -> None:
    _edit(folder_copy / "tokenizer_config.json", model_max_length=length)
    assert "model_max_length" in _refusal(folder_copy)


def test_tokenizer_config_json_may_be_missing(folder_copy: Path) -> None:
    (folder_copy / "tokenizer_config.json").unlink()
    assert read_saved_model(folder_copy).max_length == 64


def test_weights_of_plain_tensors_in_a_bin_file_are_served(
    folder_copy: Path, texts: list[str], answers: list[Any]
) -> None:
    torch.save(load_file(folder_copy / "model.safetensors"), folder_copy / "pytorch_model.bin")
    (folder_copy / "model.safetensors").unlink()
    assert ModelLoader(folder_copy, "torch").predict_batch(texts) == answers
    NewsClassifier.from_saved(read_saved_model(folder_copy))


class _Code:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_a_bin_file_that_would_run_code_is_refused_and_runs_none(folder_copy: Path, tmp_path: Path) -> None:
    torch.save({"weights": _Code(str(tmp_path / "ran"))}, folder_copy / "pytorch_model.bin")
    (folder_copy / "model.safetensors").unlink()
    assert "pytorch_model.bin" in _refusal(folder_copy)
    assert not (tmp_path / "ran").exists()


def test_sharded_weights_are_refused_with_a_command_that_joins_them(
    folder_copy: Path, texts: list[str], answers: list[Any]
) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder_copy)
    (folder_copy / "model.safetensors").unlink()
    model.save_pretrained(folder_copy, max_shard_size="10KB")
    line = _refusal(folder_copy)
    assert "model.safetensors.index.json" in line
    command = re.search(r"AutoModel\w+\.from_pretrained\((['\"].*?['\"])\)\.save_pretrained\(\1\)", line)
    assert command
    name, rest = command[0].split(".", 1)
    eval(f"model.{rest}", {"model": getattr(transformers, name)})
    assert ModelLoader(folder_copy, "torch").predict_batch(texts) == answers


def test_the_folder_of_a_hub_cache_names_the_model_in_it(folder_copy: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--news"
    snapshot = cache / "snapshots" / "0123abc"
    shutil.copytree(folder_copy, snapshot)
    assert str(snapshot) in _refusal(cache)
    ModelLoader(snapshot, "torch")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_was_never_exported_gets_a_remedy_that_fits(folder_copy: Path, missing: str) -> None:
    (folder_copy / "metrics.json").unlink()
    (folder_copy / missing).unlink()
    line = _refusal(folder_copy)
    assert f"it lacks {missing}" in line
    assert "save_pretrained" in line
    assert "export the model again" not in line


@pytest.mark.parametrize(
    "architecture",
    [
        "DistilBertForTokenClassification",
        "BertForQuestionAnswering",
        "BertForMultipleChoice",
        "ViTForImageClassification",
    ],
)
def test_a_model_that_gives_no_answer_for_a_whole_text_is_refused(folder_copy: Path, architecture: str) -> None:
    _edit(folder_copy / "config.json", architectures=[architecture])
    assert f"a {architecture}, which does not give a whole text one answer" in _refusal(folder_copy)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_folder_with_only_a_vocabulary_is_read_as_transformers_reads_it(tmp_path: Path, family: str) -> None:
    texts = ["Shares of the oil company fell", "Goal for the strikers", "Ünï code"]
    if family == "bert":
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "shares", "of", "the", "oil", "goal", "##s", "uni"]
        (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    else:
        vocabulary = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    more = {"pad_token_id": vocabulary.index("[PAD]" if family == "bert" else "<pad>"), "initializer_range": 0.5}
    config = AutoConfig.for_model(family, vocab_size=len(vocabulary), num_labels=3, **sizes, **more)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)

    ours = ModelLoader(tmp_path, "torch").predict_batch(texts)
    theirs = transformers.pipeline("text-classification", model=str(tmp_path), device="cpu")(texts)
    assert [answer["label"] for answer in ours] == [answer["label"] for answer in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["confidence"] == pytest.approx(other["score"], abs=1e-5)
