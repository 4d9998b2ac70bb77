from __future__ import annotations

import math
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from training.model.dropout import DropoutStream, RowDropout, use_row_dropout

SHAPE = (64, 40, 50)
PHILOX = [-20505, -17196, -24547, 394]


class Operations(TorchDispatchMode):
    """The names of what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


MakeDropout = Callable[..., RowDropout]


@pytest.fixture(params=["as on CPUs", "as on GPUs"])
def row_dropout(request: pytest.FixtureRequest) -> MakeDropout:
    """`row_dropout(p, site=0, seed=1, step=1, first_row=0)`: one place of a model, its stream at that place."""

    def make(p: float, site: int = 0, seed: int = 1, step: int = 1, first_row: int = 0) -> RowDropout:
        stream = DropoutStream()
        if request.param == "as on GPUs":
            stream.draws = stream.device_draws
        stream.move(seed, step, first_row)
        return RowDropout(p, site, stream).train()

    return make


def kept_by(dropout: RowDropout, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return dropout(torch.ones(shape)) != 0


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5])
def test_the_share_dropped_is_p_within_chance(p: float, row_dropout: MakeDropout) -> None:
    kept = kept_by(row_dropout(p))

    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs((~kept).double().mean().item() - p) < 5 * deviation + 1 / 65536


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_no_row_or_column_is_dropped_more_than_another(p: float, axis: int, row_dropout: MakeDropout) -> None:
    dropped = (~kept_by(row_dropout(p))).double()

    shares = dropped.mean(dim=[i for i in range(3) if i != axis])

    deviation = math.sqrt(p * (1 - p) / (dropped.numel() / SHAPE[axis]))
    assert (shares - p).abs().max().item() < 5.5 * deviation


@pytest.mark.parametrize("shape", [(8, 16), (8, 3, 5), (8, 2, 7, 7), (8, 1)])
@pytest.mark.parametrize("first_row", [1, 3, 6])
def test_the_mask_of_later_rows_is_a_slice_of_the_whole_batchs(
    shape: tuple[int, ...], first_row: int, row_dropout: MakeDropout
) -> None:
    whole = kept_by(row_dropout(0.5), shape)

    share = kept_by(row_dropout(0.5, first_row=first_row), (shape[0] - first_row, *shape[1:]))

    assert torch.equal(share, whole[first_row:])


def test_neighbouring_sites_and_steps_are_uncorrelated_at_any_shift(row_dropout: MakeDropout) -> None:
    p = 0.5
    first = kept_by(row_dropout(p), (1, 4096)).double().flatten() - p
    for other in ({"site": 1}, {"step": 2}, {"seed": 2}):
        second = kept_by(row_dropout(p, **other), (1, 4096)).double().flatten() - p

        spectrum = torch.fft.rfft(first) * torch.fft.rfft(second).conj()

        correlation = torch.fft.irfft(spectrum) / (p * (1 - p) * len(first))
        assert correlation.abs().max().item() < 6.5 / math.sqrt(len(first))


def test_the_backward_pass_uses_the_forward_passes_mask(row_dropout: MakeDropout) -> None:
    dropout, weights = row_dropout(0.4), torch.randn(SHAPE)
    x = torch.randn(SHAPE, requires_grad=True)

    y = dropout(x)
    dropout.stream.move(9, 9, 9)
    (y * weights).sum().backward()

    kept = y != 0
    scale = 65536 / (65536 - round(0.4 * 65536))
    torch.testing.assert_close(x.grad, weights * kept * scale)
    torch.testing.assert_close(y, x * kept * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept(dtype: torch.dtype, row_dropout: MakeDropout) -> None:
    x = torch.randn(4, 8, dtype=dtype, requires_grad=True)

    y = row_dropout(0.5)(x)
    y.sum().backward()

    assert y.dtype == x.grad.dtype == dtype


def test_nothing_is_dropped_in_evaluation_or_at_zero(row_dropout: MakeDropout) -> None:
    x = torch.randn(SHAPE)

    assert torch.equal(row_dropout(0.5).eval()(x), x)
    assert torch.equal(row_dropout(0.0)(x), x)


def test_use_row_dropout_numbers_every_layer_and_keeps_the_state_dict(row_dropout: MakeDropout) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25)))
    before = list(model.state_dict())

    stream = use_row_dropout(model)

    places = [module for module in model.modules() if isinstance(module, RowDropout)]
    assert [(place.p, place.site) for place in places] == [(0.5, 0), (0.25, 1)]
    assert all(place.stream is stream for place in places)
    assert list(model.state_dict()) == before


def test_both_streams_drop_the_same_share_but_not_the_same_values() -> None:
    stream, shape = DropoutStream(), torch.Size((8, 3, 50))
    stream.move(seed=1, step=2, first_row=3)
    cpu = torch.device("cpu")

    philox, splitmix = stream.draws(0, shape, cpu), stream.device_draws(0, shape, cpu)

    assert philox.dtype == splitmix.dtype == torch.int16
    assert not torch.equal(philox, splitmix)
    # As CPUs have always drawn them: a changed mask would change every recorded loss curve.
    assert philox.flatten()[:4].tolist() == PHILOX


def test_the_devices_stream_is_splitmix64() -> None:
    def expected(state: int) -> int:
        mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        return mixed ^ mixed >> 31

    stream = DropoutStream()
    draws = stream.device_draws(5, torch.Size((1, 40)), torch.device("cpu"))
    numbers = [number % 2**64 for number in draws.flatten().view(torch.int64).tolist()]

    key = int.from_bytes(blake2b(b"(0, 0, 5)", digest_size=8).digest(), "little")
    assert numbers == [expected((key + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(10)]


def test_the_devices_stream_takes_few_operations_and_does_not_synchronise() -> None:
    stream = DropoutStream()
    with Operations() as operations:
        stream.device_draws(0, torch.Size((4, 5, 6)), torch.device("meta"))  # which has no values to wait for

    assert len(operations.names) <= 20


def test_only_ranks_that_split_heads_seed_attention_differently() -> None:
    def seed(tensor_rank: int | None) -> int:
        stream = DropoutStream()
        stream.tensor_rank = tensor_rank
        stream.move(seed=1, step=2, first_row=3)
        stream.seed_torch()
        return torch.initial_seed()

    assert len({seed(None), seed(0), seed(1)}) == 3
    assert seed(1) == seed(1)
    assert seed(None) == hash((1, 2, 3)) % 2**63
