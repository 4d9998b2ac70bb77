"""Models that differ only behind the encoder run on one encoder, with the bits that each has alone."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from common.errors import ModelLoadError
from common.model_folder import read_manifest, write_manifest
from inference.engines import native
from inference.engines.base import Engine, TokenBatch
from inference.engines.model_loader import ModelLoader, load_shared
from inference.engines.native.engine import NativeEngine
from inference.engines.native.library import instruction_sets, library_path
from inference.engines.native.numpy_engine import NumpyEngine
from inference.engines.native.quantize import FILE_NAME, write_native
from inference.engines.native.shared import SharedEncoder, encoder_key
from tests.inference.cascades import make_artefact, make_artefact_with_head, make_cascade
from tests.inference.conftest import TEXTS, TINY, folder_maker
from tests.inference.engines.native_models import distilbert, exact_weights, hashed, random_texts
from tests.inference.test_windows import LONG, give_windows

needs_kernels = pytest.mark.skipif(library_path() is None, reason=native.is_supported()[1])
INSTRUCTIONS = [*(instruction_sets() if library_path() else ()), "numpy"]
NUM_MODELS = 50
BATCHES = [TokenBatch.of(random_texts(lengths)) for lengths in ([17, 2, 9], [1], [5] * 9)]

OpenEngine = Callable[[int], NativeEngine]


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, dict[str, Any]]]:
    """Folders of models with one encoder and heads of 1 to 7 labels, and what their config.json says.

    In turn, they have the same pooler, one like `--method head` writes, and a matrix of their own.
    """
    place = tmp_path_factory.mktemp("heads")
    with torch.device("meta"):  # its shapes without any memory
        model = distilbert()
    write_native(model.config.to_dict(), exact_weights(model), place)
    arrays, found = load_arrays(place / FILE_NAME), []
    pooler = arrays["pooler.weight"]
    for i in range(NUM_MODELS):
        labels = 1 + i % 7
        weight = hashed(f"head {i}", labels * 96).reshape(labels, 96) % 91 - 45
        arrays["classifier.weight"] = (weight / 256).astype(np.float32)
        arrays["classifier.bias"] = (hashed(f"bias {i}", labels) % 91 / 64).astype(np.float32)
        arrays["pooler.weight"] = (
            pooler,
            np.diag(np.full(96, 1 + i / 64, np.float32)),
            np.roll(pooler, i),
        )[i % 3]
        arrays["pooler.bias"] = np.full(96, (0, i / 8, 0)[i % 3], np.float32)
        folder = place / str(i)
        folder.mkdir()
        save_arrays(arrays, folder / FILE_NAME)
        found.append((folder, model.config.to_dict() | {"id2label": {str(label): "" for label in range(labels)}}))
    return found


@pytest.fixture(params=INSTRUCTIONS)
def open_engine(request: pytest.FixtureRequest, artefacts: list[tuple[Path, dict[str, Any]]]) -> OpenEngine:
    return _opener(artefacts, request.param)


def _opener(artefacts: list[tuple[Path, dict[str, Any]]], instructions: str) -> OpenEngine:
    def open_engine(i: int) -> NativeEngine:
        if instructions == "numpy":
            return NumpyEngine(*artefacts[i])
        return NativeEngine(*artefacts[i], 2, instructions)

    return open_engine


def _shared(engines: Sequence[Engine]) -> tuple[SharedEncoder, list[Engine]]:
    encoder = SharedEncoder(engines[0], encoder_key(engines[0]))
    return encoder, [encoder.add(engine) for engine in engines]


def _same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()


def test_fifty_heads_on_one_encoder_have_the_bits_of_each_model_alone(open_engine: OpenEngine) -> None:
    alone = [open_engine(i) for i in range(NUM_MODELS)]
    encoder, heads = _shared(alone)
    is_slow = alone[0].instructions in ("plain", "numpy")

    for threads, batch in enumerate(BATCHES[:1] if is_slow else BATCHES, start=1):
        expected = [engine.logits(batch) for engine in alone]
        assert len({one.tobytes() for one in expected}) == NUM_MODELS
        together = encoder.read_all(batch, threads)
        assert together.keys() == set(heads)
        for head, one in zip(heads, expected, strict=True):
            assert _same_bits(together[head][0], one)
        for head, one in list(zip(heads, expected, strict=True))[:: 9 if is_slow else 1]:
            assert _same_bits(head.logits(batch, threads), one)


def test_a_head_that_is_removed_leaves_the_passes_that_begin_and_answers_those_that_have_begun(
    open_engine: OpenEngine,
) -> None:
    encoder, heads = _shared([open_engine(i) for i in range(3)])
    expected = heads[0].logits(BATCHES[0])  # of the model whose encoder is used

    encoder.remove(heads[0])

    assert encoder.read_all(BATCHES[0]).keys() == set(heads[1:])
    assert _same_bits(heads[0].logits(BATCHES[0]), expected)
    for head in heads[1:]:
        encoder.remove(head)
    assert encoder.read_all(BATCHES[0]) == {}
    again = encoder.add(open_engine(0))
    assert _same_bits(encoder.read_all(BATCHES[0])[again][0], expected)


@needs_kernels
def test_heads_come_and_go_while_threads_run_passes_and_no_score_is_wrong(
    artefacts: list[tuple[Path, dict[str, Any]]],
) -> None:
    # The number of labels tells the heads apart.
    engines = [_opener(artefacts, "auto")(i) for i in range(7)]
    expected = [engine.logits(BATCHES[0]) for engine in engines]
    encoder, (stays, *_) = _shared(engines[:1])
    is_over = False

    def run_passes() -> int:
        num_heads = 0
        while not is_over:
            assert _same_bits(stays.logits(BATCHES[0]), expected[0])
            found = encoder.read_all(BATCHES[0])
            assert stays in found
            for head, (scores, _) in found.items():
                assert _same_bits(scores, expected[scores.shape[1] - 1])
                assert _same_bits(head.logits(BATCHES[0]), scores)  # even if it has gone since
            num_heads += len(found)
        return num_heads

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(run_passes) for _ in range(2)]
        try:
            for _ in range(20):
                come = [encoder.add(engine) for engine in engines[1:]]
                for head in come:
                    encoder.remove(head)
        finally:
            is_over = True
    assert all(one.result() > 0 for one in running)


def _array_bytes() -> int:
    is_array = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    traces = tracemalloc.take_snapshot().filter_traces([is_array]).traces
    return sum(trace.size for trace in traces)


@needs_kernels
def test_a_head_keeps_its_own_rows_in_memory_and_nothing_else_of_its_file(
    artefacts: list[tuple[Path, dict[str, Any]]],
) -> None:
    open_engine = _opener(artefacts, "auto")
    tracemalloc.start()
    try:
        encoder, kept = _shared([open_engine(0)])
        one = _array_bytes()
        kept += [encoder.add(open_engine(i)) for i in range(1, NUM_MODELS)]
        fifty = _array_bytes()
    finally:
        tracemalloc.stop()
    own = {array.ctypes.data: array.nbytes for head in kept[1:] for array in head.heads[0].values()}
    assert one > (artefacts[0][0] / FILE_NAME).stat().st_size // 2
    # Each array begins on a cache line.
    assert 0 < fifty - one < sum(own.values()) + 128 * len(own)
    matrices = [head.heads[0]["pooler.weight"].nbytes for head in kept if head.heads[0]["pooler.weight"].ndim == 2]
    assert sum(own.values()) < sum(matrices)  # a pooler that several heads have is there once


@needs_kernels
def test_a_pooler_that_is_a_diagonal_gives_the_bits_of_the_whole_matrix(
    artefacts: list[tuple[Path, dict[str, Any]]],
) -> None:
    engine = _opener(artefacts, "auto")(4)
    (head,) = engine.heads
    assert head["pooler.weight"].shape == (96,)
    whole = engine.with_heads([head | {"pooler.weight": np.diag(head["pooler.weight"])}])
    for batch in BATCHES:
        assert _same_bits(engine.logits(batch), whole.logits(batch))


# ---------------------------------------------------------------- model folders


def _edit(artefact: Path, change: Callable[[Path], object]) -> Path:
    """Change the model that an artefact was made of, and make it again."""
    source = artefact.with_name(f"{artefact.name}_source")
    change(source)
    shutil.rmtree(artefact)
    return make_artefact(source, artefact)


@pytest.fixture
def twins(model_folder: Path, tmp_path: Path) -> list[Path]:
    return [make_artefact_with_head(model_folder, tmp_path / name, seed) for seed, name in enumerate(("one", "other"))]


KINDS: dict[str, dict[str, Any]] = {
    "news": {},
    "mood": {"id2label": {"0": "good", "1": "bad"}},
    "topics": {
        "id2label": {"0": "oil", "1": "chips", "2": "cups"},
        "problem_type": "multi_label_classification",
        "label_thresholds": [0.5, 0.2, 0.7],
    },
    "price": {"id2label": {"0": "price"}, "problem_type": "regression"},
}


@needs_kernels
def test_models_of_all_kinds_share_an_encoder_and_a_tokenizer_and_answer_as_each_alone(
    model_folder: Path, tmp_path: Path
) -> None:
    paths = [make_artefact_with_head(model_folder, tmp_path / kind, 3, **config) for kind, config in KINDS.items()]

    models = load_shared(paths)

    assert len({id(model.encoder) for model in models}) == len({id(model.tokenizer) for model in models}) == 1
    notes = [model.info["reason"].partition("; it shares ")[2] for model in models]
    assert notes == ["", *["the encoder of news_source"] * 3]
    for path, model in zip(paths, models, strict=True):
        assert model.predict_batch(TEXTS) == ModelLoader(path).predict_batch(TEXTS)


@needs_kernels
def test_models_that_read_windows_share_an_encoder_and_each_weighs_windows_by_its_own_attention(
    model_folder: Path, tmp_path: Path
) -> None:
    windowed = Path(shutil.copytree(model_folder, tmp_path / "windowed"))
    give_windows(windowed)
    paths = [make_artefact_with_head(windowed, tmp_path / kind, i, **KINDS[kind]) for i, kind in enumerate(KINDS)]

    models = load_shared(paths)

    assert len({id(model.encoder) for model in models}) == 1
    encoded = [one.ids for one in models[0].tokenizer.encode([LONG, *TEXTS])]
    batch = TokenBatch.of(encoded)
    together = models[0].encoder.read_all(batch)
    for path, model in zip(paths, models, strict=True):
        alone = ModelLoader(path)
        assert model.predict_batch([LONG, *TEXTS]) == alone.predict_batch([LONG, *TEXTS])
        expected = alone.engine.read(batch)
        assert all(map(_same_bits, together[model.engine], expected))
    # A model that cuts long texts has the same weights, but its texts become other ids.
    cutting = ModelLoader(make_artefact_with_head(model_folder, tmp_path / "cutting", 0))
    cutting.share_encoder(models)
    assert cutting.encoder is not models[0].encoder


def _change_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["distilbert.transformer.layer.1.ffn.lin1.bias"][3] += 2**-20
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _change_json(name: str, **changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _swap_two_words(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["oil"], words["goal"] = words["goal"], words["oil"]
    path.write_text(json.dumps(content))


OTHER_WEIGHTS: dict[str, Callable[[Path], object]] = {
    "a bit of one weight": _change_a_weight,
    "its activation": _change_json("config.json", activation="relu"),
}
OTHER_TEXTS: dict[str, Callable[[Path], object]] = {
    "its maximum length": _change_json("tokenizer_config.json", model_max_length=20),
    "its cleaning": _change_json("config.json", text_cleaning="none"),
    "its tokenizer": _swap_two_words,
}


@needs_kernels
@pytest.mark.parametrize("difference", OTHER_WEIGHTS | OTHER_TEXTS)
def test_a_model_whose_encoder_or_tokenizer_differs_has_passes_of_its_own(twins: list[Path], difference: str) -> None:
    _edit(twins[1], (OTHER_WEIGHTS | OTHER_TEXTS)[difference])

    one, other = load_shared(twins)

    assert one.encoder is not other.encoder
    assert one.tokenizer is not other.tokenizer
    has_same_weights = one.engine.words is other.engine.words
    assert has_same_weights is ("; it shares the encoder of" in other.info["reason"]) is (difference in OTHER_TEXTS)
    for path, model in zip(twins, (one, other), strict=True):
        assert model.predict_batch(TEXTS) == ModelLoader(path).predict_batch(TEXTS)


@needs_kernels
def test_every_model_is_checked_and_a_wrong_one_is_reported_with_its_path(twins: list[Path]) -> None:
    manifest = read_manifest(twins[1])
    wrong = [{**probe, "probabilities": probe["probabilities"][::-1]} for probe in manifest.probes]
    write_manifest(twins[1], replace(manifest, probes=wrong))
    with pytest.raises(ModelLoadError, match=f"^{twins[1]}.*its answers differ"):
        load_shared(twins)


@needs_kernels
def test_a_model_joins_others_later_and_leaves_them(twins: list[Path]) -> None:
    (first,) = load_shared(twins[:1])
    later = ModelLoader(twins[1])
    before = later.predict_batch(TEXTS)

    later.share_encoder([first])
    assert later.encoder is first.encoder
    assert later.predict_batch(TEXTS) == before
    first.leave_encoder()

    batch = TokenBatch.of([one.ids for one in later.tokenizer.encode(TEXTS)])
    assert list(later.encoder.read_all(batch)) == [later.engine]
    assert later.predict_batch(TEXTS) == before


@needs_kernels
def test_the_two_models_of_a_cascade_share_each_their_own_encoder(
    model_folder: Path, twins: list[Path], tmp_path: Path
) -> None:
    folder_maker(model_folder, tmp_path / "larger")("DistilBert", **TINY | {"hidden_dim": 128})
    larger = [make_artefact_with_head(tmp_path / "larger", tmp_path / f"larger_{i}", i) for i in range(2)]
    paths = [
        make_cascade(big, small, tmp_path / f"cascade_{big.name}") for big, small in zip(larger, twins, strict=True)
    ]

    models = load_shared(paths)

    encoders = [[stage.encoder for stage in model.stages] for model in models]
    assert encoders[0] == encoders[1]
    assert len(set(encoders[0])) == 2
    for path, model in zip(paths, models, strict=True):
        assert model.predict_batch(TEXTS) == ModelLoader(path).predict_batch(TEXTS)


def test_a_model_of_another_engine_keeps_its_own(model_folder: Path, texts: list[str]) -> None:
    models = load_shared([model_folder, model_folder], "torch")
    assert [model.encoder for model in models] == [None, None]
    assert models[0].engine is not models[1].engine
