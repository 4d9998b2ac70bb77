"""Matrices cut over real ranks compute what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.training.parallelism.ranks import here
from tests.training.parallelism.small_models import FAMILIES, small_batch, small_model
from training.model import NewsClassifier
from training.optimization import build_optimizer
from training.parallelism.gradients import global_norm, settle_partial_gradients
from training.parallelism.tensor_parallel import apply_tensor_parallel

DROPOUT = 0.1
STEPS = 3
# Llama's norms and rotations compute in fp32 whatever the type of the weights.
TOLERANCE = {"distilbert": 1e-8, "bert": 1e-8, "llama": 1e-6}
Found = dict[str, Any]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _backward(model: NewsClassifier, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask, labels = small_batch()
    model.seed_dropout(seed=11, step=step, first_row=4)
    logits = model(ids, mask)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    settle_partial_gradients(model.parameters())
    return logits.detach(), loss.detach()


def _train(model: NewsClassifier) -> tuple[Found, list[float]]:
    """The first step's logits, loss and gradients, and the weights after the last, whole; each step's norm."""
    optimizer = build_optimizer(model.parameters(), weight_decay=0.01)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    found: Found = {}
    norms = []
    for step in range(STEPS):
        logits, loss = _backward(model, step)
        norms.append(global_norm(model.parameters()).item())
        if step == 0:
            gradients = {name: _whole(parameter.grad) for name, parameter in model.named_parameters()}
            found = {"logits": logits, "loss": loss, "gradients": gradients}
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found["evaluated"] = model(*small_batch()[:2])
    weights = {name: _whole(weight.detach()) for name, weight in model.named_parameters()}
    return {**found, "weights": weights}, norms


def _cut(family: str, *, sequence_parallel: bool, mesh: DeviceMesh | None = None) -> NewsClassifier:
    model = small_model(family, DROPOUT, torch.float64)
    mesh = mesh or init_device_mesh("cpu", (here().world_size,), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, mesh, sequence_parallel=sequence_parallel)
    return model


def _train_all() -> dict[tuple[str, bool], Any]:
    """Each family and layout: what one process finds, and what the ranks find."""
    found = {}
    for family in FAMILIES:
        alone = _train(small_model(family, DROPOUT, torch.float64))
        for sequence_parallel in (False, True):
            together = _train(_cut(family, sequence_parallel=sequence_parallel))
            found[family, sequence_parallel] = alone, together
    return found


@pytest.fixture(scope="module")
def trained_on(run_on_ranks: Callable[..., list[Any]]) -> Callable[[int], list[Any]]:
    """`trained_on(world_size)`: what each rank of so many found, computed once."""
    return cache(lambda world_size: run_on_ranks(world_size, _train_all))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_with_dropout_equals_one_process(
    trained_on: Callable[[int], list[Any]], world_size: int, family: str, sequence_parallel: bool
) -> None:
    for found in trained_on(world_size):
        (alone, norms_alone), (together, norms) = found[family, sequence_parallel]
        torch.testing.assert_close(together, alone, rtol=TOLERANCE[family], atol=TOLERANCE[family])
        torch.testing.assert_close(norms, norms_alone, rtol=1e-6, atol=0)
