"""A size that is found: the same on all ranks, within the memory, kept by the run, and no trace in the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from common.errors import TrainingFailure
from tests.processes import here, run_on_ranks
from tests.training.parallelism.cases import ALONE
from tests.training.parallelism.small_models import small_model
from tests.training.parallelism.small_runs import small_strategy, take_steps, whole_weights
from training.config import TrainConfig
from training.parallelism.registry import STRATEGIES
from training.parallelism.strategy import Strategy
from training.run.batch_size import FoundSize, find_batch_size, most_rows

Train = Callable[..., int]
LENGTH = 40
MIB = 2**20
TARGET = np.zeros(1, dtype=np.int64)


def find_and_train(strategy: str) -> tuple[FoundSize, bool, list[float], list[float]]:
    """What this rank finds, whether torch's random state stayed, and the losses of steps with and without a search."""
    fields = {"strategy": strategy, "max_length": LENGTH, "check_gradient_sync": 2}
    searched, plain = small_strategy(**fields), small_strategy(**fields)
    state = torch.get_rng_state()
    found = find_batch_size(searched, here(), TARGET, most=4)
    unmoved = state.equal(torch.get_rng_state())
    losses = [take_steps(each, (1, 2)) for each in (searched, plain)]
    weights = [whole_weights(each) for each in (searched, plain)]
    if here().is_first:
        assert all(tensor.equal(weights[1][name]) for name, tensor in weights[0].items())
    return found, unmoved, *losses


@pytest.mark.parametrize(
    "strategy", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero1")), "zero3"]
)
def test_ranks_find_the_same_size_and_train_as_if_nothing_had_been_tried(strategy: str) -> None:
    first, second = run_on_ranks(2, find_and_train, strategy)

    assert first[0] == second[0]
    assert first[0].rows == 4
    for _, unmoved, searched, plain in (first, second):
        assert unmoved
        assert searched == plain


def strategy_alone() -> Strategy:
    config = TrainConfig(max_length=LENGTH)
    return STRATEGIES["ddp"](small_model("distilbert"), config, ALONE, "fp32")


def test_no_size_is_taken_that_needs_more_than_the_limit() -> None:
    strategy = strategy_alone()
    unlimited = find_batch_size(strategy, ALONE, TARGET, most=1)
    found = find_batch_size(strategy, ALONE, TARGET, most=1, kept=2048, limit=unlimited.peak + 64 * MIB)
    enough = find_batch_size(strategy, ALONE, TARGET, most=1, kept=192)

    assert (enough.rows, enough.why) == (192, "")
    assert found.rows < 2048
    assert found.peak <= found.limit
    assert "would not fit" in str(found)
    with pytest.raises(TrainingFailure, match=r"--batch_size auto: not one row of 40 tokens fits"):
        find_batch_size(strategy, ALONE, TARGET, most=64, limit=unlimited.peak / 2)


@pytest.mark.parametrize(
    ("train_rows", "data_ranks", "expected"), [(57, 1, 2), (57, 4, 1), (2_000, 2, 32), (10**6, 8, 256)]
)
def test_the_size_leaves_twenty_steps_in_an_epoch(train_rows: int, data_ranks: int, expected: int) -> None:
    assert most_rows(train_rows, data_ranks, accumulation=1) == expected


@pytest.mark.slow
def test_a_run_trains_as_with_the_number_that_it_finds_and_keeps_it_when_it_resumes(
    train_here: Train,
    metrics_of: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    flags = ("--deterministic", "false", "--epochs", 1, "--max_train_rows", 140, "--save_every", 8, "--keep_last", 9)

    def train(name: str, size: object, *more: object) -> list[float]:
        assert train_here(*flags, "--batch_size", size, "--output_dir", tmp_path / name, *more) == 0
        return [record["loss"] for record in metrics_of(tmp_path / f"{name}.run")]

    found = train("auto", "auto")
    size = yaml.safe_load((tmp_path / "auto.run" / "config.yaml").read_text())["batch_size"]
    assert f"batch size auto: {size} rows per rank (peak " in capfd.readouterr().out
    assert train("given", size) == found
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("auto", "given")]
    assert weights[0] == weights[1]

    # A size that a search would not choose for so few rows.
    kept = train("kept", 12)
    last = tmp_path / "kept.run" / "checkpoints" / "step_00000008"
    assert train("kept", "auto", "--resume", last) == kept
    assert yaml.safe_load((tmp_path / "kept.run" / "config.yaml").read_text())["batch_size"] == 12
