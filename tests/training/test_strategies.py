"""A run under one strategy goes on under another, started again by hand with other flags."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GLOBAL_BATCH = ("--batch_size", "4", "--save_every", "4", "--keep_last", "9")
TWO = ("--gradient_accumulation", "2")  # the same global batch where all ranks see the same rows
ON_FROM = 4


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, launch_shared: Callable[..., Any]) -> Path:
    """The run folder of DDP on two ranks, never stopped."""
    output = tmp_path_factory.mktemp("strategies") / "whole"
    ended = launch_shared(2, *GLOBAL_BATCH, "--output_dir", output)
    assert ended.process.returncode == 0, ended.err
    return output.with_name("whole.run")


def _stopped_at(step: int, whole_run: Path, target: Path) -> None:
    """A copy of the run as it was after ``step``."""
    shutil.copytree(whole_run, target)
    for checkpoint in (target / "checkpoints").glob("step_*"):
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(2, ("--strategy", "zero3"), id="zero3"),
        pytest.param(2, ("--strategy", "pp", *TWO), id="pp"),
        pytest.param(2, ("--strategy", "tp", *TWO), id="tp"),
        pytest.param(4, ("--strategy", "3d", "--pp", "2", "--tp", "2", *TWO), id="3d"),
        pytest.param(1, ("--strategy", "ddp", *TWO), id="one process"),
    ],
)
def test_a_ddp_run_resumes_under_another_strategy_with_the_same_losses(
    world_size: int,
    flags: tuple[str, ...],
    whole_run: Path,
    tmp_path: Path,
    launch: Callable[..., Any],
    metrics_of: Callable[..., list[dict[str, Any]]],
) -> None:
    _stopped_at(ON_FROM, whole_run, tmp_path / "moved.run")
    ended = launch(world_size, *GLOBAL_BATCH, *flags, "--output_dir", tmp_path / "moved")

    assert ended.process.returncode == 0, ended.err
    assert f"step_{ON_FROM:08d}" in ended.out
    expected = {record["step"]: record["loss"] for record in metrics_of(whole_run)}
    found = {record["step"]: record["loss"] for record in metrics_of(tmp_path / "moved.run")}
    assert found == pytest.approx(expected, rel=1e-4)
