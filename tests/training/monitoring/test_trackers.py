"""Curves reach Weights & Biases, MLflow and Trackio, and none of them can slow or stop a run."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.inference.servers import free_port
from tests.processes import wait_until
from tests.training.monitoring.conftest import _step
from training.config import TRACKERS as NAMES
from training.monitoring import trackers
from training.monitoring.events import RolledBack, RunEnded, RunTested
from training.monitoring.trackers import TRACKERS, TrackedRun, Tracker, Trackers, TrackerThread


class _Kept(Tracker):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.figures: list[tuple[Mapping[str, float], int]] = []
        self.earlier: str | None = None
        self.finished: bool | None = None

    def start(self, run: TrackedRun, earlier: str | None) -> str:
        self.earlier = earlier
        return earlier or f"{run.name}-1"

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self.figures.append((scalars, step))

    def finish(self, *, finished: bool) -> None:
        self.finished = finished


class _Broken(_Kept):
    def log(self, scalars: Mapping[str, float], step: int) -> None:
        raise ConnectionError("the service says no\nand explains it at length")


class _Hanging(_Kept):
    def log(self, scalars: Mapping[str, float], step: int) -> None:
        threading.Event().wait()


@pytest.fixture
def started(tmp_path: Path) -> Callable[[Tracker], tuple[TrackerThread, list[str]]]:
    """`started(tracker)`: it at work on a run, and the lines that are said of it."""

    def start(tracker: Tracker) -> tuple[TrackerThread, list[str]]:
        said: list[str] = []
        folder = tmp_path / "model.run"
        folder.mkdir(exist_ok=True)
        return TrackerThread("kept", tracker, TrackedRun(folder, {}, 1), said.append), said

    return start


def test_a_tracker_takes_all_figures_in_their_order(started: Callable[..., Any]) -> None:
    tracker = _Kept()
    thread, said = started(tracker)
    for step in range(1, 200):
        thread.put({"train/loss": 1 / step}, step)
    thread.close(finished=True)

    assert tracker.figures == [({"train/loss": 1 / step}, step) for step in range(1, 200)]
    assert tracker.finished is True
    assert said == []


def test_a_resumed_run_continues_under_its_name(started: Callable[..., Any]) -> None:
    first, second = _Kept(), _Kept()
    started(first)[0].close(finished=False)
    started(second)[0].close(finished=True)

    assert first.earlier is None
    assert second.earlier == "model-1"


def test_a_tracker_is_dropped_at_its_first_error_with_one_line(started: Callable[..., Any]) -> None:
    thread, said = started(_Broken())
    for step in range(1, 100):
        thread.put({"train/loss": 1.0}, step)
    thread.close(finished=True)

    assert said == ["kept: dropped, the run continues without it (the service says no)"]


def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end(
    started: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "SECONDS_TO_LEAVE", 0.2)
    monkeypatch.setattr(trackers, "LONGEST_QUEUE", 50)
    thread, said = started(_Hanging())
    for step in range(1, 101):
        thread.put({"train/loss": 1.0}, step)
    thread.close(finished=False)

    [line] = said
    assert line.startswith("kept: too slow, ")
    assert line.endswith(" records did not reach it")
    # One of them it took; one may have found its place in the queue.
    assert int(line.split()[3]) in (99, 100)


def test_a_rollback_keeps_the_trackers_running(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    reader = Trackers(tmp_path, resume_step=0)
    [tracker] = {thread for thread in threading.enumerate() if thread.name == "tracker TensorBoard"} - threads
    for step in range(1, 9):
        reader.receive(_step(step, loss=1.0))

    reader.receive(RolledBack(5, 8, []))

    assert tracker.is_alive()
    reader.receive(_step(6, loss=2.0))
    reader.close()
    losses = _load_events(tmp_path).Scalars("train/loss")
    assert [(event.step, event.value) for event in losses] == [*((step, 1.0) for step in range(1, 6)), (6, 2.0)]
    assert len(list(tmp_path.glob("events.out.tfevents*"))) == 1


def test_tensorboard_gets_the_figures_of_steps_epochs_and_test(
    tmp_path: Path, epoch_metrics: Callable[..., Any], evaluation: Callable[..., dict[str, Any]]
) -> None:
    reader = Trackers(tmp_path, resume_step=0)
    for event in (*map(_step, range(1, 4)), epoch_metrics(1, 3), RunTested(3, evaluation()), RunEnded(finished=True)):
        reader.receive(event)
    reader.close()

    events = _load_events(tmp_path)
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx([_step(s).loss for s in (1, 2, 3)])
    assert [event.step for event in events.Scalars("validation/accuracy")] == [3]
    assert events.Scalars("test/accuracy")[0].value == pytest.approx(evaluation()["accuracy"])


def test_tensorboard_shows_no_step_of_a_resumed_run_twice(tmp_path: Path) -> None:
    for first, last, resume_step in ((1, 8, 0), (6, 7, 5)):
        reader = Trackers(tmp_path, resume_step)
        for step in range(first, last + 1):
            reader.receive(_step(step, loss=float(resume_step)))
        reader.close()
        # TensorBoard reads the files in the order of their names, which begin with the second of their start.
        ended = int(time.time())
        wait_until(lambda ended=ended: int(time.time()) > ended)

    losses = _load_events(tmp_path).Scalars("train/loss")
    assert [(event.step, event.value) for event in losses] == [(s, 0.0 if s < 6 else 5.0) for s in range(1, 8)]


def _load_events(run_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_dir)).Reload()


def test_an_unknown_tracker_is_one_line_and_writes_nothing(
    train_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train_here("--output_dir", tmp_path / "model", "--trackers", "wandb,neptune") == 2
    assert capfd.readouterr().err == (
        "error: --trackers wandb,neptune: 'neptune' is not one of wandb, mlflow, trackio [flag-value]\n"
    )
    assert list(tmp_path.glob("model*")) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    train_here: Callable[..., int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setitem(sys.modules, name, None)

    assert train_here("--output_dir", tmp_path / "model", "--trackers", name) == 2
    assert capfd.readouterr().err == (
        f'error: --trackers {name}: is not installed; pip install "distrinews[{name}]", or leave it out '
        "[package-missing]\n"
    )
    assert list(tmp_path.glob("model*")) == []


def test_the_flag_knows_every_tracker() -> None:
    assert tuple(TRACKERS) == NAMES


def _track_twice(run_dir: Path, name: str) -> None:
    """Ten steps of a run whose process was stopped after the fifth."""
    run_dir.mkdir()
    for first in (1, 6):
        said: list[str] = []
        reader = Trackers(run_dir, first - 1, [name], {"epochs": 3, "output_dir": str(run_dir)}, said.append)
        for step in range(first, first + 5):
            reader.receive(_step(step, loss=float("nan") if step == 3 else float(step)))
        if first == 6:
            reader.receive(RunTested(10, {"accuracy": 0.9, "loss": 0.3}))
            reader.receive(RunEnded(finished=True))
        reader.close()
        assert said == []


@pytest.fixture
def tracked_twice(tmp_path: Path, start: Callable[..., Any]) -> Callable[..., Path]:
    """`tracked_twice(name, **env)`: the folder of a run that a tracker saw two processes of; those have time to end."""

    def track(name: str, **env: str) -> Path:
        pytest.importorskip(name, reason=f"the extra {name} is not installed")
        run_dir = tmp_path / "model.run"
        here = "tests.training.monitoring.test_trackers"
        patience = f"import {here} as here; here.trackers.SECONDS_TO_LEAVE = here.trackers.SECONDS_TO_FINISH = 200.0"
        command = f"{patience}; here._track_twice(here.Path({str(run_dir)!r}), {name!r})"
        run = start([sys.executable, "-c", command], env=env)
        assert run.process.returncode == 0, run.err
        return run_dir

    return track


@pytest.mark.slow
def test_mlflow_keeps_one_run_over_a_resume(tracked_twice: Callable[..., Path]) -> None:
    run_dir = tracked_twice("mlflow")

    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("distrinews").experiment_id])
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [loss.step for loss in losses] == list(range(1, 11))
    assert losses[9].value == 10.0
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "model"
    assert run.data.params["epochs"] == "3"
    assert run.data.metrics["test/accuracy"] == 0.9


@pytest.mark.slow
def test_trackio_keeps_one_run_over_a_resume(tracked_twice: Callable[..., Path], tmp_path: Path) -> None:
    run_dir = tracked_twice("trackio", TRACKIO_DIR=str(tmp_path / "trackio"))

    known_as = json.loads((run_dir / "trackers.json").read_text())["trackio"]
    with closing(sqlite3.connect(tmp_path / "trackio" / "distrinews.db")) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in rows} == {known_as}
    assert [step for _, step, _ in rows] == [*range(1, 11), 10]
    assert json.loads(rows[9][2])["train/loss"] == 10.0
    assert json.loads(rows[10][2])["test/accuracy"] == 0.9


@pytest.mark.slow
def test_wandb_keeps_one_run_over_a_resume(tracked_twice: Callable[..., Path]) -> None:
    run_dir = tracked_twice("wandb", WANDB_MODE="offline")

    run_id = json.loads((run_dir / "trackers.json").read_text())["wandb"]
    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    history = [row for file in files for row in _wandb_history(file)]
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    assert [row["step"] for row in history] == [*range(1, 11), 10]
    assert history[9]["train/loss"] == 10.0
    assert history[10]["test/accuracy"] == 0.9


def _wandb_history(file: Path) -> Iterator[dict[str, Any]]:
    """What a file holds for Weights & Biases: after 7 bytes, LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:
            at += 32768 - at % 32768
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            if record.history.item:
                yield {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}


@pytest.mark.slow
@pytest.mark.parametrize("retries", ["0", "7"])
def test_a_service_that_is_down_prints_one_line_and_does_not_end_the_run(
    launch: Callable[..., Any], tmp_path: Path, retries: str
) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    env = {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{free_port()}", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": retries}
    run = launch(1, "--batch_size", 8, "--output_dir", tmp_path / "model", "--trackers", "mlflow", env=env)

    assert run.process.returncode == 0, run.err
    [line] = [line for line in run.out.splitlines() if line.startswith("mlflow: ")]
    assert "dropped, the run continues without it" in line if retries == "0" else "did not reach it" in line
    assert (tmp_path / "model" / "model.safetensors").exists()
