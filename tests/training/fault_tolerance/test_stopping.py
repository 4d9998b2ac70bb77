"""A run that is asked to stop in an evaluation gives it up, and ends, when it goes on, as if nothing had been."""

import itertools
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.fault_tolerance.started_ranks import StartedRanks
from training.data import prepare
from training.monitoring.status import read_statuses
from training.run import agreement, finish, validation
from training.run import step as step_module

FLAGS = ("--batch_size", 8, "--save_every", 0)


def _result(output: Path) -> dict[str, Any]:
    metrics = json.loads((output / "metrics.json").read_text())
    return {"weights": (output / "model.safetensors").read_bytes(), **metrics}


def _ask_before_evaluation(number: int) -> Callable[..., Any]:
    """An evaluation before whose ``number``-th call in this process the run is asked to stop."""
    evaluate, calls = validation.evaluate, itertools.count(1)

    def evaluates(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(*arguments, **options)

    return evaluates


@pytest.mark.slow
def test_interrupted_evaluations_are_repeated_on_resume(
    train_here: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    metrics_of: Callable[..., Any],
) -> None:
    flags, output = (*FLAGS, "--stopped_exit_code", 75), tmp_path / "model"
    assert train_here(*flags, "--output_dir", tmp_path / "undisturbed") == 0

    # In the first epoch's validation, in the last one's and in the test after it.
    for room, steps, epochs in ((validation, 8, 0), (validation, 16, 1), (finish, 16, 2)):
        with monkeypatch.context() as once:
            once.setattr(room, "evaluate", _ask_before_evaluation(1 if room is finish or not epochs else 2))
            start_afresh = ("--resume", "none") if not epochs else ()
            assert train_here(*flags, "--output_dir", output, *start_afresh) == 75
        how = "rerun the command without --resume none" if start_afresh else "rerun the same command"
        said = f"Stopped at step {steps}; everything is saved. To resume, {how}."
        assert said in capfd.readouterr().out
        assert "\nresume: auto\n" in (tmp_path / "model.run" / "config.yaml").read_text()
        assert not output.exists()
        assert len(metrics_of(tmp_path / "model.run", "epoch")) == epochs
        assert [status.state for status in read_statuses(tmp_path / "model.run")] == ["stopped"]

    assert train_here(*flags, "--output_dir", output) == 0
    assert _result(output) == _result(tmp_path / "undisturbed")
    assert [epoch["epoch"] for epoch in metrics_of(tmp_path / "model.run", "epoch")] == [1, 2]


def test_a_run_stopped_while_data_is_prepared_leaves_nothing_behind(
    train_here: Callable[..., int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load = prepare.load_data

    def loads(*arguments: Any, **flags: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return load(*arguments, **flags)

    monkeypatch.setattr(prepare, "load_data", loads)

    # A cache of its own: what another test has read is not read again.
    code = train_here(*FLAGS, "--output_dir", tmp_path / "model", "--cache_dir", tmp_path / "cache")

    assert code == 75
    assert "Stopped before the first step, nothing to save." in capfd.readouterr().out
    assert not list(tmp_path.glob("model*"))


def _one_rank_is_asked(rank: int) -> None:
    if rank == 1:
        validation.evaluate = _ask_before_evaluation(1)


@pytest.mark.slow
def test_all_ranks_interrupt_an_evaluation_if_one_of_them_is_asked_to_stop(
    start_ranks: Callable[..., StartedRanks], tmp_path: Path
) -> None:
    stopped = start_ranks(2, "--save_every", 0, fault=_one_rank_is_asked)
    alone = start_ranks(2, "--save_every", 0, "--output_dir", tmp_path / "undisturbed")
    assert [stopped.exit_code(rank) for rank in (0, 1)] == [0, 0]
    assert "Stopped at step 8; everything is saved." in stopped.out()

    resumed = start_ranks(2, "--save_every", 0)

    assert [ranks.exit_code(rank) for ranks in (resumed, alone) for rank in (0, 1)] == [0, 0, 0, 0]
    assert _result(tmp_path / "model") == _result(tmp_path / "undisturbed")


def _takes_its_time_between_agreements(rank: int) -> None:
    """As on a GPU, where agreeing costs a wait for the device: not after each step. Rank 1 is the slow one."""
    agreement.Agreement._syncs_each_step = False
    share = step_module.micro_batches_of_rank

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.4 * rank)
        return share(*arguments, **options)

    step_module.micro_batches_of_rank = slow


def test_a_stop_does_not_wait_for_the_next_line_of_the_log(
    start_ranks: Callable[..., StartedRanks], tmp_path: Path
) -> None:
    flags = ("--epochs", 9, "--batch_size", 1, "--save_every", 0, "--log_every", 60)
    ranks = start_ranks(2, *flags, fault=_takes_its_time_between_agreements)

    def steps_done() -> int:
        return min((status.step for status in read_statuses(tmp_path / "model.run")), default=0)

    ranks.wait_until(lambda: steps_done() >= 6)
    asked_at = steps_done()

    ranks.signal(1, signal.SIGTERM)

    assert [ranks.exit_code(rank) for rank in (0, 1)] == [0, 0]
    stopped_at = int(ranks.out().partition("Stopped at step ")[2].partition(";")[0])
    assert stopped_at - asked_at <= 8  # two seconds' worth, and what a status file is late
