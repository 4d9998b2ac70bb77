"""The native kernels: logits for any lengths, number of threads and neighbours in the batch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedModel,
)

from inference.engines.base import TokenBatch
from inference.engines.native import is_supported
from inference.engines.native.engine import NativeEngine
from inference.engines.native.quantize import FILE_NAME, write_native

SUPPORTED, WHY_NOT = is_supported()
pytestmark = pytest.mark.skipif(not SUPPORTED, reason=WHY_NOT)

VOCABULARY, POSITIONS = 300, 160
# Around the sizes of a register (16), a tile (6) and a block of rows (48).
LENGTHS = [1, 2, 15, 16, 17, 5, 31, 33, 47, 48, 49, 63, 64, 65, 3, 97, 128, 160]

MakeEngine = Callable[..., tuple[NativeEngine, PreTrainedModel]]


def _distilbert(**changes: object) -> PreTrainedModel:
    sizes = {"dim": 96, "hidden_dim": 208, "n_heads": 3, "n_layers": 3, "vocab_size": VOCABULARY, "num_labels": 5}
    return DistilBertForSequenceClassification(
        DistilBertConfig(max_position_embeddings=POSITIONS, initializer_range=0.15, **sizes | changes)
    )


def _bert() -> PreTrainedModel:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.15,
        num_labels=4,
    )
    return BertForSequenceClassification(config)


@pytest.fixture
def make_engine(tmp_path: Path) -> MakeEngine:
    def make(model: PreTrainedModel, threads: int = 2) -> tuple[NativeEngine, PreTrainedModel]:
        model.eval().save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        write_native(config, load_file(tmp_path / "model.safetensors"), tmp_path)
        return NativeEngine(tmp_path, config, threads), model

    torch.manual_seed(0)
    return make


def _random_texts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


@torch.inference_mode()
def _reference(model: PreTrainedModel, texts: list[list[int]]) -> np.ndarray:
    return np.concatenate([model(input_ids=torch.tensor([ids])).logits.numpy() for ids in texts])


@pytest.mark.parametrize(
    "model",
    [_distilbert, lambda: _distilbert(activation="relu"), lambda: _distilbert(n_layers=1), _bert],
    ids=["distilbert", "distilbert with relu", "one block", "bert"],
)
def test_logits_follow_transformers_for_every_length(make_engine: MakeEngine, model: Callable) -> None:
    engine, reference = make_engine(model())
    texts = _random_texts(LENGTHS)
    expected = _reference(reference, texts)
    found = engine.logits(TokenBatch.of(texts))
    # Int8 keeps about two digits; far apart answers would show a wrong kernel, not rounding.
    spread = expected.std()
    assert np.abs(found - expected).max() < 0.15 * spread
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.998


def test_answers_are_bit_equal_alone_in_a_batch_and_on_any_number_of_threads(
    make_engine: MakeEngine,
) -> None:
    engine, _ = make_engine(_distilbert(), threads=3)
    texts = _random_texts(LENGTHS)
    together = engine.logits(TokenBatch.of(texts))
    for threads in (1, 2, 3):
        np.testing.assert_array_equal(engine.logits(TokenBatch.of(texts), threads), together)
        for text, row in zip(texts, together, strict=True):
            np.testing.assert_array_equal(engine.logits(TokenBatch.of([text]), threads), [row])


def test_concurrent_passes_do_not_affect_each_other(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(_distilbert())
    batches = [TokenBatch.of(_random_texts(LENGTHS[: 3 + i % 7], seed=i)) for i in range(40)]
    alone = [engine.logits(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda batch: engine.logits(batch, 1 + len(batch.lengths) % 2), batches))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("ids", "lengths", "what"),
    [
        ([1, VOCABULARY], [2], "token ids must be 0 to 299"),
        ([1, -1], [2], "token ids must be 0 to 299"),
        ([1, 2], [3], "lengths that sum to its tokens"),
        ([1, 2], [2, 0], "a token in each text"),
        ([], [], "at least one text"),
        ([1] * (POSITIONS + 1), [POSITIONS + 1], "161 tokens > maximum 160"),
    ],
)
def test_input_that_would_read_outside_of_a_table_is_refused(
    make_engine: MakeEngine, ids: list[int], lengths: list[int], what: str
) -> None:
    engine, _ = make_engine(_distilbert())
    with pytest.raises(ValueError, match=what):
        engine.logits(TokenBatch(np.array(ids, dtype=np.int32), np.array(lengths, dtype=np.int32)))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "roberta"}, "model_type 'roberta'"),
        ({"activation": "silu"}, "activation 'silu'"),
        ({"n_heads": 4}, "head size 24"),
        ({"n_heads": 18, "dim": 304}, "dim 304: must be a multiple of its 18 heads"),
        ({"n_layers": 0}, "n_layers 0"),
        ({"hidden_dim": 66_320}, "hidden_dim 66320"),
        ({"is_decoder": True}, "is_decoder"),
    ],
)
def test_a_model_that_the_kernels_do_not_compute_is_refused_before_anything_is_written(
    make_engine: MakeEngine, tmp_path: Path, changes: dict[str, object], what: str
) -> None:
    config = {"model_type": "distilbert", **_distilbert().config.to_dict(), **changes}
    with pytest.raises(ValueError, match=what):
        write_native(config, {}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_of_another_shape_are_refused_by_name(make_engine: MakeEngine, tmp_path: Path) -> None:
    make_engine(_distilbert())
    tensors = load_file(tmp_path / FILE_NAME)
    save_file(tensors | {"block.1.wide.bias": np.zeros(7, np.float32)}, tmp_path / FILE_NAME)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match=r"block\.1\.wide\.bias must be float32 \(208,\), found float32 \(7,\)"):
        NativeEngine(tmp_path, config, 1)


def _num_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _data_bytes() -> int:
    """Memory that this process has asked for, used or not."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmData:")[2].split()[0])


@pytest.mark.parametrize("processors", [1, 2, 8, 64, 96, 128, 256])
def test_there_are_as_many_threads_as_processors(make_engine: MakeEngine, processors: int) -> None:
    engine, _ = make_engine(_distilbert(n_layers=1), threads=processors)
    batch = TokenBatch.of(_random_texts([50, 160, 3, 97]))
    alone = engine.logits(batch)
    np.testing.assert_array_equal(engine.logits(batch, processors), alone)
    with_engine = _num_threads()
    del engine
    assert with_engine - _num_threads() == processors - 1


def test_buffers_grow_linearly_with_the_processors(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(_distilbert(n_layers=1), threads=64)
    batch = TokenBatch.of(_random_texts([POSITIONS] * 2))
    before = _data_bytes()
    for _ in range(64):  # every session in turn
        engine.logits(batch, 64)
    assert _data_bytes() - before < 64 * 2**20  # a thread's buffers take 0.15 MiB


def test_concurrent_passes_may_ask_for_more_threads_than_exist(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(_distilbert(), threads=3)
    batches = [TokenBatch.of(_random_texts(LENGTHS[i % 9 :], seed=i)) for i in range(24)]
    alone = [engine.logits(batch) for batch in batches]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda batch: engine.logits(batch, 3), batches))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_forked_child_starts_its_own_threads(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(_distilbert(), threads=2)
    batch = TokenBatch.of(_random_texts(LENGTHS))
    expected = engine.logits(batch, 2)
    child = os.fork()
    if child == 0:  # whatever happens here, pytest must not go on in this process
        try:
            is_equal = np.array_equal(engine.logits(batch, 2), expected)
            has_helper = _num_threads() == 2
            del engine
            os._exit(0 if is_equal and has_helper and _num_threads() == 1 else 1)
        finally:
            os._exit(2)
    assert _exit_code(child, seconds=20) == 0
    np.testing.assert_array_equal(engine.logits(batch, 2), expected)


def _exit_code(child: int, seconds: float) -> int | None:
    """Wait for a child; one that does not end in time is killed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("distilbert.transformer.layer.1.ffn.lin1.weight", r"distilbert\.transformer\.layer\.1\.ffn\.lin1\.weight"),
        ("distilbert.embeddings.word_embeddings.weight", r"distilbert\.embeddings\.word_embeddings\.weight"),
        ("classifier.bias", r"classifier\.bias"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(
    make_engine: MakeEngine, name: str, what: str, value: float
) -> None:
    model = _distilbert()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    with pytest.raises(ValueError, match=f"{what} holds NaN or infinity"):
        make_engine(model)


def test_embeddings_too_large_for_float16_are_refused(make_engine: MakeEngine) -> None:
    model = _distilbert()
    with torch.no_grad():
        model.distilbert.embeddings.word_embeddings.weight[7, 3] = 70_000
    with pytest.raises(ValueError, match=r"word_embeddings\.weight reaches 70000.* 65504"):
        make_engine(model)


def _places(value: float) -> list[str]:
    linears = ("query", "key_value", "attention_out", "narrow")
    inside = [f"block.{i}.{name}.{part}" for i in range(2) for name in linears for part in ("bias", "scale")]
    places = [*inside, "words", "positions", "embedding_norm.gain", "classifier.weight"]
    # ReLU rightly makes 0 of minus infinity, and tanh makes 1 of infinity.
    return places if np.isinf(value) else [*places, "block.0.wide.bias", "block.1.wide.scale", "pooler.bias"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "make", [_distilbert, lambda: _distilbert(activation="relu"), _bert], ids=["gelu", "relu", "tanh"]
)
def test_a_non_finite_number_anywhere_in_a_pass_shows_in_the_answer(
    make_engine: MakeEngine, tmp_path: Path, make: Callable, value: float
) -> None:
    make_engine(make())
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / FILE_NAME)
    ids = [4, 9, 11, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46]
    for name in _places(value):
        damaged = tensors[name].copy()
        # Of the embeddings one value of one word in the middle of the text, else one output or feature.
        damaged[(11, 3) if name == "words" else (2, 3) if name == "positions" else (0,) * damaged.ndim] = value
        save_file(tensors | {name: damaged}, tmp_path / FILE_NAME)
        logits = NativeEngine(tmp_path, config, 1).logits(TokenBatch.of([ids, [4, 9]]))
        assert not np.isfinite(logits[0]).all(), name
        if name == "words":  # a text without that word is answered as before
            assert np.isfinite(logits[1]).all()
