"""A rank that fails ends the run in one line that names it, and leaves no process behind."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import TrainingFailure, UserError
from learn.cards.pipeline import DEFAULT_PIPELINE, read_pipeline
from learn.cards.runner import Event, Runner
from learn.cards.workers import Job, LocalWorkers

WAIT_SECONDS = 60
CARDS_RUN = [sys.executable, "-m", "learn.cards", "run"]


def stepped_to(runner: Runner, node: str) -> list[int]:
    """Run until a node is next; returns the process ids of the ranks."""
    while runner.next_node.id != node:
        runner.step()
    ranks = {
        process.name: process.pid for process in multiprocessing.active_children() if process.name.startswith("rank ")
    }
    return [ranks[name] for name in sorted(ranks)]


def on_two_ranks(folder: Path, on_event: Callable[[Event], None] = lambda event: None, **group: Any) -> Runner:
    pipeline = read_pipeline(DEFAULT_PIPELINE).configured("shard", num_workers=2).configured("group", **group)
    return Runner(pipeline, folder, on_event)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_rank_killed_inside_a_collective_is_named_and_none_is_left(tmp_path: Path) -> None:
    events: list[Event] = []

    def kill_rank_1(event: Event) -> None:
        events.append(event)
        if (event.node, event.state) == ("allreduce", "running"):
            # Stopped, it cannot join: the other one is left waiting in the all-reduce, or will be.
            os.kill(pids[1], signal.SIGSTOP)
            os.kill(pids[1], signal.SIGKILL)

    with on_two_ranks(tmp_path, kill_rank_1) as runner:
        pids = stepped_to(runner, "allreduce")
        with pytest.raises(TrainingFailure) as raised:
            runner.step()

    assert str(raised.value) == ("rank 1, card dist_allreduce (node allreduce): the process ended (killed by SIGKILL)")
    assert (events[-1].state, events[-1].message) == ("failed", str(raised.value))
    assert not any(map(is_there, pids))


def test_a_card_that_raises_is_named_with_its_rank_and_its_traceback(tmp_path: Path) -> None:
    with on_two_ranks(tmp_path) as runner:
        pids = stepped_to(runner, "forward")
        lost = runner.storage.folder / "prepare" / "prepared.safetensors"
        lost.unlink()
        with pytest.raises(
            TrainingFailure, match=r"^rank \d, card dist_forward \(node forward\): FileNotFoundError: "
        ) as raised:
            runner.step()

    assert str(lost) in str(raised.value)
    traceback = Path(str(raised.value).rpartition("traceback in ")[2])
    assert "training_step.py" in traceback.read_text()
    assert not any(map(is_there, pids))


class Raises(dict[str, Any]):
    """Inputs that no card can take."""

    def __getitem__(self, name: str) -> Any:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711\nand more")


def test_a_collective_that_fails_says_what_the_library_says(tmp_path: Path) -> None:
    workers = LocalWorkers(2, tmp_path)
    with pytest.raises(TrainingFailure) as raised:
        workers.run([Job("dist_forward", "forward", {}, Raises(), recording=True)] * 2)

    line, _, path = str(raised.value).rpartition("; traceback in ")
    assert line == (
        "rank 0, card dist_forward (node forward): another rank went away, or the collective failed "
        "(Connection closed by peer [127.0.0.1]:4711)"
    )
    assert "and more" in Path(path).read_text()


def test_what_a_person_set_wrong_is_said_as_it_is(tmp_path: Path) -> None:
    workers = torch.cuda.device_count() + 1
    pipeline = read_pipeline(DEFAULT_PIPELINE).configured("shard", num_workers=workers)
    with Runner(pipeline.configured("group", backend="nccl"), tmp_path) as runner, pytest.raises(UserError) as raised:
        runner.run()

    assert str(raised.value).startswith(f"backend nccl: {workers} ranks need a GPU each")


def test_ranks_meet_at_an_address_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with on_two_ranks(tmp_path, init_method=f"tcp://127.0.0.1:{port}") as runner:
        stepped_to(runner, "forward")

    assert runner.outputs["group"][1]["process_group"]["world_size"] == 2


def test_closing_from_another_thread_ends_a_collective_that_would_never_end(tmp_path: Path) -> None:
    stopped = threading.Event()

    def stop_rank_1(event: Event) -> None:
        if (event.node, event.state) == ("allreduce", "running"):
            os.kill(pids[1], signal.SIGSTOP)
            stopped.set()

    def close() -> None:
        assert stopped.wait(WAIT_SECONDS)
        runner.close()

    closing = threading.Thread(target=close)
    with on_two_ranks(tmp_path, stop_rank_1) as runner:
        pids = stepped_to(runner, "allreduce")
        closing.start()
        with pytest.raises(TrainingFailure, match="the process ended"):
            runner.step()
        closing.join(WAIT_SECONDS)
    assert not any(map(is_there, pids))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "iris").mkdir()
    (tmp_path / "iris" / "letter.txt").write_text("dear")

    message = "already exists and is not a run of cards; choose another --output"
    with on_two_ranks(tmp_path) as runner, pytest.raises(UserError, match=message):
        runner.step()
    assert (tmp_path / "iris" / "letter.txt").exists()


def test_a_run_removes_what_an_earlier_one_kept(tmp_path: Path) -> None:
    for number in range(2):
        with on_two_ranks(tmp_path) as runner:
            runner.step()
            (runner.storage.folder / f"left_{number}").touch()

    assert [path.name for path in sorted(tmp_path.glob("iris/left*"))] == ["left_1"]


def session_of(pid: int) -> list[str]:
    """The commands of all processes that it started."""
    listed = subprocess.run(["ps", "-o", "args=", "-s", str(pid)], capture_output=True, text=True)
    return listed.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_outlives_the_program(start: Callable[..., Any], tmp_path: Path, blow: signal.Signals) -> None:
    run = start([*CARDS_RUN, "--epochs", "100", "--output", tmp_path], wait=False)
    run.wait_until(lambda: "epoch 10 " in run.out)

    if blow is signal.SIGINT:
        os.killpg(run.process.pid, blow)
    else:
        run.process.send_signal(blow)
    run.wait()

    deadline = time.monotonic() + WAIT_SECONDS
    while left := session_of(run.process.pid):
        assert time.monotonic() < deadline, left
    assert blow is not signal.SIGINT or (run.process.returncode, run.err) == (130, "interrupted\n")


@pytest.mark.slow
def test_ctrl_c_while_the_ranks_are_being_started_is_one_line(start: Callable[..., Any], tmp_path: Path) -> None:
    run = start([*CARDS_RUN, "--output", tmp_path], wait=False)
    # A server that they are forked from is importing torch, of which it may take seconds.
    run.wait_until(lambda: any("multiprocessing.forkserver" in command for command in session_of(run.process.pid)))
    os.killpg(run.process.pid, signal.SIGINT)

    assert (run.wait(), run.err) == (130, "interrupted\n")
