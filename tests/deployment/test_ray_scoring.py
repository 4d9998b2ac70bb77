"""Bulk scoring on Ray: the copies that it starts, and what becomes of a lost one."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deployment.documented import REPOSITORY
from tests.training.conftest import Run

SCRIPT = REPOSITORY / "deployment" / "ray" / "score.py"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -e '.[ray]'")
# In place of the scorer: the first start of it waits until it is killed, every other one ends at once.
SCORER = """
import os, signal, sys
from contextlib import suppress
from pathlib import Path
print("copy:", os.environ["THREADS"], *sys.argv[1:], os.getcwd(), flush=True)
if sys.argv[1] == "gone":
    print("error: gone: no such file [data-not-found]", file=sys.stderr)
    sys.exit(2)
if sys.argv[1] == "once":
    mine = Path(f"pid.{os.getpid()}")
    mine.write_text(str(os.getpid()))
    with suppress(FileExistsError):
        os.link(mine, "pid")
        signal.pause()
Path(f"ended.{os.getpid()}").touch()
"""

Start = Callable[..., Run]


@pytest.fixture
def start(start: Start, tmp_path: Path) -> Start:
    """`start(*arguments)`: the command, in a folder whose scorer is the one above."""
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "__init__.py").touch()
    (tmp_path / "inference" / "score.py").write_text(SCORER)
    env = {"RAY_DEDUP_LOGS": "0"}
    return lambda *arguments: start([sys.executable, SCRIPT, *arguments], wait=False, env=env, cwd=tmp_path)


def test_input_and_output_come_before_the_flags(start: Start) -> None:
    run = start("--text_column", "title", "in", "out", "--address", "nowhere:1")

    assert run.wait() == 2
    assert run.err == "error: IN and OUT come first: score.py IN OUT --model FOLDER (see --help) [usage]\n"


@pytest.mark.slow
@needs_ray
def test_all_copies_run_the_same_command_on_the_cores_that_ray_sets_aside(start: Start, tmp_path: Path) -> None:
    run = start("in", "out", "--model", "model", "--num_workers", "2")

    assert run.wait() == 0, run.out + run.err
    assert len(list(tmp_path.glob("ended.*"))) == 2
    assert len(re.findall(rf"copy: 1 in out --model model {tmp_path}$", run.out, re.MULTILINE)) == 2, run.out


@pytest.mark.slow
@needs_ray
def test_an_error_of_the_user_is_one_line_and_is_not_tried_again(start: Start) -> None:
    run = start("gone", "out", "--num_workers", "2")

    assert run.wait() == 2
    assert run.error_lines == ["error: gone: no such file [data-not-found]"]
    assert "Traceback" not in run.out + run.err


@pytest.mark.slow
@needs_ray
def test_a_killed_copy_is_started_again(start: Start, tmp_path: Path) -> None:
    run = start("once", "out", "--num_workers", "1")
    run.wait_until(lambda: (tmp_path / "pid").exists())

    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    assert run.wait() == 0, run.out + run.err
    assert len(list(tmp_path.glob("ended.*"))) == 1


@pytest.mark.slow
@needs_ray
def test_a_copy_ends_with_its_worker_before_another_takes_its_place(start: Start, tmp_path: Path) -> None:
    run = start("once", "out", "--num_workers", "1")
    run.wait_until(lambda: (tmp_path / "pid").exists())
    copy = int((tmp_path / "pid").read_text())
    worker = int(re.search(r"^PPid:\s+(\d+)", Path(f"/proc/{copy}/status").read_text(), re.MULTILINE)[1])

    os.kill(worker, signal.SIGKILL)

    assert run.wait() == 0, run.out + run.err
    assert not Path(f"/proc/{copy}").exists()
    assert len(list(tmp_path.glob("ended.*"))) == 1


@pytest.mark.slow
@needs_ray
def test_a_copy_killed_once_more_than_allowed_ends_the_command_in_one_line(start: Start, tmp_path: Path) -> None:
    run = start("once", "out", "--num_workers", "1", "--max_failures", "0")
    run.wait_until(lambda: (tmp_path / "pid").exists())

    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    assert run.wait() == 1
    [line] = run.error_lines
    assert "exit code -9" in line
    assert line.endswith("what is finished is safe: to resume, rerun the same command [ray-score-failed]")


@pytest.mark.slow
@needs_ray
def test_a_lost_copy_does_not_matter_when_another_has_completed_the_output(start: Start, tmp_path: Path) -> None:
    run = start("once", "out", "--num_workers", "2", "--max_failures", "0")
    run.wait_until(lambda: (tmp_path / "pid").exists())

    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    assert run.wait() == 0, run.out + run.err
    assert len(list(tmp_path.glob("ended.*"))) == 1
