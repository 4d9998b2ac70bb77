"""Without the compiled kernels NumPy computes the int8 artefact, and a line says that it is slow."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from common.hardware import Hardware
from inference.engines import native
from inference.engines.base import TokenBatch, answers_of
from inference.engines.native.architecture import EncoderShape
from inference.engines.native.library import library_path
from inference.engines.native.numpy_engine import NumpyEngine
from inference.engines.native.quantize import write_native
from inference.engines.selection import is_native_without_comparison, load_model
from tests.inference.engines.native_models import MODELS, random_texts, randomise, reference_logits
from tests.processes import REPOSITORY

NEWS = REPOSITORY / "checkpoints" / "news"


# Of all blocks these have the most different ones.
FAST = ("roberta", "electra with narrow embeddings", "mpnet", "modernbert with means and biases")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS]
)
def test_logits_follow_transformers_for_every_length(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomise(MODELS[family]()).eval()
    config = model.config.to_dict()
    write_native(config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}, tmp_path)
    engine = NumpyEngine(tmp_path, config)
    texts = random_texts([1, 2, 16, 17, 49, 160])
    texts[3][3] = texts[4][0] = 1  # the padding id of the families that count positions from behind it

    found = engine.logits(TokenBatch.of(texts))
    with torch.no_grad():
        expected = reference_logits(model, texts)

    assert EncoderShape.of(config).num_labels == found.shape[1]
    assert found.dtype == np.float32
    assert np.sqrt(((found - expected) ** 2).mean()) < 0.15 * expected.std()
    assert np.abs(found - expected).max() < 0.45 * expected.std()
    alone = np.concatenate([engine.logits(TokenBatch.of([text])) for text in texts])
    assert np.abs(found - alone).max() < 0.05 * expected.std()


def test_the_news_model_answers_without_a_compiler_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with (REPOSITORY / "common" / "sample_news" / "test.csv").open(newline="", encoding="utf-8") as file:
        texts = [row[-1] for row in csv.reader(file)][:24]
    with_kernels = load_model(NEWS) if library_path() else None
    monkeypatch.setattr(native, "library_path", lambda: None)
    loaded = load_model(NEWS)

    assert loaded.engine.name == "native int8 in numpy"
    assert "NumPy computes it, slowly: the int8 kernels are not compiled" in loaded.reason
    assert not is_native_without_comparison(NEWS, "auto", Hardware())  # a fork could not use it
    if with_kernels:
        ids = [encoded.ids for encoded in loaded.tokenizer.encode(texts)]
        expected = answers_of(with_kernels.engine, loaded.saved.problem_type, ids)
        found = answers_of(loaded.engine, loaded.saved.problem_type, ids)
        assert np.abs(found - expected).max() < 0.02
        is_clear = np.diff(np.sort(expected, axis=1)[:, -2:], axis=1)[:, 0] > 0.04
        assert is_clear.sum() > 15
        np.testing.assert_array_equal(found.argmax(axis=1)[is_clear], expected.argmax(axis=1)[is_clear])
