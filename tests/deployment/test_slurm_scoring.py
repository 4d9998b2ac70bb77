"""Bulk scoring as a SLURM array: what a task does when its time is up, when its copy fails, and on a real cluster."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deployment.documented import REPOSITORY
from tests.training.conftest import Run

SCRIPT = REPOSITORY / "deployment" / "slurm" / "score.sbatch"
# In place of the scorer, which is as quick as its rows are few: one that ends when it is told to, and says what it was
# started with.
SCORER = """
import signal, sys
print(*sys.argv[1:], flush=True)
if sys.argv[1] == "endless":
    signal.pause()
if sys.argv[1] == "gone":
    sys.exit(2)
"""

Task = Callable[..., Run]


@pytest.fixture
def task(start: Callable[..., Run], tmp_path: Path) -> Task:
    """`task(number, *arguments)`: the script as SLURM starts it, with a scontrol that notes what it is told."""
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "__init__.py").touch()
    (tmp_path / "inference" / "score.py").write_text(SCORER)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text('#!/bin/sh\necho "$@" >> scontrol.txt\nexit "${REFUSAL:-0}"\n')
    scontrol.chmod(0o755)

    def start_task(number: int, *arguments: str, **variables: str) -> Run:
        of_slurm = {"SLURM_JOB_NAME": "score", "SLURM_JOB_ID": str(70 + number), "SLURM_ARRAY_JOB_ID": "70"}
        environment = {
            "PATH": f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "SLURM_ARRAY_TASK_ID": str(number),
            **of_slurm,
            **variables,
        }
        return start(["bash", SCRIPT, *arguments], wait=False, env=environment, cwd=tmp_path)

    return start_task


def _told(folder: Path) -> str:
    notes = folder / "scontrol.txt"
    return notes.read_text() if notes.exists() else ""


def test_every_task_of_the_array_runs_the_same_command(task: Task) -> None:
    runs = [task(number, "rows in", "out", "--model", "model") for number in range(2)]

    assert [run.wait() for run in runs] == [0, 0]
    for number, run in enumerate(runs):
        first, printed, last = run.out.splitlines()
        assert first.startswith(f"score-70_{number}.run0: on ")
        assert printed == "rows in out --model model"
        assert last == f"score-70_{number}.run0: finished"


def test_a_task_whose_time_is_up_queues_again(task: Task, tmp_path: Path) -> None:
    run = task(3, "endless", SLURM_RESTART_COUNT="99")
    run.wait_until(lambda: "endless\n" in run.out)

    run.process.send_signal(signal.SIGUSR1)

    assert run.wait() == 128 + signal.SIGTERM
    assert run.out.endswith("score-70_3.run99: the time is up; asking SLURM to queue it again\n")
    assert _told(tmp_path) == "requeue 73\n"


def test_a_task_that_slurm_refuses_to_queue_again_fails_and_says_so(task: Task) -> None:
    run = task(3, "endless", REFUSAL="1")
    run.wait_until(lambda: "endless\n" in run.out)

    run.process.send_signal(signal.SIGUSR1)

    assert run.wait() != 0
    assert run.out.endswith("submit it again for the rest [requeue-refused]\n")
    assert "queued again" not in run.out


def test_a_task_that_has_queued_often_enough_ends_and_says_what_to_do(task: Task, tmp_path: Path) -> None:
    run = task(3, "endless", SLURM_RESTART_COUNT="2", MOST_RESTARTS="2")
    run.wait_until(lambda: "endless\n" in run.out)

    run.process.send_signal(signal.SIGUSR1)

    assert run.wait() != 0
    assert "it has queued again 2 times; submit it with a longer --time" in run.out
    assert _told(tmp_path) == ""


def test_a_cancelled_task_ends_its_copy_and_does_not_queue_again(task: Task, tmp_path: Path) -> None:
    run = task(0, "endless")
    run.wait_until(lambda: "endless\n" in run.out)

    run.process.send_signal(signal.SIGTERM)

    assert run.wait() == 128 + signal.SIGTERM
    assert "failed with exit code 143" in run.out
    assert _told(tmp_path) == ""


def test_a_copy_that_fails_fails_its_task_without_another_try(task: Task, tmp_path: Path) -> None:
    run = task(0, "gone")

    assert run.wait() == 2
    assert run.out.endswith("failed with exit code 2\n")
    assert _told(tmp_path) == ""
