"""A model that is stored in half precision is laid out without a whole fp32 copy of it on each rank."""

from __future__ import annotations

import ctypes
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification, DistilBertConfig

from tests.processes import here
from training.model.classifier import Loading, NewsClassifier
from training.model.weights import stored_dtype
from training.parallelism.fsdp import apply_fsdp
from training.parallelism.tensor_parallel import apply_tensor_parallel

M_MMAP_THRESHOLD = -3  # malloc.h


def _stored(folder: Path, **size: int) -> Path:
    """An encoder without a head, in fp16."""
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(DistilBertConfig(**size)).half().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "classifier" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _stored(tmp_path_factory.mktemp("small"), vocab_size=97, dim=32, hidden_dim=64, n_layers=2, n_heads=4)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """110 MB in fp32, of which a block has 14 and the embeddings 9."""
    size = {"dim": 544, "hidden_dim": 2176, "n_layers": 7, "n_heads": 8}
    return _stored(tmp_path_factory.mktemp("large"), vocab_size=4000, **size)


def _as_before(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight in fp32 from the first, as transformers reads it."""
    torch.manual_seed(3)
    network = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=4, dtype=torch.float32)
    return {f"network.{name}": weight for name, weight in network.state_dict().items()}


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_in_half_precision_and_the_new_head_are_those_of_an_fp32_load(stored: Path) -> None:
    expected = _as_before(stored)
    after = torch.get_rng_state()

    torch.manual_seed(3)
    model = NewsClassifier(4, str(stored))

    assert _same(model.state_dict(), expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_model_in_the_hubs_cache_is_mapped_as_a_local_folder_is(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--me--encoder"
    shutil.copytree(stored, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    assert stored_dtype(str(stored)) == stored_dtype("me/encoder") == torch.float16
    assert stored_dtype("me/not-there") == stored_dtype("no/name/at all") == torch.float32


def _laid_out(folder: Path, how: str) -> nn.Module:
    torch.manual_seed(3)
    model = NewsClassifier(4, str(folder), loading=Loading(as_stored=True))
    mesh = init_device_mesh("cpu", (here().world_size,), mesh_dim_names=("ranks",))
    if how == "fsdp":
        apply_fsdp(model, model.blocks, mesh, reshard_after_forward=True)
    else:
        apply_tensor_parallel(model, mesh, sequence_parallel=False)
    return model


def _whole_weights(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for how in ("fsdp", "tp"):
        weights = _laid_out(folder, how).state_dict()
        found[how] = {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in weights.items()}
    return found


def test_laid_out_weights_are_those_of_an_fp32_load(run_on_ranks: Callable[..., list[Any]], stored: Path) -> None:
    expected = _as_before(stored)

    for of_rank in run_on_ranks(2, _whole_weights, stored):
        assert _same(of_rank["fsdp"], expected)
        assert _same(of_rank["tp"], expected)


def _anonymous_bytes() -> int:
    """This process's memory that no file backs."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def _most_memory(folder: Path, how: str) -> float:
    """The most that loading and laying out add to this process, in parts of the whole model in fp32."""
    # glibc raises this threshold as it goes, and then keeps freed tensors for later. Fixed, it returns them at once.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    _laid_out(folder.parent / "warm", how)  # what libraries take, once
    before, most, done = _anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most.append(_anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = _laid_out(folder, how)
    done.set()
    watcher.join()
    return (max(*most, _anonymous_bytes()) - before) / (4 * sum(p.numel() for p in model.parameters()))


@pytest.mark.parametrize("how", ["fsdp", pytest.param("tp", marks=pytest.mark.slow)])
def test_no_rank_holds_the_whole_model_in_fp32(
    run_on_ranks: Callable[..., list[Any]], large: Path, stored: Path, how: str
) -> None:
    warm = large.parent / "warm"
    warm.unlink(missing_ok=True)
    warm.symlink_to(stored)

    for share in run_on_ranks(4, _most_memory, large, how):
        assert share < 0.6  # a quarter, and a few copies of one block; without, a whole copy and the quarter
