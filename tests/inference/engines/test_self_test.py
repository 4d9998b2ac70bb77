"""What a model is tried on when it is loaded: alone, among others, and at its longest; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import pipeline

from common.errors import ModelLoadError
from common.model_folder import read_saved_model
from inference.engines.base import TokenBatch
from inference.engines.model_loader import ModelLoader
from inference.engines.self_test import check_engine
from tests.inference.conftest import MakeFolder, rescale

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
XLNET_SIZES = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 2, "eos_token_id": 3}


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def _refusal(folder: Path, engine: str = "auto") -> str:
    with pytest.raises(ModelLoadError, match=r"^[^\n]+; [^\n]+$") as refusal:
        ModelLoader(folder, engine)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("XLNet", XLNET_SIZES),
        ("FNet", {key: value for key, value in SIZES.items() if "heads" not in key}),
        ("ConvBert", {**SIZES, "embedding_size": 32}),
    ],
)
def test_a_model_whose_answer_changes_with_padding_is_refused(
    make_folder: MakeFolder, family: str, config: dict[str, Any]
) -> None:
    assert "answers a text differently in a batch with longer texts" in _refusal(make_folder(family, **config))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Roberta", {**SIZES, "max_position_embeddings": 66, "pad_token_id": 1}),
        ("ModernBert", {**SIZES, "local_attention": 16, "pad_token_id": 0, "max_position_embeddings": 64}),
        ("GPT2", {**GPT2_SIZES, "pad_token_id": 0}),
    ],
)
def test_a_model_that_masks_its_padding_is_served(
    make_folder: MakeFolder, family: str, config: dict[str, Any], texts: list[str]
) -> None:
    model = ModelLoader(make_folder(family, **config))
    for text, together in zip(texts, model.predict_batch(texts), strict=True):
        assert together["probabilities"] == pytest.approx(model.predict(text)["probabilities"], abs=1e-4)


def test_roberta_reads_no_more_tokens_than_it_has_positions_for(make_folder: MakeFolder) -> None:
    # Positions are counted from the padding id plus one.
    folder = make_folder("Roberta", max_length=10**30, max_position_embeddings=66, pad_token_id=1, **SIZES)
    model = ModelLoader(folder)
    assert model.max_length == 64
    model.predict("stocks " * 500)


class _Graph:
    """An engine that fails on some shapes of batches, as a graph does that was traced for others."""

    num_slots, pads, name = 1, True, "traced"

    def __init__(self, engine: Any, takes: Callable[[TokenBatch], bool]) -> None:
        self._engine, self._takes = engine, takes

    def logits(self, batch: TokenBatch, threads: int = 1) -> np.ndarray:
        if not self._takes(batch):
            raise IndexError("index out of range")
        return self._engine.logits(batch, threads)


@pytest.mark.parametrize(
    ("takes", "fails_on"),
    [
        (lambda batch: batch.lengths.max() <= 20, "a text of 24 tokens"),
        (lambda batch: len(batch.lengths) > 1, "a text of 3 tokens"),
        (lambda batch: len(batch.lengths) == 1, "texts of 3, 24 and 24 tokens"),
    ],
)
def test_an_engine_that_fails_on_a_shape_of_batch_is_refused_at_load(
    model_folder: Path, takes: Callable[[TokenBatch], bool], fails_on: str
) -> None:
    model, saved = ModelLoader(model_folder), read_saved_model(model_folder)
    with pytest.raises(ModelLoadError, match=f"the traced engine fails on {fails_on} .index out of range"):
        check_engine(model_folder, _Graph(model.engine, takes), model.tokenizer, saved, tolerance=1e-3)


def test_a_model_without_any_length_limit_is_refused(make_folder: MakeFolder) -> None:
    assert "model_max_length 1e+30: no limit" in _refusal(make_folder("XLNet", max_length=10**30, **XLNET_SIZES))


def test_a_problem_type_that_nobody_knows_is_refused(make_folder: MakeFolder) -> None:
    folder = make_folder("Bert", **SIZES)
    _edit_config(folder, problem_type="sequence_ranking")
    assert "problem_type 'sequence_ranking'" in _refusal(folder)


@pytest.mark.parametrize(
    ("thresholds", "what"),
    [
        ([0.5], "must be a list of 4 numbers, one per label"),
        ([0.5, 0.5, 0.5, 2], "has 2: must be probabilities, 0 to 1"),
    ],
)
def test_thresholds_that_do_not_fit_the_labels_are_refused(
    make_folder: MakeFolder, thresholds: list[float], what: str
) -> None:
    config = {"problem_type": "multi_label_classification", "label_thresholds": thresholds}
    assert what in _refusal(make_folder("Bert", **config, **SIZES))


def test_a_model_with_one_label_is_refused(make_folder: MakeFolder) -> None:
    line = _refusal(make_folder("Bert", labels=["score"], **SIZES))
    assert "one label" in line
    assert "set problem_type to regression" in line


@pytest.mark.parametrize("unit", [1e-6, 1, 1e6])
def test_a_regression_model_is_tested_in_its_own_unit(make_folder: MakeFolder, unit: float) -> None:
    settings = {"labels": ["price"], "problem_type": "regression"}
    folder = make_folder("Bert", **settings, **SIZES)
    rescale(folder, unit, 3 * unit)
    assert ModelLoader(folder).predict("Goal!")["value"] == pytest.approx(3 * unit, abs=3 * unit)
    folder = make_folder("XLNet", **settings, **XLNET_SIZES)
    weights = load_file(folder / "model.safetensors")
    for name in ("logits_proj.weight", "logits_proj.bias"):
        weights[name] *= unit
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    line = _refusal(folder)
    assert "answers a text differently in a batch with longer texts, by " in line
    assert " standard deviations, more than the 0.001 allowed" in line


def test_two_classes_with_the_same_name_are_refused(make_folder: MakeFolder) -> None:
    folder = make_folder("Bert", **SIZES)
    _edit_config(folder, id2label={"0": "A", "1": "A", "2": "B", "3": "C"})
    assert "two classes are named 'A'" in _refusal(folder)


@pytest.mark.parametrize("num_labels", [2, 3])
def test_labels_that_transformers_leaves_out_get_its_default_names(
    make_folder: MakeFolder, num_labels: int, texts: list[str]
) -> None:
    names = [f"LABEL_{i}" for i in range(num_labels)]
    folder = make_folder("Bert", labels=names, **SIZES)
    _edit_config(folder, id2label=..., label2id=..., **({} if num_labels == 2 else {"num_labels": num_labels}))
    model = ModelLoader(folder)
    assert model.labels == names
    expected = pipeline("text-classification", model=str(folder), top_k=None)(texts, truncation=True)
    for text, scores in zip(texts, expected, strict=True):
        assert model.predict(text)["probabilities"] == pytest.approx({s["label"]: s["score"] for s in scores}, abs=1e-5)


def test_a_decoder_without_a_padding_id_answers_a_batch_as_it_answers_each_text(
    make_folder: MakeFolder, texts: list[str]
) -> None:
    folder = make_folder("GPT2", **GPT2_SIZES)
    model = ModelLoader(folder)
    reference = transformers.GPT2ForSequenceClassification.from_pretrained(folder).eval()
    token_ids = [encoded.ids for encoded in model.tokenizer.encode(texts)]
    # A text that ends in what padding could be taken for, whichever id that is.
    token_ids += [[2, 7, 9, last] for last in range(5)]
    found = model.engine.logits(TokenBatch.of(token_ids))
    with torch.inference_mode():
        expected = [reference(input_ids=torch.tensor([ids])).logits[0].numpy() for ids in token_ids]
    np.testing.assert_allclose(found, expected, atol=1e-4)
