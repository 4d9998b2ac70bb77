"""What --model brings is loaded whole or refused; only a task's head may be missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AlbertConfig,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    GPT2Config,
    LlamaConfig,
    ModernBertConfig,
    PreTrainedConfig,
    RobertaConfig,
    T5Config,
)

from common.errors import UserError
from training.model.classifier import Loading, NewsClassifier
from training.model.weights import read_network
from training.quiet import quiet_libraries
from training.tasks import TASKS

SIZE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "pad_token_id": 0,
}
SMALL = {**SIZE, "max_position_embeddings": 20}
ENDS = {"bos_token_id": 2, "eos_token_id": 3}
FAMILIES: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**SMALL),
    "distilbert": DistilBertConfig(vocab_size=40, dim=16, hidden_dim=32, n_layers=2, n_heads=2),
    "roberta": RobertaConfig(**SMALL, **ENDS),
    "albert": AlbertConfig(**SMALL, embedding_size=8, **ENDS),
    "electra": ElectraConfig(**SMALL, embedding_size=8),
    "deberta-v2": DebertaV2Config(**SMALL, relative_attention=True, position_biased_input=False, type_vocab_size=0),
    "modernbert": ModernBertConfig(**SIZE, **ENDS, cls_token_id=2, sep_token_id=3),
    "gpt2": GPT2Config(vocab_size=40, n_positions=20, n_embd=16, n_layer=2, n_head=2, **ENDS),
    "llama": LlamaConfig(**SIZE, **ENDS),
    "t5": T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, eos_token_id=3
    ),
}
SAVED_AS = (
    "AutoModel",
    "AutoModelForPreTraining",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
)
Weights = dict[str, torch.Tensor]


def save(folder: Path, config: PreTrainedConfig, kind: str = "AutoModel") -> Path:
    quiet_libraries()
    torch.manual_seed(0)
    getattr(transformers, kind).from_config(config).save_pretrained(folder)
    return folder


def change(folder: Path, edit: Callable[[Weights], Weights]) -> Path:
    file = folder / "model.safetensors"
    save_file(edit(load_file(file)), file, {"format": "pt"})
    return folder


def configure(folder: Path, **values: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


def base_of(model: NewsClassifier) -> Weights:
    return {name: weight for name, weight in model.network.base_model.state_dict().items() if "pooler" not in name}


def classifier(folder: Path, **more: object) -> NewsClassifier:
    return NewsClassifier(3, str(folder), list("abc"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", SAVED_AS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_saved_with_any_head_or_none_is_loaded_whole(family: str, kind: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    if type(config) not in getattr(transformers, kind)._model_mapping:
        pytest.skip(f"{family} has no {kind}")

    model = classifier(save(tmp_path, config, kind))

    stored = load_file(tmp_path / "model.safetensors")
    prefix = f"{model.network.base_model_prefix}."
    stored = {name.removeprefix(prefix): weight for name, weight in stored.items()}
    found = base_of(model)
    assert model.notes == []
    assert len(found.keys() & stored.keys()) > 10
    assert all(torch.equal(found[name], stored[name]) for name in found.keys() & stored.keys())


def test_a_head_for_other_labels_is_initialized_again_without_a_word(tmp_path: Path) -> None:
    config = BertConfig(**SMALL, num_labels=5)
    model = classifier(save(tmp_path, config, "AutoModelForSequenceClassification"))

    assert model.network.classifier.weight.shape[0] == 3
    assert model.notes == []


def test_old_names_and_buffers_of_older_versions_are_accepted(tmp_path: Path) -> None:
    def as_in_2018(weights: Weights) -> Weights:
        old = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): weight
            for name, weight in weights.items()
        }
        return old | {"embeddings.position_ids": torch.arange(20)[None]}

    expected = base_of(classifier(save(tmp_path / "new", BertConfig(**SMALL))))

    found = base_of(classifier(change(save(tmp_path / "old", BertConfig(**SMALL)), as_in_2018)))

    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["AutoModel", "AutoModelForSequenceClassification"])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.", "net.bert_model."])
def test_what_a_wrapper_writes_before_each_name_is_removed_and_said(
    prefix: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = BertConfig(**SMALL, num_labels=3)
    plain = classifier(change(save(tmp_path / "plain", config, kind), lambda w: {n: t.to(dtype) for n, t in w.items()}))
    wrapped = save(tmp_path / "wrapped", config, kind)
    change(wrapped, lambda weights: {prefix + name: weight.to(dtype) for name, weight in weights.items()})

    model = classifier(wrapped)

    assert model.notes == [f"The names of the weights of --model {wrapped} begin with {prefix!r}, which was removed"]
    head = {"classifier." + n: w for n, w in plain.network.classifier.state_dict().items() if kind != "AutoModel"}
    expected = {**base_of(plain), **head}
    found = base_of(model) | {n: model.network.state_dict()[n] for n in head}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_encoder_in_an_attribute_of_any_name_is_found_beside_a_head_of_its_own(tmp_path: Path) -> None:
    folder = save(tmp_path, BertConfig(**SMALL))
    change(
        folder,
        lambda weights: {
            **{f"text_encoder.{name}": weight for name, weight in weights.items()},
            "my_head.weight": torch.ones(3, 16),
        },
    )

    assert "begin with 'text_encoder.', which was removed" in classifier(folder).notes[0]


def two_encoders(weights: Weights) -> Weights:
    return {f"{which}.{name}": weight.clone() for which in ("query", "answer") for name, weight in weights.items()}


def without_second_block(weights: Weights) -> Weights:
    return {name: weight for name, weight in weights.items() if "layer.1." not in name}


def unrelated(weights: Weights) -> Weights:
    return {"nothing": torch.zeros(1)}


def without_one(weights: Weights) -> Weights:
    return {name: weight for name, weight in weights.items() if name != "encoder.layer.0.attention.self.query.weight"}


def as_lora(weights: Weights) -> Weights:
    return {name.replace("query.", "query.base_layer."): weight for name, weight in weights.items()}


MISFITS: dict[str, tuple[Callable[[Weights], Weights], dict[str, object], str]] = {
    "two encoders": (two_encoders, {}, r"missing: 37 of 39, first .*; left over: 78, first answer\."),
    "a block is missing": (without_second_block, {}, r"missing: 16 of 39, first bert\.encoder\.layer\.1\."),
    "nothing fits": (unrelated, {}, r"missing: 37 of 39, first bert\..*; left over: 1, first nothing"),
    "one is missing": (without_one, {}, r"missing: 1 of 39, first bert\.encoder\.layer\.0\.attention\.self\.query"),
    "adapters": (as_lora, {}, r"missing: 4 of 39, first .*; left over: 4, first .*base_layer"),
    "more words": (dict, {"vocab_size": 48}, r"of another shape: 1 of 39, .*word_embeddings.*\(40, 16\).*\(48, 16\)"),
    "fewer words": (dict, {"vocab_size": 32}, r"of another shape: 1 of 39, first bert\.embeddings\.word_embeddings"),
    "more positions": (dict, {"max_position_embeddings": 64}, r"of another shape: 1 of 39, .*position_embeddings"),
    "wider": (dict, {"hidden_size": 24}, r"of another shape: \d+ of 39, first"),
    "more blocks": (dict, {"num_hidden_layers": 4}, r"missing: 32 of 71, first bert\.encoder\.layer\.2\."),
    "fewer blocks": (dict, {"num_hidden_layers": 1}, r"left over: 16, first .*encoder\.layer\.1\."),
}


@pytest.mark.parametrize("case", MISFITS)
def test_weights_that_do_not_fit_are_refused_with_their_number_and_names(case: str, tmp_path: Path) -> None:
    edit, values, message = MISFITS[case]
    folder = configure(change(save(tmp_path, BertConfig(**SMALL)), edit), **values)

    with pytest.raises(UserError, match=message) as refusal:
        classifier(folder)

    assert refusal.value.code == "weights-unusable"
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "task"),
    [("bert", "masked_lm"), ("llama", "causal_lm"), ("bert", "regression"), ("bert", "multi_label"), ("bert", "pair")],
)
@pytest.mark.parametrize("as_stored", [False, True])
def test_weights_that_do_not_fit_are_refused_for_every_task(
    family: str, task: str, as_stored: bool, tmp_path: Path
) -> None:
    folder = change(
        save(tmp_path, FAMILIES[family]), lambda weights: {name: w for name, w in weights.items() if "1." not in name}
    )

    with pytest.raises(UserError, match="missing: "):
        NewsClassifier(1, str(folder), ["a"], task=TASKS[task], loading=Loading(as_stored=as_stored))


def test_a_language_model_says_that_its_head_begins_at_random(tmp_path: Path) -> None:
    bare = save(tmp_path / "bare", FAMILIES["bert"])
    whole = save(tmp_path / "whole", FAMILIES["bert"], "AutoModelForMaskedLM")
    task = TASKS["masked_lm"]

    assert "has no head for --task masked_lm: 6 weights begin at random" in classifier(bare, task=task).notes[0]
    assert classifier(whole, task=task).notes == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_are_not_finite_are_refused(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    def spoil(weights: Weights) -> Weights:
        weights = {name: weight.to(dtype) for name, weight in weights.items()}
        weights["encoder.layer.1.output.dense.bias"][3] = value
        return weights

    folder = change(save(tmp_path, BertConfig(**SMALL)), spoil)

    with pytest.raises(
        UserError, match=r"1 of its weights hold nan or infinity, first bert\.encoder\.layer\.1\.output"
    ):
        classifier(folder)


def test_weights_in_several_files_are_loaded_whole(tmp_path: Path) -> None:
    whole = classifier(save(tmp_path / "whole", BertConfig(**SMALL)))
    parts = tmp_path / "parts"
    transformers.AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(parts, max_shard_size="8KB")

    found, expected = base_of(classifier(parts)), base_of(whole)

    assert len(list(parts.glob("*.safetensors"))) > 1
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_teacher_that_gives_vectors_is_checked_as_well(tmp_path: Path) -> None:
    folder = change(save(tmp_path, BertConfig(**SMALL)), without_second_block)

    with pytest.raises(UserError, match=r"^--distill x: the weights do not fit .* first encoder\.layer\.1\."):
        read_network(transformers.AutoModel, str(folder), "--distill x")
