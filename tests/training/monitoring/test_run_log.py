import json
import math
import os
import platform
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training.monitoring import RunLog, StepMetrics, read_metrics

Step = Callable[..., StepMetrics]


def _steps(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run_dir) if record["kind"] == "step"]


def _log_steps(run_dir: Path, step_metrics: Step, first: int, last: int, resume_step: int) -> None:
    log = RunLog(run_dir, resume_step)
    for step in range(first, last + 1):
        log.step(step_metrics(step, loss=float(resume_step)))
    log.close()


def test_resuming_drops_the_lines_after_the_checkpoint(tmp_path: Path, step_metrics: Step) -> None:
    _log_steps(tmp_path, step_metrics, 1, 8, resume_step=0)
    _log_steps(tmp_path, step_metrics, 6, 10, resume_step=5)
    assert _steps(tmp_path) == list(range(1, 11))
    assert read_metrics(tmp_path)[5]["loss"] == 5.0


def test_going_back_drops_the_lines_after_the_step_and_goes_on(tmp_path: Path, step_metrics: Step) -> None:
    log = RunLog(tmp_path, resume_step=0)
    for step in range(1, 9):
        log.step(step_metrics(step, loss=1.0))

    log.rolled_back(5)
    for step in range(6, 8):
        log.step(step_metrics(step, loss=2.0))
    log.close()

    assert _steps(tmp_path) == list(range(1, 8))
    assert [record["loss"] for record in read_metrics(tmp_path)] == [1.0] * 5 + [2.0] * 2


def test_going_back_in_a_folder_that_cannot_be_written_costs_a_line_and_not_the_run(
    tmp_path: Path, step_metrics: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    log = RunLog(tmp_path, resume_step=0, say=said.append)
    log.step(step_metrics(1))
    monkeypatch.setattr(secrets, "token_hex", lambda _: "known")
    in_the_way = f".metrics.jsonl.{platform.node()}.{os.getpid()}.known.tmp"
    (tmp_path / in_the_way).mkdir()  # of the new file, for root too

    log.rolled_back(0)
    log.step(step_metrics(1))
    log.close()

    assert _steps(tmp_path) == [1, 1]
    assert said == [f"{tmp_path}/metrics.jsonl: keeps its lines after step 0 (Is a directory); the run goes on"]


def test_going_back_leaves_the_trackers_at_work(tmp_path: Path, step_metrics: Step) -> None:
    threads = set(threading.enumerate())
    log = RunLog(tmp_path, resume_step=0)
    [tracker] = {thread for thread in threading.enumerate() if thread.name == "tracker TensorBoard"} - threads
    for step in range(1, 9):
        log.step(step_metrics(step, loss=1.0))

    log.rolled_back(5)

    assert tracker.is_alive()
    log.step(step_metrics(6, loss=2.0))
    log.close()
    losses = _load_events(tmp_path).Scalars("train/loss")
    assert [(event.step, event.value) for event in losses] == [*((step, 1.0) for step in range(1, 6)), (6, 2.0)]
    assert len(list(tmp_path.glob("events.out.tfevents*"))) == 1


def test_a_fresh_run_in_an_old_folder_starts_with_no_line(tmp_path: Path, step_metrics: Step) -> None:
    _log_steps(tmp_path, step_metrics, 1, 8, resume_step=0)
    _log_steps(tmp_path, step_metrics, 1, 2, resume_step=0)
    assert _steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("torn", [b'{"kind": "step", "st', b"\x00\x00\x00", b"12"])
def test_resuming_drops_a_line_that_a_crash_tore(tmp_path: Path, step_metrics: Step, torn: bytes) -> None:
    _log_steps(tmp_path, step_metrics, 1, 3, resume_step=0)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    _log_steps(tmp_path, step_metrics, 4, 4, resume_step=3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_a_resumed_run_forgets_the_test_of_the_finished_one(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    write_run(tmp_path, steps=4, epochs=1)
    RunLog(tmp_path, resume_step=4).close()
    assert {record["kind"] for record in read_metrics(tmp_path)} == {"step", "epoch"}


def test_each_line_is_on_the_disk_before_the_next_step(tmp_path: Path, step_metrics: Step) -> None:
    log = RunLog(tmp_path, resume_step=0)
    log.step(step_metrics(1))
    assert _steps(tmp_path) == [1]
    log.close()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_null(tmp_path: Path, step_metrics: Step, loss: float) -> None:
    log = RunLog(tmp_path, resume_step=0)
    log.step(step_metrics(1, loss=loss))
    log.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None


def test_tensorboard_reads_the_same_figures(
    tmp_path: Path, write_run: Callable[..., Path], evaluation: Callable[..., dict[str, Any]]
) -> None:
    write_run(tmp_path, steps=6, epochs=2)
    events = _load_events(tmp_path)
    losses = [record["loss"] for record in read_metrics(tmp_path) if record["kind"] == "step"]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses)
    assert [event.step for event in events.Scalars("validation/accuracy")] == [3, 6]
    assert events.Scalars("test/accuracy")[0].value == pytest.approx(evaluation()["accuracy"])


def test_tensorboard_shows_no_step_of_a_resumed_run_twice(tmp_path: Path, step_metrics: Step) -> None:
    _log_steps(tmp_path, step_metrics, 1, 8, resume_step=0)
    _log_steps(tmp_path, step_metrics, 6, 7, resume_step=5)
    losses = _load_events(tmp_path).Scalars("train/loss")
    assert [(event.step, event.value) for event in losses] == [(s, 0.0 if s < 6 else 5.0) for s in range(1, 8)]


def _load_events(run_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_dir)).Reload()
