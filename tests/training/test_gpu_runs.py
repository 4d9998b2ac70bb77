"""Whole training runs on a GPU: every precision, compiled, stopped, killed and resumed.

Without a GPU the same tests run on the CPU where that can do it, so that they are known to work when they meet one.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import here, run_on_ranks
from tests.training.parallelism.small_models import small_model
from tests.training.parallelism.small_runs import take_steps
from training.config import TrainConfig
from training.model.attention import FLASH_CAPABILITY, flash_attention
from training.model.packing import Packing
from training.parallelism.ddp import DDPStrategy
from training.parallelism.float8 import LEAST_CAPABILITY

pytestmark = pytest.mark.gpu
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU, and this machine has none")
needs_float8 = pytest.mark.skipif(
    not HAS_GPU or torch.cuda.get_device_capability() < LEAST_CAPABILITY,
    reason="needs a GPU of compute capability 8.9 or more (Ada, Hopper or newer), and this machine has none",
)
needs_flash = pytest.mark.skipif(
    HAS_GPU and torch.cuda.get_device_capability() < FLASH_CAPABILITY,
    reason="needs a GPU of compute capability 8.0 or more (Ampere or newer)",
)
# Dropout on GPUs draws other masks than on the CPU, so only what does not depend on them is compared: the loss at the
# beginning, and that it falls.
FIRST_LOSS = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}


def _losses(metrics_of: Callable[..., Any], output: Path) -> list[float]:
    return [record["loss"] for record in metrics_of(output.with_name(output.name + ".run"))]


@pytest.fixture(scope="module")
def on_the_cpu(
    tmp_path_factory: pytest.TempPathFactory, launch_shared: Callable[..., Any], metrics_of: Callable[..., Any]
) -> list[float]:
    """The losses of a run on the CPU in fp32."""
    output = tmp_path_factory.mktemp("cpu") / "model"
    ended = launch_shared(1, "--output_dir", output, "--batch_size", 8)
    assert ended.process.returncode == 0, ended.err
    return _losses(metrics_of, output)


@pytest.mark.parametrize(
    ("precision", "more"),
    [
        ("fp32", ()),
        ("bf16", ()),
        pytest.param("fp16", (), marks=needs_gpu),
        pytest.param("bf16", ("--float8", "true"), marks=needs_float8, id="float8"),
        pytest.param("bf16", ("--compile", "true"), marks=needs_gpu, id="compiled"),
    ],
)
def test_a_run_in_each_precision_begins_as_on_the_cpu_and_learns(
    launch: Callable[..., Any],
    metrics_of: Callable[..., Any],
    on_the_cpu: list[float],
    tmp_path: Path,
    precision: str,
    more: tuple[str, ...],
) -> None:
    if "--float8" in more:
        pytest.importorskip("torchao", reason="float8 needs torchao, which is not installed")
    output = tmp_path / "model"
    flags = ("--device", DEVICE, "--precision", precision, "--deterministic", "false", *more)

    ended = launch(1, *flags, "--batch_size", 8, "--epochs", 6, "--output_dir", output)

    assert ended.process.returncode == 0, ended.err
    losses = _losses(metrics_of, output)
    assert losses[0] == pytest.approx(on_the_cpu[0], rel=FIRST_LOSS[precision] if not more else 5e-2)
    assert sum(losses[-8:]) < sum(losses[:8])


def test_one_rank_trains_under_ddp_with_the_backend_of_its_device(start: Callable[..., Any], tmp_path: Path) -> None:
    """With NCCL, on a GPU: the process group, DDP's buckets, the saving thread's own group, the end."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    script = Path(__file__).resolve().parents[2] / "training" / "train_ddp.py"
    flags = ("--dataset", "sample", "--model", "tiny", "--max_train_rows", "63", "--epochs", "1")

    ended = start([*launcher, script, *flags, "--device", DEVICE, "--output_dir", tmp_path / "model"])

    assert ended.process.returncode == 0, ended.err
    assert (tmp_path / "model" / "model.safetensors").is_file()


def _losses_of_joined_and_padded_rows(precision: str) -> tuple[list[float], list[float]]:
    ranks, found = here(DEVICE), []
    for is_joined in (True, False):
        # Dropout's masks are those of padded rows on the CPU, but not in the fused kernels of GPUs. On the CPU, rows
        # are joined for its sake.
        model = small_model("distilbert", dropout=0.0 if HAS_GPU else 0.1)
        strategy = DDPStrategy(model, TrainConfig(max_length=48), ranks, precision)
        assert strategy.why_padded == ""
        model.packs_rows = is_joined
        found.append(take_steps(strategy, range(1, 6), ranks=ranks))
        assert bool(model.dropout_stream.packing) is is_joined
    return found[0], found[1]


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=needs_gpu)])
@needs_flash
def test_joined_rows_have_the_losses_of_padded_ones(precision: str) -> None:
    joined, padded = run_on_ranks(1, _losses_of_joined_and_padded_rows, precision)[0]

    assert joined == pytest.approx(padded, rel=FIRST_LOSS[precision])


def _attention_with_dropout() -> tuple[float, float, bool]:
    # Equal scores, and values of 1: an output is the share of the weights that were kept, scaled.
    packing = Packing(torch.ones(16, 64, dtype=torch.int64), torch.device("cuda"))
    zeros = torch.zeros(1, 12, packing.tokens, 64, device="cuda", dtype=torch.bfloat16)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(flash_attention(zeros, zeros, zeros + 1, packing, dropout=0.1).float())
    return found[0].mean().item(), found[0].std().item(), torch.equal(*found)


@needs_gpu
@needs_flash
def test_joined_rows_drop_the_share_that_was_asked_for_and_the_same_with_the_same_seed() -> None:
    mean, std, is_repeated = run_on_ranks(1, _attention_with_dropout)[0]

    assert mean == pytest.approx(1, abs=5e-3)
    # Of 64 weights, each 0 or 1 / 0.9.
    assert std == pytest.approx((0.1 / 0.9 / 64) ** 0.5, rel=0.05)
    assert is_repeated


def _checkpoints(output: Path) -> list[str]:
    folder = output.with_name(output.name + ".run") / "checkpoints"
    return sorted(path.name for path in folder.glob("step_*")) if folder.is_dir() else []


# In bf16 rows are joined, so that attention is another kernel.
@pytest.mark.parametrize(
    ("how", "precision"), [(signal.SIGKILL, "fp32"), (signal.SIGTERM, "bf16")], ids=["killed", "stopped"]
)
def test_a_run_that_was_ended_on_its_device_resumes_to_the_same_weights(
    launch: Callable[..., Any], tmp_path: Path, how: signal.Signals, precision: str
) -> None:
    flags = (
        "--device",
        DEVICE,
        "--precision",
        precision,
        "--batch_size",
        8,
        "--save_every",
        2,
        "--epochs",
        8,
        "--log_every",
        60,
    )
    undisturbed, ended_early = tmp_path / "undisturbed", tmp_path / "model"
    assert launch(1, *flags, "--output_dir", undisturbed).process.returncode == 0

    run = launch(1, *flags, "--output_dir", ended_early, wait=False)
    run.wait_until(lambda: _checkpoints(ended_early))
    if how is signal.SIGKILL:
        run.kill()
    else:
        run.process.send_signal(how)
        assert run.wait() == 0
        assert "everything is saved" in run.out
    assert not (ended_early / "model.safetensors").exists()
    resumed = launch(1, *flags, "--output_dir", ended_early)

    assert resumed.process.returncode == 0, resumed.err
    assert "after step" in resumed.out
    weights = [(folder / "model.safetensors").read_bytes() for folder in (undisturbed, ended_early)]
    assert weights[0] == weights[1]
