"""What is done to each block: its activations forgotten, its code compiled once for all lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import UserError
from tests.training.parallelism.small_models import VOCABULARY, small_model
from training.config import TrainConfig
from training.model.classifier import NewsClassifier
from training.parallelism.blocks import LENGTH_MULTIPLE, apply_to_blocks, length_multiple


def kept_bytes(mode: str) -> int:
    """Bytes that the forward pass of a small model keeps for its backward pass, weights left out."""
    model = small_model("distilbert", dropout=0.1)
    apply_to_blocks(model, TrainConfig(activation_checkpointing=mode), model.dropout_stream)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.ones(8, 32, dtype=torch.int64), torch.ones(8, 32, dtype=torch.int64))
    return sum(kept.values())


def test_full_checkpointing_keeps_far_less_than_none() -> None:
    assert kept_bytes("full") < 0.25 * kept_bytes("none")


class _Products(TorchDispatchMode):
    """Counts the linear layers and norms that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def recomputed(mode: str) -> tuple[int, int]:
    """Linear layers and norms of the forward pass that the backward pass computes again."""
    model = small_model("distilbert", dropout=0.1)
    apply_to_blocks(model, TrainConfig(activation_checkpointing=mode), model.dropout_stream)
    ids = torch.ones(8, 32, dtype=torch.int64)
    loss = model(ids, ids).sum()
    with _Products() as products:
        loss.backward()
    return products.counts["addmm"], products.counts["native_layer_norm"]


def test_selective_checkpointing_computes_norms_again_and_no_products() -> None:
    products, norms = zip(*(recomputed(mode) for mode in ("none", "selective", "full")), strict=True)

    assert products[0] == products[1] == 0 < products[2]
    assert norms[0] == 0 < norms[1] == norms[2]


def test_a_network_without_repeated_blocks_is_refused() -> None:
    model = small_model("distilbert")
    model.network.distilbert.transformer.layer = torch.nn.Identity()

    with pytest.raises(UserError, match="no repeated blocks"):
        apply_to_blocks(model, TrainConfig(activation_checkpointing="full"), model.dropout_stream)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    limit = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.reset()


def _count_compilations(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    counter = CompileCounter()
    compile_block = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **how: compile_block(self, **how | {"backend": counter})
    )
    return counter


def _run_lengths(model: NewsClassifier, lengths: range) -> None:
    for length in lengths:
        model.seed_dropout(seed=1, step=length, first_row=0)
        ids = torch.randint(1, VOCABULARY, (4, length))
        model(ids, torch.ones_like(ids)).sum().backward()


@pytest.mark.parametrize(
    "mode", ["none", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("selective", "full"))]
)
def test_compiled_blocks_are_not_recompiled_for_another_length_or_step(
    mode: str, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = _count_compilations(monkeypatch)
    model = small_model("distilbert", dropout=0.1)
    apply_to_blocks(model, TrainConfig(compile=True, activation_checkpointing=mode), model.dropout_stream)

    _run_lengths(model, range(8, 10))
    graphs = counter.frame_count
    _run_lengths(model, range(10, 40, 3))

    assert graphs > 0
    assert counter.frame_count == graphs


@pytest.mark.parametrize(
    ("fields", "device", "multiple"),
    [
        ({}, "cpu", 1),
        ({}, "cuda", 8),
        ({"compile": True}, "cpu", LENGTH_MULTIPLE),
        ({"strategy": "pp"}, "cpu", 1),  # as one process, for its dropout
        ({"strategy": "tp", "sequence_parallel": True}, "cpu", LENGTH_MULTIPLE),
    ],
)
def test_lengths_are_padded_to_multiples_if_each_new_one_is_expensive(
    fields: dict[str, object], device: str, multiple: int
) -> None:
    assert length_multiple(TrainConfig(**fields), device) == multiple
