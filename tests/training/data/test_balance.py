"""Uneven shares: agreed upon by all ranks, following their speeds, and without a trace in what is learnt."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.processes import here, run_on_ranks
from tests.training.parallelism.small_runs import GLOBAL_BATCH, small_rows, small_strategy, take_steps
from training.data.balance import Balance, Stopwatch
from training.data.batching import DataShard, MicroBatch, micro_batches_of_rank
from training.run.step import forward_backward

Gradients = dict[str, torch.Tensor]
BATCH = np.arange(GLOBAL_BATCH)


def _balance(said: list[str]) -> Balance:
    ranks = here()
    return Balance(nn.Identity(), ranks, DataShard(ranks.rank, ranks.world_size), 1 / GLOBAL_BATCH, said.append)


def _real_rows(share: list[MicroBatch]) -> int:
    return sum(int((micro_batch.weights > 0).sum()) for micro_batch in share)


def _agreed(seconds: Sequence[float]) -> tuple[list[float] | None, int, list[int]]:
    """The speeds agreed upon, how often that was said, and the rows of each rank by them."""
    balance, size = _balance(said := []), here().world_size
    balance.agree(100.0, seconds[here().rank])
    shares = [
        micro_batches_of_rank(small_rows(), BATCH, DataShard(rank, size), speeds=balance.speeds) for rank in range(size)
    ]
    return balance.speeds, len(said), [_real_rows(share) for share in shares]


@pytest.mark.parametrize(
    ("seconds", "rows"),
    [([1.0, 1.0, 2.0], [5, 5, 2]), ([1.0, 1.0, 1.04], [4, 4, 4]), ([1.0, 1.0, 500.0], [6, 5, 1])],
    ids=["one at half the speed", "equal but for noise", "one without hope keeps a row"],
)
def test_all_ranks_agree_on_rows_in_proportion_to_speed(seconds: list[float], rows: list[int]) -> None:
    results = run_on_ranks(3, _agreed, seconds)

    assert all(result == results[0] for result in results)
    speeds, times_said, found = results[0]
    assert found == rows
    assert times_said == (speeds is not None) == (rows != [4, 4, 4])


def _seconds_after(looks: int) -> float:
    """What a step takes on this rank, where a pass costs something whatever its rows."""
    fixed, of_all_rows = [(1.0, 10.0), (3.0, 10.0), (1.0, 30.0), (0.0, 10.0)][here().rank]
    balance = _balance([])
    for _ in range(looks):
        share = (balance.speeds or [0.25] * 4)[here().rank]
        seconds = fixed + of_all_rows * share
        balance.agree(share, seconds)
    return seconds


def test_shares_converge_to_equal_step_times() -> None:
    first, settled = run_on_ranks(4, _seconds_after, 1), run_on_ranks(4, _seconds_after, 8)

    assert max(first) > 1.3 * np.mean(first)
    assert max(settled) < 1.07 * np.mean(settled)


def _trained(name: str, speeds: list[float] | None, accumulation: int) -> tuple[Gradients, list[float]]:
    """The gradients of a first step, and the losses of five."""
    strategy = small_strategy(strategy=name)
    forward_backward(
        strategy, micro_batches_of_rank(small_rows(), BATCH, strategy.data_shard, accumulation, speeds=speeds), step=1
    )
    gradients = {name: parameter.grad.clone() for name, parameter in strategy.parameters.items()}
    strategy.optimizer.zero_grad()
    return gradients, take_steps(strategy, range(1, 6), accumulation=accumulation, speeds=speeds)


@pytest.fixture(scope="module")
def alone() -> tuple[Gradients, list[float]]:
    """What one process learns."""
    return run_on_ranks(1, _trained, "ddp", None, 1)[0]


@pytest.mark.parametrize(
    ("name", "speeds", "accumulation"),
    [
        pytest.param("ddp", [0.7, 0.3], 1, marks=pytest.mark.slow),
        ("zero1", [0.2, 0.5, 0.3], 2),
        ("ddp", [0.45, 0.1, 0.0, 0.45], 1),
        pytest.param("ddp", [0.05, 0.95], 3, marks=pytest.mark.slow),
        pytest.param("zero1", [0.4, 0.3, 0.2, 0.1], 1, marks=pytest.mark.slow),
    ],
)
def test_uneven_shares_give_the_gradients_and_losses_of_one_process(
    alone: tuple[Gradients, list[float]], name: str, speeds: list[float], accumulation: int
) -> None:
    expected, losses = alone

    for gradients, found in run_on_ranks(len(speeds), _trained, name, speeds, accumulation):
        assert found == pytest.approx(losses, rel=1e-5)
        for parameter, gradient in expected.items():
            difference = (gradients[parameter] - gradient).norm()
            assert difference <= 1e-6 * max(gradient.norm(), 1.0), parameter


def test_the_stopwatch_leaves_out_evaluation() -> None:
    model = nn.Linear(2, 2)
    stopwatch = Stopwatch(model, torch.device("cpu"))

    model.eval()(torch.ones(1, 2))
    in_evaluation = stopwatch.seconds()
    model.train()(torch.ones(1, 2))

    assert in_evaluation == 0
    assert stopwatch.seconds() > 0


# The last rank computes each of its rows many times; what comes of the first time alone counts.
SLOWED_SCRIPT = """
import sys
from training.config import parse_config
from training.distributed.group import join_ranks
from training.run.trainer import Trainer

config = parse_config(sys.argv[1:])
with join_ranks(config.device) as mine:
    trainer = Trainer(config, mine)
    network = trainer.context.strategy.parts[0]
    if mine.rank == mine.world_size - 1:
        repeat = lambda _, inputs: tuple(None if tensor is None else tensor.repeat(8, 1) for tensor in inputs)
        network.register_forward_pre_hook(repeat)
        network.register_forward_hook(lambda _, inputs, logits: logits[: len(logits) // 8])
    trainer.fit()
"""


@pytest.mark.slow
def test_a_run_with_a_slow_rank_shifts_rows_and_learns_what_one_process_learns(
    launch: Callable[..., Any], metrics_of: Callable[..., Any], tmp_path: Path
) -> None:
    script = tmp_path / "slowed.py"
    script.write_text(SLOWED_SCRIPT)
    common = ("--deterministic", "false", "--epochs", "4")

    alone = launch(1, *common, "--batch_size", 16, "--output_dir", tmp_path / "alone")
    balanced = launch(
        *(2, *common, "--batch_size", 8, "--balance", "auto", "--output_dir", tmp_path / "both"), script=script
    )

    assert alone.process.returncode == 0, alone.err
    assert balanced.process.returncode == 0, balanced.err
    assert "Balance: the ranks take" in balanced.out
    losses = [[record["loss"] for record in metrics_of(tmp_path / f"{run}.run")] for run in ("alone", "both")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
