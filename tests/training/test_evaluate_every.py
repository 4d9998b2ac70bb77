"""Evaluations within an epoch: recorded, resumed, and any of them can be the best."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import Run
from training.checkpointing.resume import _epochs_begun
from training.checkpointing.saver import STATE_FILE

Train = Callable[..., int]
Metrics = Callable[..., list[dict[str, Any]]]
# An epoch has 8 steps, and the run two epochs.
FLAGS = ("--batch_size", 8, "--evaluate_every", 3, "--keep_last", 9, "--best_metric", "loss")
EPOCHS = [0.375, 0.75, 1, 1.125, 1.5, 1.875, 2]


def _evaluations(metrics_of: Metrics, run: Path) -> list[dict[str, Any]]:
    return [{**one, "seconds": 0} for one in metrics_of(run, "epoch")]


@pytest.fixture(scope="module")
def finished(launch_shared: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run folder of a run with evaluations every three steps, never stopped, and what it printed."""
    output = tmp_path_factory.mktemp("evaluated") / "whole"
    ended = launch_shared(1, *FLAGS, "--output_dir", output)
    assert ended.process.returncode == 0, ended.err
    return output.with_name("whole.run"), ended.out


@pytest.fixture
def whole(finished: tuple[Path, str]) -> Path:
    return finished[0]


def test_a_run_evaluates_every_so_many_steps_and_at_the_end_of_each_epoch(
    finished: tuple[Path, str], metrics_of: Metrics
) -> None:
    whole, printed = finished
    evaluations = metrics_of(whole, "epoch")
    metrics = json.loads((whole.with_name("whole") / "metrics.json").read_text())
    best = min(evaluations, key=lambda one: one["validation"]["loss"])

    assert [one["step"] for one in evaluations] == [3, 6, 8, 9, 12, 15, 16]
    assert [one["epoch"] for one in evaluations] == EPOCHS
    assert metrics["best_epoch"] == best["epoch"]
    assert "0.375" in (whole / "report.html").read_text()
    assert "epoch 0.375" in " ".join(printed.split()) or best["epoch"] != 0.375


@pytest.mark.parametrize("of_an_older_version", [False, True])
@pytest.mark.parametrize(
    ("step", "per_epoch", "every", "begun"),
    [(10_000, 3375, 100, 3), (4689, 1563, 100, 3), (55_557, 58_000, 500, 1), (10, 20_001, 10, 1), (54, 54, 1, 1)],
)
def test_the_epoch_that_a_checkpoint_has_reached_is_told_in_spite_of_rounding(
    step: int, per_epoch: int, every: int, begun: int, of_an_older_version: bool
) -> None:
    evaluated = range(every, step + 1, every)
    epochs = [{"step": one, "epoch": int(e) if (e := one / per_epoch) == int(e) else round(e, 3)} for one in evaluated]
    known = {} if of_an_older_version else {"steps_per_epoch": per_epoch}
    assert _epochs_begun({"step": step, "epochs": epochs, **known}) == begun


def test_a_checkpoint_says_how_many_steps_an_epoch_has(whole: Path) -> None:
    state = json.loads((whole / "checkpoints" / "step_00000009" / STATE_FILE).read_text())
    assert state["steps_per_epoch"] == 8


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow), 9])
def test_a_run_resumed_from_an_evaluation_has_the_same_history(
    step: int, whole: Path, train_here: Train, metrics_of: Metrics, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "resumed.run")
    checkpoint = tmp_path / "resumed.run" / "checkpoints" / f"step_{step:08d}"

    assert train_here(*FLAGS, "--output_dir", tmp_path / "resumed", "--resume", checkpoint) == 0

    assert _evaluations(metrics_of, tmp_path / "resumed.run") == _evaluations(metrics_of, whole)


def test_early_stopping_counts_evaluations(train_here: Train, metrics_of: Metrics, tmp_path: Path) -> None:
    # With so small a rate no answer changes, so no evaluation is better than the first.
    flags = ("--batch_size", 8, "--evaluate_every", 3, "--learning_rate", 1e-9, "--early_stopping", 3)
    assert train_here(*flags, "--output_dir", tmp_path / "model") == 0

    assert [one["step"] for one in metrics_of(tmp_path / "model.run", "epoch")] == [3, 6, 8, 9]


def test_the_losses_of_the_steps_are_those_of_a_run_without_evaluations(
    whole: Path, train_here: Train, metrics_of: Metrics, tmp_path: Path
) -> None:
    assert train_here("--batch_size", 8, "--output_dir", tmp_path / "plain") == 0

    losses = [[one["loss"] for one in metrics_of(run)] for run in (whole, tmp_path / "plain.run")]
    assert losses[0] == losses[1]
