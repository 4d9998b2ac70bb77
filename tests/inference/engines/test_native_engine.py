"""The native kernels: logits near those of transformers, threads, memory, and input that is refused."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedModel

from inference.engines import native
from inference.engines.base import TokenBatch, forward_passes
from inference.engines.native.engine import NativeEngine
from inference.engines.native.library import instruction_sets, library_path, load_library
from inference.engines.native.quantize import FILE_NAME, write_native
from inference.engines.native.shared import SharedEncoder, encoder_key
from tests.inference.engines import native_models
from tests.inference.engines.native_models import (
    LENGTHS,
    MODELS,
    POSITIONS,
    VOCABULARY,
    bert,
    distilbert,
    modernbert,
    random_texts,
    randomise,
    reference_logits,
)
from tests.processes import REPOSITORY

pytestmark = pytest.mark.skipif(library_path() is None, reason=native.is_supported()[1])
KERNELS = Path(native.__file__).parent
AG_NEWS = REPOSITORY / "data" / "ag_news" / "test.csv"
ARM_COMPILER, ARM_EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static")
# On emulated processors two families are quick; of all blocks these two have the most different ones.
EMULATED = [
    pytest.param(name, marks=() if name in ("distilbert", "modernbert with means and biases") else pytest.mark.slow)
    for name in MODELS
]

MakeEngine = Callable[..., tuple[NativeEngine, PreTrainedModel]]


@pytest.fixture
def make_engine(tmp_path: Path) -> MakeEngine:
    def make(
        model: PreTrainedModel, threads: int = 2, instructions: str = "auto"
    ) -> tuple[NativeEngine, PreTrainedModel]:
        return native_models.make_engine(model, tmp_path, threads, instructions)

    torch.manual_seed(0)
    return make


@pytest.mark.parametrize("family", MODELS)
def test_logits_follow_transformers_for_every_length(make_engine: MakeEngine, family: str) -> None:
    engine, reference = make_engine(randomise(MODELS[family]()))
    texts = random_texts(LENGTHS)
    texts[7][3] = texts[9][0] = 1  # the padding id of the families that count positions from behind it
    expected = reference_logits(reference, texts)
    difference = engine.logits(TokenBatch.of(texts)) - expected
    # Int8 keeps about two digits; far apart answers would show a wrong kernel, not rounding.
    assert np.sqrt((difference**2).mean()) < 0.15 * expected.std()
    assert np.abs(difference).max() < 0.45 * expected.std()


@pytest.mark.slow
@pytest.mark.skipif(not AG_NEWS.exists(), reason="the test rows of AG News are not in data/ag_news/test.csv")
def test_every_instruction_set_gives_the_same_bits_for_all_of_ag_news(make_engine: MakeEngine) -> None:
    with AG_NEWS.open(newline="") as file:
        rows = [" ".join(row[1:]) for row in csv.reader(file)]
    texts = [[zlib.crc32(word.encode()) % VOCABULARY for word in row.split()][:POSITIONS] for row in rows]
    assert len(texts) == 7600
    model = randomise(MODELS["bert"]())
    engines = [make_engine(model, 2, instructions)[0] for instructions in instruction_sets()]
    for passed in forward_passes([len(text) for text in texts], pads=False):
        batch = TokenBatch.of([texts[index] for index in passed])
        expected, *others = (engine.logits(batch) for engine in engines)
        for found in others:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.skipif("avx2" not in instruction_sets(), reason="only the kernel for AVX2 has centres")
def test_sums_of_16_products_have_the_bits_of_plain_c(make_engine: MakeEngine) -> None:
    model = randomise(bert())  # most outputs have centres, because their weights are normally distributed
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".encoder.layer." in name and parameter.ndim == 2:
                parameter[16:32] = parameter[16:32].sign()  # and these have none: all are as large as can be
    texts = random_texts([*LENGTHS, *range(1, 12)])
    fast, plain = (make_engine(model, 2, instructions)[0] for instructions in ("avx2", "plain"))
    for batch in (texts, texts[:1], texts[3:5]):
        found, expected = (engine.logits(TokenBatch.of(batch), 2) for engine in (fast, plain))
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_outputs_have_centres_only_if_16_products_fit_into_int16() -> None:
    weight = np.zeros((2, 8, 16, 4), np.int8)  # (outputs / 16, inputs / 4, 16, 4)
    weight[:, ::2, 3, :2] = -45  # 8 of the 16 weights of a sum: 182 x 360 is the range of an int16
    weight[1, 1, 3, 1] = 1
    centres = np.empty((2, 32), np.int16)
    load_library().fill_centres(weight.ctypes.data, 32, 32, centres.ctypes.data)
    assert centres[0].tolist() == [91 * 360 if i == 6 else 0 for i in range(32)]
    assert centres[1, 0] == np.iinfo(np.int16).min


@pytest.fixture(scope="module")
def arm_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels for ARM with a program that runs them, without optimisation, which must not change any bit."""
    if not ARM_COMPILER or not ARM_EMULATOR:
        pytest.skip("ARM is emulated with Debian's qemu-user-static and gcc-aarch64-linux-gnu, which are not installed")
    program = tmp_path_factory.mktemp("arm") / "forward_image"
    sources = [*sorted(KERNELS.glob("*.c")), Path(__file__).with_name("forward_image.c")]
    flags = ["-O1", "-std=gnu11", "-ffp-contract=off", "-static", f"-I{KERNELS}", "-o", program]
    subprocess.run([ARM_COMPILER, *flags, *sources, "-lpthread", "-lm"], check=True)
    return program


def _bits_on_arm(driver: Path, processor: str, image: Path, texts: list[list[int]]) -> dict[str, set[str]]:
    """The logits by instruction set, on one thread and on two."""
    batch = image.with_name("batch")
    native_models.write_batch(texts, batch)
    command = [ARM_EMULATOR, "-cpu", processor, driver, image, batch]
    found: dict[str, set[str]] = {}
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        name, _, logits = line.partition(" ")
        found.setdefault(name, set()).add(logits)
    return found


@pytest.mark.parametrize("family", EMULATED)
def test_arm_gives_the_bits_of_this_processor(
    make_engine: MakeEngine, arm_driver: Path, tmp_path: Path, family: str
) -> None:
    engine, _ = make_engine(randomise(MODELS[family]()))
    native_models.write_image(engine, tmp_path / "image")
    texts = random_texts([1, 19, 50, 6])
    texts[2][3] = 1  # a padding id
    expected = " ".join(f"{bits:08x}" for bits in engine.logits(TokenBatch.of(texts)).view(np.uint32).ravel())
    found = _bits_on_arm(arm_driver, "max", tmp_path / "image", texts)
    assert found == {name: {expected} for name in ("neon_i8mm", "neon_dotprod", "neon", "plain")}
    if family == "distilbert":  # older cores: without i8mm, and without dot products
        assert list(_bits_on_arm(arm_driver, "cortex-a76", tmp_path / "image", texts)) == list(found)[1:]
        assert list(_bits_on_arm(arm_driver, "cortex-a72", tmp_path / "image", texts)) == list(found)[2:]


@pytest.mark.skipif("avx2" not in instruction_sets(), reason="AVX-512 is emulated on x86 processors with AVX2")
def test_emulated_avx512_gives_the_bits_of_this_processor(make_engine: MakeEngine, tmp_path: Path) -> None:
    here, program = Path(__file__).parent, tmp_path / "forward_image"
    sources = [*sorted(KERNELS.glob("*.c")), here / "forward_image.c"]
    flags = ["-O1", "-std=gnu11", "-ffp-contract=off", "-mavx2", "-mfma", "-mf16c", "-Wno-psabi", f"-I{KERNELS}"]
    emulation = ["-include", here / "avx512_emulation.h"]
    subprocess.run(["gcc", *flags, *emulation, *sources, "-o", program, "-lpthread", "-lm"], check=True)
    texts = random_texts([1, 19, 50, 6])
    native_models.write_batch(texts, tmp_path / "batch")
    for family in ("bert", "modernbert"):
        engine, _ = make_engine(randomise(MODELS[family]()))
        native_models.write_image(engine, tmp_path / "image")
        expected = " ".join(f"{bits:08x}" for bits in engine.logits(TokenBatch.of(texts)).view(np.uint32).ravel())
        command = [program, tmp_path / "image", tmp_path / "batch"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        found = dict(line.split(" ", 1) for line in lines)
        assert {"avx512_vnni", "avx512"} <= set(found)
        assert set(found.values()) == {expected}


@pytest.fixture(scope="module")
def wasm_drivers(tmp_path_factory: pytest.TempPathFactory) -> list[list[str | Path]]:
    """Commands that run the kernels in Node: with plain SIMD, and with relaxed SIMD."""
    if not shutil.which("node") or not find_spec("ziglang"):
        pytest.skip("WebAssembly is compiled by the package ziglang (90 MB) and run by Node; both must be installed")
    folder, here = tmp_path_factory.mktemp("wasm"), Path(__file__).parent
    sources = [*sorted(KERNELS.glob("*.c")), here / "forward_image.c"]
    drivers: list[list[str | Path]] = []
    for name, extra in (("plain", []), ("relaxed", ["-mrelaxed-simd"])):
        program = folder / f"{name}.wasm"
        flags = ["-O2", "-std=gnu11", "-ffp-contract=off", "-msimd128", *extra, f"-I{KERNELS}", "-o", program]
        compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "wasm32-wasi"]
        subprocess.run([*compiler, *flags, *sources, "-lm"], check=True)
        drivers.append(["node", "--no-warnings", here / "run_wasi.mjs", program])
    if "relaxed-simd" in subprocess.run(["node", "--v8-options"], capture_output=True, text=True, check=True).stdout:
        drivers[1].insert(1, "--experimental-wasm-relaxed-simd")  # Node 20; newer ones have it switched on
    return drivers


@pytest.mark.parametrize("family", EMULATED)
def test_webassembly_gives_the_logits_and_labels_of_this_processor(
    make_engine: MakeEngine, wasm_drivers: list[list[str | Path]], tmp_path: Path, family: str
) -> None:
    engine, _ = make_engine(randomise(MODELS[family]()))
    native_models.write_image(engine, tmp_path / "image", pointer_bytes=4)
    texts = random_texts([1, 19, 50, 6])
    texts[2][3] = 1  # a padding id
    native_models.write_batch(texts, tmp_path / "batch")
    expected = engine.logits(TokenBatch.of(texts))
    found = {}
    for driver in wasm_drivers:
        command = [*driver, tmp_path / "image", tmp_path / "batch"]
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            name, *bits = line.split()
            found[name] = np.array([int(x, 16) for x in bits], dtype=np.uint32).view(np.float32).reshape(expected.shape)
    assert sorted(found) == ["plain", "wasm", "wasm_relaxed"]
    # Node fuses relaxed multiply-adds on every processor of the last ten years; plain C computes them in software.
    np.testing.assert_array_equal(found["plain"], expected)
    np.testing.assert_array_equal(found["wasm_relaxed"], expected)
    # Plain SIMD rounds twice: rarely, an activation gets the next step of int8 and shows in one text.
    difference = np.abs(found["wasm"] - expected).max(axis=1)
    assert np.median(difference) < 1e-5
    assert difference.max() < 0.1 * expected.std()
    np.testing.assert_array_equal(found["wasm"].argmax(axis=1), expected.argmax(axis=1))


def test_instructions_that_this_processor_lacks_are_refused_by_name(make_engine: MakeEngine) -> None:
    with pytest.raises(OSError, match=r"instructions 'sse9': this processor and these kernels have .*plain"):
        make_engine(distilbert(), instructions="sse9")


def test_local_attention_sees_exactly_its_window(make_engine: MakeEngine, tmp_path: Path) -> None:
    _, reference = make_engine(modernbert())
    texts = random_texts([40, 60, 100, 150, 160])
    expected = reference_logits(reference, texts)
    config = json.loads((tmp_path / "config.json").read_text())

    def error(window: int) -> float:
        changed = config | {"local_attention": 2 * window}
        return float(np.abs(NativeEngine(tmp_path, changed, 1).logits(TokenBatch.of(texts)) - expected).mean())

    assert error(16) < 0.5 * min(error(15), error(17))


def test_thousands_of_tokens_take_bounded_memory(make_engine: MakeEngine) -> None:
    positions = 8192
    engine, reference = make_engine(modernbert(max_position_embeddings=positions, num_hidden_layers=2))
    before = _data_bytes()
    texts = random_texts([positions, 10])
    logits = engine.logits(TokenBatch.of(texts), 2)
    # All scores of one head would take 256 MiB.
    assert _data_bytes() - before < 64 * 2**20
    expected = reference_logits(reference, texts)
    assert np.abs(logits - expected).max() < 0.2 * expected.std()


def test_configurations_of_modernbert_from_before_transformers_5_are_read(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine, _ = make_engine(modernbert())
    config = json.loads((tmp_path / "config.json").read_text())
    old = {key: value for key, value in config.items() if key not in ("layer_types", "rope_parameters")}
    old |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}
    batch = TokenBatch.of(random_texts(LENGTHS))
    np.testing.assert_array_equal(NativeEngine(tmp_path, old, 1).logits(batch), engine.logits(batch))


def test_concurrent_passes_do_not_affect_each_other(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(distilbert())
    batches = [TokenBatch.of(random_texts(LENGTHS[: 3 + i % 7], seed=i)) for i in range(40)]
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
    engine, _ = make_engine(distilbert())
    with pytest.raises(ValueError, match=what):
        engine.logits(TokenBatch(np.array(ids, dtype=np.int32), np.array(lengths, dtype=np.int32)))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "xlnet"}, "model_type 'xlnet'"),
        ({"activation": "silu"}, "activation 'silu'"),
        ({"n_heads": 4}, "head size 24"),
        ({"n_heads": 18, "dim": 304}, "dim 304: must be a multiple of its 18 heads"),
        ({"n_layers": 0}, "n_layers 0"),
        ({"hidden_dim": 131_120}, "hidden_dim 131120"),
        ({"is_decoder": True}, "is_decoder"),
    ],
)
def test_a_model_that_the_kernels_do_not_compute_is_refused_before_anything_is_written(
    make_engine: MakeEngine, tmp_path: Path, changes: dict[str, object], what: str
) -> None:
    config = {"model_type": "distilbert", **distilbert().config.to_dict(), **changes}
    with pytest.raises(ValueError, match=what):
        write_native(config, {}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_of_another_shape_are_refused_by_name(make_engine: MakeEngine, tmp_path: Path) -> None:
    make_engine(distilbert())
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
    engine, _ = make_engine(distilbert(n_layers=1), threads=processors)
    batch = TokenBatch.of(random_texts([50, 160, 3, 97]))
    alone = engine.logits(batch)
    np.testing.assert_array_equal(engine.logits(batch, processors), alone)
    with_engine = _num_threads()
    del engine
    assert with_engine - _num_threads() == processors - 1


def test_buffers_grow_linearly_with_the_processors(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(distilbert(n_layers=1), threads=64)
    batch = TokenBatch.of(random_texts([POSITIONS] * 2))
    before = _data_bytes()
    for _ in range(64):  # every session in turn
        engine.logits(batch, 64)
    assert _data_bytes() - before < 64 * 2**20  # a thread's buffers take 0.15 MiB


def test_concurrent_passes_may_ask_for_more_threads_than_exist(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(distilbert(), threads=3)
    batches = [TokenBatch.of(random_texts(LENGTHS[i % 9 :], seed=i)) for i in range(24)]
    alone = [engine.logits(batch) for batch in batches]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda batch: engine.logits(batch, 3), batches))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_forked_child_starts_its_own_threads(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(distilbert(), threads=2)
    batch = TokenBatch.of(random_texts(LENGTHS))
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


def test_all_heads_of_an_encoder_run_on_the_same_threads_in_a_forked_child(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(distilbert(), threads=2)
    batch = TokenBatch.of(random_texts(LENGTHS))
    encoder = SharedEncoder(engine, encoder_key(engine))
    heads = [encoder.add(engine), encoder.add(engine)]
    expected = engine.logits(batch, 2)
    child = os.fork()
    if child == 0:
        try:
            found = [head.logits(batch, 2) for head in heads]
            found += [scores for scores, _ in encoder.read_all(batch, 2).values()]
            is_equal = all(np.array_equal(one, expected) for one in found)
            os._exit(0 if is_equal and _num_threads() == 2 else 1)
        finally:
            os._exit(2)
    assert _exit_code(child, seconds=20) == 0


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
    model = distilbert()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    with pytest.raises(ValueError, match=f"{what} holds NaN or infinity"):
        make_engine(model)


def test_embeddings_too_large_for_float16_are_refused(make_engine: MakeEngine) -> None:
    model = distilbert()
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
    "make", [distilbert, lambda: distilbert(activation="relu"), MODELS["bert"]], ids=["gelu", "relu", "tanh"]
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
