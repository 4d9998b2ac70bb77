"""events.jsonl is the record of a run over its restarts, metrics.jsonl has one line per step; neither can end a run."""

from __future__ import annotations

import json
import os
import platform
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import TrainingFailure
from tests.processes import RankFailure, here, run_on_ranks
from tests.training.conftest import TRAINING
from tests.training.monitoring.small_training import train_on_ranks
from training.distributed.ranks import Ranks
from training.monitoring import StepMetrics
from training.monitoring.events import (
    EventStream,
    JsonLines,
    MetricsFile,
    RolledBack,
    RunStarted,
    StepsAgreed,
    read_events,
    read_lines,
    read_metrics,
)
from training.monitoring.phases import Phases
from training.monitoring.run_folder import restart_split

Step = Callable[..., StepMetrics]
ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory, base_flags: tuple[str, ...]) -> Path:
    """The run folder of two ranks, one of them killed in step 12; started again, they finish."""
    output = tmp_path_factory.mktemp("events") / "model"
    flags = [*base_flags, "--batch_size", "4", "--log_every", "4", "--output_dir", str(output)]
    with pytest.raises(RankFailure, match=r"rank 1 ended without a word|another rank went away"):
        run_on_ranks(2, train_on_ranks, flags, 0, 12)
    run_on_ranks(2, train_on_ranks, flags, 1)
    return output.with_name("model.run")


def _of_rank_0(run_dir: Path, restart: int) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["rank"] == 0 and event["restart"] == restart]


def test_the_events_of_a_run_are_recorded_in_order(killed_and_resumed: Path) -> None:
    told = _of_rank_0(killed_and_resumed, restart=0)
    # A checkpoint is heard of when the thread that writes it is through.
    kinds = [event["kind"] for event in told if event["kind"] not in ("checkpoint", "straggler", "failed")]
    steps = [event for event in told if event["kind"] == "step"]

    assert kinds == ["imported", "start", "first_step", "step", "step", "step", "epoch"]
    assert [event["step"] for event in steps] == [1, 4, 8]
    for event in steps:
        assert 0 < event["loss"] < 3
        assert event["samples_per_second"] > 0
        assert event["tokens_per_second"] > event["samples_per_second"]


def test_events_after_a_restart_have_its_number(killed_and_resumed: Path) -> None:
    told = _of_rank_0(killed_and_resumed, restart=1)
    kinds = [event["kind"] for event in told if event["kind"] not in ("straggler", "step")]
    resumed = next(event for event in told if event["kind"] == "resumed")

    assert kinds == ["imported", "resumed", "start", "first_step", "epoch", "checkpoint", "test", "finished"]
    assert resumed["step"] == 8
    assert [event["step"] for event in told if event["kind"] == "step"] == [12, 16]
    assert next(event for event in told if event["kind"] == "first_step")["step"] == 9


def test_each_event_has_its_time_rank_restart_and_step(killed_and_resumed: Path) -> None:
    events = read_events(killed_and_resumed)
    times = [event["time"] for event in events if event["rank"] == 0]

    assert all({"time", "rank", "restart", "step", "kind"} <= event.keys() for event in events)
    assert times == sorted(times)
    assert abs(times[-1] - time.time()) < 600
    assert len(events) == len((killed_and_resumed / "events.jsonl").read_text().splitlines())


def test_the_time_of_a_restart_is_split(killed_and_resumed: Path) -> None:
    [split] = restart_split(killed_and_resumed)
    first_step = next(e for e in _of_rank_0(killed_and_resumed, 1) if e["kind"] == "first_step")

    moments = [split.lost, split.started, split.imported, split.grouped, split.loaded, split.stepped]
    # A process's start is known to a hundredth of a second.
    assert all(before <= after + 0.02 for before, after in pairwise(moments))
    assert split.stepped == first_step["time"]
    assert split.seconds()["total"] == pytest.approx(split.stepped - split.lost)


def test_the_launchers_log_gives_the_time_at_which_the_loss_was_detected(killed_and_resumed: Path) -> None:
    [split] = restart_split(killed_and_resumed)
    seen = (split.lost + split.started) / 2
    clock = time.strftime("%m%d %H:%M:%S", time.localtime(seen)) + f"{seen % 1:.6f}"[1:]
    line = f"E{clock} 4711 torch/distributed/elastic/multiprocessing/api.py:1003] failed (exitcode: -9) local_rank: 1"
    [told] = restart_split(killed_and_resumed, f"something else\n{line}\nthe end")

    assert told == replace(split, detected=pytest.approx(seen, abs=1e-5))
    parts = told.seconds()
    total = parts.pop("total")
    assert list(parts) == ["detection", "rendezvous", "import", "group", "load", "first_step"]
    assert sum(parts.values()) == pytest.approx(total)


def test_a_run_without_a_restart_has_no_split(tmp_path: Path) -> None:
    log = EventStream(tmp_path, replace(ALONE, milestones={"imported": time.time()}), Phases())
    with log.recording():
        log.publish(RunStarted(0, 10, []))

    assert restart_split(tmp_path) == []


def test_the_last_event_of_a_failed_run_has_the_reason(tmp_path: Path) -> None:
    log = EventStream(tmp_path, replace(ALONE, rank=3, world_size=4, restart=2), Phases())
    with pytest.raises(TrainingFailure), log.recording():
        raise TrainingFailure("step 7: the loss is nan\nand more")

    [event] = read_events(tmp_path)
    assert (event["kind"], event["rank"], event["restart"]) == ("failed", 3, 2)
    assert event["message"] == "step 7: the loss is nan and more"


def test_nothing_is_written_before_the_folder_is_the_runs_own(tmp_path: Path) -> None:
    log = EventStream(tmp_path, replace(ALONE, milestones={"imported": 5.0}), Phases())
    log.write("resumed", checkpoint="step_00000008")

    assert list(tmp_path.iterdir()) == []
    with log.recording():
        pass
    assert [(event["kind"], event["time"] > 5) for event in read_events(tmp_path)] == [
        ("imported", False),
        ("resumed", True),
    ]


def test_logged_steps_are_the_first_the_last_and_every_so_many(tmp_path: Path, step_metrics: Step) -> None:
    stream, curves = EventStream(tmp_path, ALONE, Phases(), log_every=4), MetricsFile(tmp_path, resume_step=0)
    stream.subscribers.append(curves)
    with stream.recording():
        stream.publish(RunStarted(0, 10, []))
        stream.publish(StepsAgreed([step_metrics(step) for step in range(1, 11)]))

    assert [event["step"] for event in read_events(tmp_path) if event["kind"] == "step"] == [1, 4, 8, 10]
    assert _steps(tmp_path) == [1, 4, 8, 10]


@pytest.mark.slow
def test_a_full_disk_loses_events_and_not_the_run(train_here: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "model.run").mkdir()
    (tmp_path / "model.run" / "events.jsonl").symlink_to("/dev/full")

    assert train_here("--batch_size", 8, "--epochs", 1, "--output_dir", tmp_path / "model") == 0
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank_and_each_part_of_it_is_known(
    start: Callable[..., Any], base_flags: tuple[str, ...], tmp_path: Path
) -> None:
    output = tmp_path / "model"
    run_dir = output.with_name("model.run")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=1"]
    flags = ["--batch_size", "4", "--epochs", "6", "--save_every", "2", "--output_dir", str(output)]
    run = start([*launcher, TRAINING / "train_ddp.py", *base_flags, *flags], wait=False)
    run.wait_until(lambda: any(event["step"] >= 12 for event in read_events(run_dir)))
    os.kill(run.ranks[1], signal.SIGKILL)
    killed = time.time()

    assert run.wait() == 0, run.err
    [split] = restart_split(run_dir, run.err)
    moments = [killed, split.detected, split.started, split.imported, split.grouped, split.loaded, split.stepped]
    assert {event["restart"] for event in read_events(run_dir)} == {0, 1}
    # Its process's start is known to a hundredth of a second.
    assert all(before <= after + 0.02 for before, after in pairwise(moments))
    assert split.lost <= split.detected


def _steps(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run_dir) if record["kind"] == "step"]


def _write_steps(run_dir: Path, step_metrics: Step, first: int, last: int, resume_step: int) -> None:
    file = MetricsFile(run_dir, resume_step)
    for step in range(first, last + 1):
        file.receive(step_metrics(step, loss=float(resume_step)))


def test_resuming_drops_the_lines_after_the_checkpoint(tmp_path: Path, step_metrics: Step) -> None:
    _write_steps(tmp_path, step_metrics, 1, 8, resume_step=0)
    _write_steps(tmp_path, step_metrics, 6, 10, resume_step=5)
    assert _steps(tmp_path) == list(range(1, 11))
    assert read_metrics(tmp_path)[5]["loss"] == 5.0


def test_a_rollback_drops_the_lines_after_its_step(tmp_path: Path, step_metrics: Step) -> None:
    file = MetricsFile(tmp_path, resume_step=0)
    for step in range(1, 9):
        file.receive(step_metrics(step, loss=1.0))

    file.receive(RolledBack(5, 8, []))
    for step in range(6, 8):
        file.receive(step_metrics(step, loss=2.0))

    assert _steps(tmp_path) == list(range(1, 8))
    assert [record["loss"] for record in read_metrics(tmp_path)] == [1.0] * 5 + [2.0] * 2


def test_a_rollback_in_a_folder_that_cannot_be_written_prints_a_line_and_does_not_end_the_run(
    tmp_path: Path, step_metrics: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    file = MetricsFile(tmp_path, resume_step=0, say=said.append)
    file.receive(step_metrics(1))
    monkeypatch.setattr(secrets, "token_hex", lambda _: "known")
    in_the_way = f".metrics.jsonl.{platform.node()}.{os.getpid()}.known.tmp"
    (tmp_path / in_the_way).mkdir()  # of the new file, for root too

    file.receive(RolledBack(0, 1, []))
    file.receive(step_metrics(1))

    assert _steps(tmp_path) == [1, 1]
    [line] = said
    reason = "the lines after step 0 could not be removed (Is a directory); the run continues"
    assert line == f"{tmp_path}/metrics.jsonl: {reason}"


def test_a_fresh_run_in_an_old_folder_starts_with_no_line(tmp_path: Path, step_metrics: Step) -> None:
    _write_steps(tmp_path, step_metrics, 1, 8, resume_step=0)
    _write_steps(tmp_path, step_metrics, 1, 2, resume_step=0)
    assert _steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("torn", [b'{"kind": "step", "st', b"\x00\x00\x00", b"12"])
def test_resuming_drops_a_line_that_a_crash_truncated(tmp_path: Path, step_metrics: Step, torn: bytes) -> None:
    _write_steps(tmp_path, step_metrics, 1, 3, resume_step=0)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    _write_steps(tmp_path, step_metrics, 4, 4, resume_step=3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_resuming_a_finished_run_drops_its_test(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    write_run(tmp_path, steps=4, epochs=1)
    MetricsFile(tmp_path, resume_step=4)
    assert {record["kind"] for record in read_metrics(tmp_path)} == {"step", "epoch"}


def _write_many(path: Path, count: int) -> None:
    lines = JsonLines(path)
    for number in range(count):
        assert lines.write({"rank": here().rank, "number": number, "text": "x" * (number % 300)})


def test_ranks_that_write_at_the_same_time_leave_complete_lines(tmp_path: Path) -> None:
    run_on_ranks(3, _write_many, tmp_path / "lines", 400)

    records = read_lines(tmp_path / "lines")
    assert len(records) == len((tmp_path / "lines").read_bytes().splitlines()) == 1200
    for rank in range(3):
        assert [record["number"] for record in records if record["rank"] == rank] == list(range(400))


def test_a_full_disk_loses_the_line_and_raises_nothing() -> None:
    assert not JsonLines(Path("/dev/full")).write({"step": 1})
    assert not JsonLines(Path("/no/such/folder/lines")).write({"step": 1})


def test_a_line_that_a_full_disk_truncates_spoils_no_later_one(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "lines")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert lines.write({"step": 1})
    # The system writes what fits and refuses the rest, as a disk that runs full does.
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "lines").stat().st_size + 7, hard))
    try:
        written = [lines.write({"step": 2}), lines.write({"step": 3})]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert lines.write({"step": 4})

    assert written == [False, False]
    assert read_lines(tmp_path / "lines") == [{"step": 1}, {"step": 4}]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_null_however_deep(tmp_path: Path, value: float) -> None:
    JsonLines(tmp_path / "lines").write({"a": {"b": [value, 1.5]}})

    assert json.loads((tmp_path / "lines").read_text()) == {"a": {"b": [None, 1.5]}}
