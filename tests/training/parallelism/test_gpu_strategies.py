"""Strategies on a GPU: two ranks share it, with gloo between them, since NCCL refuses two ranks on one GPU.

Without a GPU the same tests run on the CPU, so that they are known to work when they meet one.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.processes import here, run_on_ranks
from tests.training.parallelism.cases import Case, compare
from tests.training.parallelism.small_models import small_model
from tests.training.parallelism.small_runs import take_steps
from training.config import TrainConfig
from training.parallelism.registry import STRATEGIES

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU, and this machine has none")

# From one process on the CPU in fp64 (bf16, fp16: in fp32), relative to the norm of all; weights after four steps.
# A GPU sums in another order than a CPU, so fp32 has ten times the room that it has between CPUs.
TOLERANCES = {
    "fp32": {"loss": 1e-5, "gradients": 1e-5, "weights": 1e-5, "grad_norm": 1e-5, "evaluation": 1e-4},
    "bf16": {"loss": 2e-2, "gradients": 1e-1, "weights": 1e-2, "grad_norm": 5e-2, "evaluation": 5e-2},
}
LAYOUTS = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "zero3 with its state in the machine's memory": {"strategy": "zero3", "cpu_offload": True},
    "tp": {"strategy": "tp"},
    "tp with sequence parallelism": {"strategy": "tp", "sequence_parallel": True},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_on_one_device_compute_what_one_process_computes(layout: str, precision: str) -> None:
    # Attention's dropout on GPUs is PyTorch's own, whose masks depend on the rank: what is compared here has none.
    case = Case(2, LAYOUTS[layout], precision=precision, dropout=False)

    differences = run_on_ranks(case.world_size, compare, case, DEVICE)[0]

    beyond = {name: value for name, value in vars(differences).items() if value > TOLERANCES[precision][name]}
    assert not beyond


STEPS = range(3, 9)  # the first two set up the optimizer's state and DDP's buckets


def _count_waits(precision: str, family: str) -> float:
    """How often a step makes the host wait for the GPU."""
    ranks = here("cuda")
    network = small_model(family, 0.1)
    strategy = STRATEGIES["ddp"](network, TrainConfig(max_length=48), ranks, precision)
    take_steps(strategy, range(1, 3), ranks=ranks)
    inner, waits = strategy.step, 0

    def counting(*arguments: object, **more: object) -> object:
        nonlocal waits
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                return inner(*arguments, **more)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waits += sum("synchronizing" in str(warning.message) for warning in caught)

    strategy.step = counting
    take_steps(strategy, STEPS, ranks=ranks)
    return waits / len(STEPS)


@needs_gpu
@pytest.mark.parametrize(
    ("precision", "family", "allowed"),
    [
        ("fp32", "distilbert", 0),
        ("bf16", "distilbert", 0),
        ("bf16", "llama", 0),
        ("fp16", "distilbert", 1),  # whether the loss scale overflowed is asked once per step, as GradScaler does
    ],
)
def test_the_host_does_not_wait_for_the_gpu_within_a_step(
    precision: str, family: str, allowed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = run_on_ranks(1, _count_waits, precision, family)[0]

    with capsys.disabled():
        print(f"\nhost synchronisations per step, {family}, {precision}: {waits:g}")
    assert waits <= allowed


def _fp16_survives_an_overflow() -> tuple[float, float, bool]:
    ranks = here("cuda")
    strategy = STRATEGIES["ddp"](small_model("distilbert"), TrainConfig(max_length=48), ranks, "fp16")
    strategy.loss_scale.scale = 2.0**40  # far beyond what fp16 holds
    before = nn.utils.parameters_to_vector(strategy.parameters.values()).clone()
    take_steps(strategy, [1], ranks=ranks)
    unchanged = torch.equal(before, nn.utils.parameters_to_vector(strategy.parameters.values()))
    return 2.0**40, strategy.loss_scale.scale, unchanged


@needs_gpu
def test_a_step_that_overflows_in_fp16_changes_no_weight_and_lowers_the_scale() -> None:
    before, after, unchanged = run_on_ranks(1, _fp16_survives_an_overflow)[0]

    assert unchanged
    assert after < before
