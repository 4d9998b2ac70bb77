"""Joined rows on a GPU, without one: the kernel's place is taken by a slow one for the CPU with the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.training.model.test_classifier import batch_of, save_encoder
from training.config import TrainConfig
from training.distributed.ranks import Ranks
from training.model import attention
from training.model.attention import flash_attention, why_flash_attention_fails
from training.model.classifier import NewsClassifier
from training.model.packing import CPU, Packing
from training.model.precision import DTYPES
from training.parallelism.blocks import apply_to_blocks
from training.parallelism.ddp import DDPStrategy
from training.run.describe import describe_padding

LENGTHS = [1, 4, 4, 9, 17, 1]
HEADS, SIZE = 4, 8
ON_CPU = Ranks(0, 1, 0, 1, CPU, "none")
Register = Callable[..., None]


def rows_of(states: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    """(tokens, heads, size) -> of each row (heads, tokens, size)."""
    assert offsets.dtype == torch.int32  # as the kernel demands
    return list(states.transpose(0, 1).tensor_split(offsets[1:-1].long(), dim=1))


def joined(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(rows, dim=1).transpose(0, 1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a row, in fp32 or wider: its weights, (heads, queries, keys), and its values."""
    weights = (q @ k.transpose(1, 2) * scale).softmax(dim=-1)
    return weights, weights @ v


@pytest.fixture
def register() -> Iterator[Register]:
    """Registers a kernel of FlashAttention for the CPU, whose values are ``factor`` times the right ones."""
    # `_destroy` is private, but there is no public way to take a kernel back at a given moment.
    libraries: list[torch.library.Library] = []
    shares: list[float] = []

    def register(factor: float = 1.0) -> list[float]:
        def forward(q: Any, k: Any, v: Any, of_q: Any, of_k: Any, *more: Any, scale: float | None = None) -> Any:
            longest_q, longest_k, dropout, is_causal, _ = more
            assert (longest_q, longest_k) == (int(of_q.diff().max()), int(of_k.diff().max()))
            assert not is_causal
            shares.append(dropout)
            rows = zip(rows_of(q, of_q), rows_of(k, of_k), rows_of(v, of_k), strict=True)
            found = joined([factor * attend(*row, scale or SIZE**-0.5)[1] for row in rows])
            return found, *(torch.zeros(0) for _ in range(4))

        def backward(g: Any, q: Any, k: Any, v: Any, *more: Any, scale: float | None = None, **_: Any) -> Any:
            of_q, of_k = more[2:4]  # behind the output and the normalizers of its rows
            scale, found = scale or SIZE**-0.5, []
            rows = zip(rows_of(q, of_q), rows_of(k, of_k), rows_of(v, of_k), rows_of(g, of_q), strict=True)
            for query, key, value, gradient in rows:
                weights, _ = attend(query, key, value, scale)
                of_weights = gradient @ value.transpose(1, 2)
                of_scores = weights * (of_weights - (of_weights * weights).sum(dim=-1, keepdim=True)) * scale
                of_keys, of_values = of_scores.transpose(1, 2) @ query, weights.transpose(1, 2) @ gradient
                found.append((of_scores @ key, of_keys, of_values))
            return tuple(joined(list(rows)) for rows in zip(*found, strict=True))

        for library in libraries:
            library._destroy()
        library = torch.library.Library("aten", "IMPL")
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        libraries.append(library)
        return shares

    yield register
    libraries[-1]._destroy()


@pytest.mark.parametrize("of_first_tokens", [False, True], ids=["all queries", "first queries"])
def test_joined_rows_get_the_attention_and_gradients_of_padded_ones(register: Register, of_first_tokens: bool) -> None:
    register()
    _, mask = batch_of(LENGTHS)
    torch.manual_seed(1)
    padded = torch.randn(3, len(LENGTHS), HEADS, mask.shape[1], SIZE, dtype=torch.float64, requires_grad=True)
    packing = Packing(mask)
    query, key, value = padded
    if of_first_tokens:
        query = query[:, :, :1]

    def packed(states: torch.Tensor) -> torch.Tensor:
        return packing.pack(states.transpose(1, 2)).transpose(1, 2)

    expected = F.scaled_dot_product_attention(query, key, value, mask.bool()[:, None, None], scale=0.3).transpose(1, 2)
    found = flash_attention(
        query if of_first_tokens else packed(query), packed(key), packed(value), packing, scaling=0.3
    )

    expected = expected if of_first_tokens else packing.pack(expected)
    torch.testing.assert_close(found, expected)
    one, other = (torch.autograd.grad(out.square().sum(), padded)[0] for out in (found, expected))
    torch.testing.assert_close(one, other)


def test_the_share_that_is_dropped_reaches_the_kernel(register: Register) -> None:
    shares = register()
    states = torch.zeros(1, HEADS, 5, SIZE)

    flash_attention(states, states, states, Packing(batch_of([2, 3])[1]), dropout=0.25)

    assert shares == [0.25]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("architecture", ["distilbert", "bert"])
def test_a_model_trains_on_joined_rows_off_the_cpu(architecture: str, mode: str, tmp_path: Path) -> None:
    """On the device `meta`, which has shapes and no values: all operations of a GPU with their checks."""
    meta = torch.device("meta")
    model = NewsClassifier(4, str(save_encoder(tmp_path, architecture, dropout=0.1))).to(meta, torch.bfloat16).train()
    model.packs_rows = True
    apply_to_blocks(model, TrainConfig(activation_checkpointing=mode), model.dropout_stream)
    ids, mask = batch_of(LENGTHS)
    seen = []
    model.blocks[0].register_forward_hook(lambda _, given, out: seen.append(out.shape))

    logits = model(ids.to(meta), mask)

    assert logits.shape == (len(LENGTHS), 4)
    assert seen == [(1, sum(LENGTHS), 32)]
    logits.sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


@pytest.mark.parametrize(
    ("precision", "capability", "encoder", "compiled", "said"),
    [
        ("bf16", (9, 0), "distilbert", False, "none: rows are joined"),
        ("fp16", (8, 0), "bert", False, "none: rows are joined"),
        ("fp16", (7, 5), "bert", False, "needs compute capability 8.0 or more, and this GPU has 7.5"),
        ("fp32", (9, 0), "bert", False, "in bf16 or fp16 only, and this run is in fp32"),
        ("bf16", (9, 0), "roberta", False, "only the rows of DistilBERT and BERT"),
        ("bf16", (9, 0), "bert", True, "--compile would compile each new number"),
    ],
)
def test_a_run_on_a_gpu_says_whether_it_joins_rows_and_why_not(
    precision: str,
    capability: tuple[int, int],
    encoder: str,
    compiled: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    tried = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention, "why_flash_attention_fails", lambda *given: tried.append(given) or "")
    model = NewsClassifier(4, str(save_encoder(tmp_path, encoder)))
    strategy = DDPStrategy(model, TrainConfig(compile=compiled), ON_CPU, precision)
    assert describe_padding(strategy) == {}

    strategy.ranks = replace(ON_CPU, device=torch.device("cuda"))
    strategy.why_padded = strategy._why_padded(model)

    assert said in describe_padding(strategy)["Padding"]
    assert [given[1:] for given in tried] == [(DTYPES[precision], 4, 8)] * said.startswith("none")


def test_attention_that_fails_or_differs_leaves_rows_padded(register: Register) -> None:
    def trial() -> str:
        return why_flash_attention_fails(CPU, torch.bfloat16, HEADS, SIZE)

    assert "does not work here" in trial()  # this PyTorch has no such kernel for CPUs
    register()
    assert trial() == ""
    register(factor=1.2)
    assert "gives other values" in trial()
