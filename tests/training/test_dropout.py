from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from training.dropout import DropoutStream, RowDropout, use_row_dropout

SHAPE = (64, 40, 50)


def row_dropout(p: float, site: int = 0, seed: int = 1, step: int = 1, first_row: int = 0) -> RowDropout:
    stream = DropoutStream()
    stream.move(seed, step, first_row)
    return RowDropout(p, site, stream).train()


def kept_by(dropout: RowDropout, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return dropout(torch.ones(shape)) != 0


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5])
def test_the_share_dropped_is_p_within_chance(p: float) -> None:
    kept = kept_by(row_dropout(p))

    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs((~kept).double().mean().item() - p) < 5 * deviation + 1 / 65536


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5])
def test_scaling_keeps_the_mean(p: float) -> None:
    mean = row_dropout(p)(torch.ones(SHAPE)).double().mean().item()

    assert abs(mean - 1) < 5 * math.sqrt(p / (1 - p) / math.prod(SHAPE))


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_no_row_or_column_is_dropped_more_than_another(p: float, axis: int) -> None:
    dropped = (~kept_by(row_dropout(p))).double()

    shares = dropped.mean(dim=[i for i in range(3) if i != axis])

    deviation = math.sqrt(p * (1 - p) / (dropped.numel() / SHAPE[axis]))
    assert (shares - p).abs().max().item() < 5.5 * deviation


@pytest.mark.parametrize("shape", [(8, 16), (8, 3, 5), (8, 2, 7, 7), (8, 1)])
@pytest.mark.parametrize("first_row", [1, 3, 6])
def test_the_mask_of_later_rows_is_a_slice_of_the_whole_batchs(shape: tuple[int, ...], first_row: int) -> None:
    whole = kept_by(row_dropout(0.5), shape)

    share = kept_by(row_dropout(0.5, first_row=first_row), (shape[0] - first_row, *shape[1:]))

    assert torch.equal(share, whole[first_row:])


def test_the_same_place_in_the_stream_gives_the_same_mask() -> None:
    assert torch.equal(kept_by(row_dropout(0.3)), kept_by(row_dropout(0.3)))


@pytest.mark.parametrize("other", [{"step": 2}, {"site": 1}, {"seed": 2}, {"seed": 2, "step": 0}])
def test_masks_of_another_step_site_or_seed_agree_no_more_than_by_chance(other: dict[str, int]) -> None:
    p = 0.5
    first, second = kept_by(row_dropout(p)), kept_by(row_dropout(p, **other))

    both_dropped = (~first & ~second).double().mean().item()

    assert abs(both_dropped - p * p) < 5 * math.sqrt(p * p * (1 - p * p) / first.numel())


def test_neighbouring_sites_and_steps_are_uncorrelated_at_any_shift() -> None:
    p = 0.5
    first = kept_by(row_dropout(p), (1, 4096)).double().flatten() - p
    for other in ({"site": 1}, {"step": 2}, {"seed": 2}):
        second = kept_by(row_dropout(p, **other), (1, 4096)).double().flatten() - p

        spectrum = torch.fft.rfft(first) * torch.fft.rfft(second).conj()

        correlation = torch.fft.irfft(spectrum) / (p * (1 - p) * len(first))
        assert correlation.abs().max().item() < 6.5 / math.sqrt(len(first))


def test_the_backward_pass_uses_the_forward_passes_mask() -> None:
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
def test_the_type_of_numbers_is_kept(dtype: torch.dtype) -> None:
    x = torch.randn(4, 8, dtype=dtype, requires_grad=True)

    y = row_dropout(0.5)(x)
    y.sum().backward()

    assert y.dtype == x.grad.dtype == dtype


def test_nothing_is_dropped_in_evaluation_or_at_zero() -> None:
    x = torch.randn(SHAPE)

    assert torch.equal(row_dropout(0.5).eval()(x), x)
    assert torch.equal(row_dropout(0.0)(x), x)


def test_use_row_dropout_numbers_every_place_and_keeps_the_state_dict() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25)))
    before = list(model.state_dict())

    stream = use_row_dropout(model)

    places = [module for module in model.modules() if isinstance(module, RowDropout)]
    assert [(place.p, place.site) for place in places] == [(0.5, 0), (0.25, 1)]
    assert all(place.stream is stream for place in places)
    assert list(model.state_dict()) == before
