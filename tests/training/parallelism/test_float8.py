"""Float8 is refused where there is none, and elsewhere stays near what it rounds."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from common.errors import UserError
from training.config import TrainConfig
from training.model.classifier import NewsClassifier
from training.parallelism.float8 import apply_float8, check_float8

with_torchao = pytest.mark.skipif(not find_spec("torchao"), reason='needs the extra: pip install "distrinews[float8]"')


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UserError, match=r"--float8: needs a GPU of compute capability 8\.9 .* on the CPU"):
        check_float8(TrainConfig(float8=True), torch.device("cpu"), "bf16")


def _model() -> tuple[NewsClassifier, torch.Tensor]:
    torch.manual_seed(0)
    return NewsClassifier(4, "tiny", vocab_size=64).eval(), torch.randint(5, 64, (3, 7))


def _gradients(model: NewsClassifier, ids: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(ids, torch.ones_like(ids)).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@with_torchao
@pytest.mark.slow
def test_gradients_in_float8_are_near_those_in_fp32() -> None:
    model, ids = _model()
    names, exact = list(model.state_dict()), _gradients(model, ids)
    for block in model.blocks:
        apply_float8(block, emulate=True)
    rounded = _gradients(model, ids)
    assert list(model.state_dict()) == names
    # e4m3 keeps 3 bits of a fraction, e5m2 for gradients 2: some per cent, and not nothing.
    assert 1e-4 < float((rounded - exact).norm() / exact.norm()) < 0.1


@with_torchao
@pytest.mark.slow
def test_only_layers_with_sides_of_sixteens_are_converted() -> None:
    block = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 20), nn.LayerNorm(20))
    apply_float8(block, emulate=True)
    assert [type(layer).__name__ for layer in block] == ["Float8Linear", "Linear", "LayerNorm"]
