"""Without the compiled kernels NumPy computes the int8 artefact, and a line says that it is slow."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.hardware import Hardware
from inference.engines import native
from inference.engines.base import TokenBatch, answers_of
from inference.engines.native.architecture import EncoderShape
from inference.engines.native.engine import NativeEngine
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


DISTILBERT, MODERNBERT, ROBERTA = "distilbert", "modernbert", "roberta"


@pytest.mark.parametrize("engine", ["native", "numpy"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((DISTILBERT, {key: size}) for key in ("dim", "hidden_dim", "n_heads", "n_layers") for size in (0, -3, 96.0)),
        *((DISTILBERT, {"n_heads": size}) for size in (True, None, "3", [3], 10**12)),
        *((DISTILBERT, {"n_layers": size}) for size in (10**9, 2**32 + 3)),
        *((DISTILBERT, {key: size}) for key in ("vocab_size", "max_position_embeddings") for size in (0, -1, 2**32)),
        (DISTILBERT, {"vocab_size": 299}),
        (DISTILBERT, {"max_position_embeddings": 161}),
        (DISTILBERT, {"n_layers": 4}),
        (DISTILBERT, {"id2label": {}}),
        (DISTILBERT, {"id2label": 5}),
        (DISTILBERT, {"activation": ["gelu"]}),
        ("electra with narrow embeddings", {"embedding_size": 0}),
        ("electra with narrow embeddings", {"embedding_size": -48}),
        *((ROBERTA, {"pad_token_id": padding}) for padding in (-1, None, "1", 0.0, 2**32 + 1)),
        *((ROBERTA, {"layer_norm_eps": epsilon}) for epsilon in (0, -1e-5, None, "small", float("nan"))),
        *((MODERNBERT, {"layer_types": kinds}) for kinds in (["full_attention"], "full", 5, [[]] * 5, ["none"] * 5)),
        *((MODERNBERT, {"rope_parameters": value}) for value in (5, [1], "x", {"full_attention": 5})),
        *((MODERNBERT, {"rope_parameters": {"full_attention": {"rope_theta": theta}}}) for theta in ("x", -1.0, [1])),
        *((MODERNBERT, {"local_attention": size}) for size in (-2, 1, "128", None, 32.0, 2**33)),
        *((MODERNBERT, {"layer_types": None, "global_attn_every_n_layers": every}) for every in (0, -1, "3", 1.5)),
    ],
    ids=str,
)
def test_a_size_that_is_wrong_is_refused_before_the_tensors_are_read_by_it(
    artefacts: dict[str, tuple[Path, dict[str, Any]]], engine: str, family: str, changes: dict[str, Any]
) -> None:
    if engine == "native" and library_path() is None:
        pytest.skip(native.is_supported()[1])
    folder, config = artefacts[family]
    with pytest.raises(ValueError, match=r"^[^\n]*$"):
        NativeEngine(folder, config | changes, 1) if engine == "native" else NumpyEngine(folder, config | changes)


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    found = {}
    for family in (DISTILBERT, MODERNBERT, ROBERTA, "electra with narrow embeddings"):
        folder = tmp_path_factory.mktemp("artefact")
        model = MODELS[family]()
        config = model.config.to_dict()
        write_native(config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}, folder)
        NumpyEngine(folder, config)
        found[family] = folder, config
    return found


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
