"""The promise of the int8 kernels: a text's logits are the same bits alone, in any batch and on any processor."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inference.engines import native
from inference.engines.base import TokenBatch
from inference.engines.native.architecture import EncoderShape
from inference.engines.native.engine import NativeEngine
from inference.engines.native.library import instruction_sets, library_path
from inference.engines.native.quantize import write_native
from tests.inference.engines.native_models import (
    LENGTHS,
    MODELS,
    VOCABULARY,
    bert,
    distilbert,
    exact_weights,
    hashed,
    modernbert,
)

pytestmark = pytest.mark.skipif(library_path() is None, reason=native.is_supported()[1])
NUM_TEXTS, SPECIAL_ID = 65, 1
MOST_THREADS = 5

# All families, the least of everything, and widths that the tiles of no instruction set divide evenly.
SHAPES: dict[str, Callable[[], PreTrainedModel]] = MODELS | {
    "1 head of 16, 1 label": lambda: distilbert(dim=16, hidden_dim=16, n_heads=1, num_labels=1),
    "5 heads of 16, 2 labels": lambda: distilbert(dim=80, hidden_dim=144, n_heads=5, num_labels=2),
    "1 head of 112, 150 labels": lambda: distilbert(dim=112, hidden_dim=48, n_heads=1, num_labels=150),
    "12 heads of 32, as in MiniLM": lambda: distilbert(dim=384, hidden_dim=1536, n_heads=12, n_layers=2),
    "1 position": lambda: distilbert(max_position_embeddings=1),
    "512 positions": lambda: distilbert(max_position_embeddings=512, dim=128, n_heads=2),
    "bert for pairs of texts": lambda: bert(text_pair_separator=SPECIAL_ID),
    "modernbert with narrow windows": lambda: modernbert(local_attention=6, hidden_size=64, num_attention_heads=1),
}
# CRC-32 of the logits of all texts, as an AMD EPYC of 2021 computed them (AVX2 and plain C). They change with the
# kernels' arithmetic, the quantisation, or what transformers gives an architecture by default: then record what the
# failing test shows, in the commit that makes the change. Otherwise the processor or the compiler breaks the promise.
RECORDED = {
    "distilbert": "9a8a96dd",
    "distilbert with relu": "821823b8",
    "one block": "19565a8d",
    "bert": "5d732372",
    "roberta": "d56d9081",
    "xlm-roberta": "d56d9081",
    "camembert": "d56d9081",
    "electra": "2300c3ab",
    "electra with narrow embeddings": "0f11c55e",
    "mpnet": "3c1b4832",
    "modernbert": "800f8ae9",
    "modernbert with means and biases": "9fe167e6",
    "1 head of 16, 1 label": "a3701a3d",
    "5 heads of 16, 2 labels": "b0c37bdd",
    "1 head of 112, 150 labels": "de1b9117",
    "12 heads of 32, as in MiniLM": "841b5190",
    "1 position": "b31ea32d",
    "512 positions": "cf0aa546",
    "bert for pairs of texts": "e793eb5a",
    "modernbert with narrow windows": "0305ec5f",
}

ORDERS = {
    "as given": np.arange(NUM_TEXTS),
    "reversed": np.arange(NUM_TEXTS)[::-1],
    "shuffled": np.argsort(hashed("order", NUM_TEXTS)),
}
# Threads, texts per pass, and their order. Any two values of different columns meet in some round.
ROUNDS = [
    (threads, size, list(ORDERS)[(i + j) % len(ORDERS)])
    for i, threads in enumerate((1, 2, 3, MOST_THREADS))
    for j, size in enumerate((1, 3, 8, NUM_TEXTS))
]


class Case(NamedTuple):
    name: str  # of its shape
    folder: Path
    config: dict[str, Any]
    texts: list[list[int]]
    expected: np.ndarray  # (texts, labels), of each text alone, on one thread of plain C


def _texts(longest: int) -> list[list[int]]:
    """Long and short ones mixed, of 1 token up to the model's maximum."""
    lengths = [*LENGTHS, longest - 1, longest]
    lengths += [1 + i % 12 for i in range(NUM_TEXTS - len(lengths))]
    lengths = np.clip(lengths, 1, longest)[ORDERS["shuffled"]]
    texts = [(hashed(f"text {i}", length) % (VOCABULARY - 3) + 3).tolist() for i, length in enumerate(lengths)]
    for text in texts[::2]:
        text[len(text) // 2] = SPECIAL_ID  # a padding id, or what separates a pair
    return texts


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    with torch.device("meta"):  # its shapes without any memory
        model = SHAPES[request.param]()
    config, folder = model.config.to_dict(), tmp_path_factory.mktemp("model")
    write_native(config, exact_weights(model), folder)
    plain = NativeEngine(folder, config, 1, "plain")
    texts = _texts(EncoderShape.of(config).num_positions)
    expected = np.concatenate([plain.logits(TokenBatch.of([text])) for text in texts])
    return Case(request.param, folder, config, texts, expected)


@pytest.mark.parametrize("instructions", instruction_sets() if library_path() else ())
def test_a_text_has_the_same_bits_alone_in_any_batch_in_any_order_and_on_any_instruction_set(
    case: Case, instructions: str
) -> None:
    engine = NativeEngine(case.folder, case.config, MOST_THREADS, instructions)
    # Plain C is slow, and the code that divides texts among threads and tiles is the same for all.
    for threads, size, order in ROUNDS[-1:] if instructions == "plain" else ROUNDS:
        found = np.empty_like(case.expected)
        for start in range(0, NUM_TEXTS, size):
            chosen = ORDERS[order][start : start + size]
            batch = TokenBatch.of([case.texts[i] for i in chosen])
            found[chosen] = engine.logits(batch, threads)
        what = f"{threads} threads, {size} texts per pass, {order}"
        np.testing.assert_array_equal(found.view(np.uint32), case.expected.view(np.uint32), what)


def test_the_bits_are_those_of_the_processor_that_recorded_them(case: Case) -> None:
    assert f"{zlib.crc32(case.expected.tobytes()):08x}" == RECORDED.get(case.name)
