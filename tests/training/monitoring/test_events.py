"""events.jsonl tells what happened in a run, in order, over restarts; and what the time of a restart went into."""

from __future__ import annotations

import os
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
from tests.processes import RankFailure, run_on_ranks
from tests.training.conftest import TRAINING
from tests.training.monitoring.small_training import train_on_ranks
from training.monitoring.events import EventLog, read_events, restart_split
from training.parallelism.distributed import Ranks
from training.run.phases import Phases

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


def test_two_ranks_tell_their_story_in_order(killed_and_resumed: Path) -> None:
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


def test_a_restart_goes_on_with_the_story_under_its_number(killed_and_resumed: Path) -> None:
    told = _of_rank_0(killed_and_resumed, restart=1)
    kinds = [event["kind"] for event in told if event["kind"] not in ("straggler", "step")]
    resumed = next(event for event in told if event["kind"] == "resumed")

    assert kinds == ["imported", "resumed", "start", "first_step", "epoch", "checkpoint", "finished"]
    assert resumed["step"] == 8
    assert [event["step"] for event in told if event["kind"] == "step"] == [12, 16]
    assert next(event for event in told if event["kind"] == "first_step")["step"] == 9


def test_each_line_says_when_who_and_where(killed_and_resumed: Path) -> None:
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


def test_the_launchers_log_says_when_it_saw_the_loss(killed_and_resumed: Path) -> None:
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
    log = EventLog(tmp_path, replace(ALONE, milestones={"imported": time.time()}), Phases())
    with log.writing():
        log.run_starts(0, 10, [])

    assert restart_split(tmp_path) == []


def test_a_run_that_fails_says_why_in_its_last_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path, replace(ALONE, rank=3, world_size=4, restart=2), Phases())
    with pytest.raises(TrainingFailure), log.writing():
        raise TrainingFailure("step 7: the loss is nan\nand more")

    [event] = read_events(tmp_path)
    assert (event["kind"], event["rank"], event["restart"]) == ("failed", 3, 2)
    assert event["message"] == "step 7: the loss is nan and more"


def test_nothing_is_written_before_the_folder_is_the_runs_own(tmp_path: Path) -> None:
    log = EventLog(tmp_path, replace(ALONE, milestones={"imported": 5.0}), Phases())
    log.write("resumed", checkpoint="step_00000008")

    assert list(tmp_path.iterdir()) == []
    with log.writing():
        pass
    assert [(event["kind"], event["time"] > 5) for event in read_events(tmp_path)] == [
        ("imported", False),
        ("resumed", True),
    ]


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
