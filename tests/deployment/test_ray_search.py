"""A search on Ray: the same trials, on machines that Ray chooses, through lost ones too."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.deployment.documented import REPOSITORY
from tests.processes import wait_until
from tests.training.conftest import Run

SCRIPT = REPOSITORY / "deployment" / "ray" / "search.py"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -e '.[ray]'")
NUM_STEPS = 160

Start = Callable[..., Run]


@pytest.fixture
def start(start: Start, tmp_path: Path) -> Start:
    """`start(*flags, **keys)`: the command on a search of one trial of 160 steps, with other keys of SPACE.yaml."""

    def run(*flags: str, **keys: object) -> Run:
        config = {"dataset": "sample", "model": "tiny", "device": "cpu", "max_train_rows": 63, "max_length": 48}
        config |= {"batch_size": 8, "epochs": 20, "log_every": 1, "save_every": 8, "cache_dir": str(tmp_path / "cache")}
        space = {
            "config": config,
            "search": {"learning_rate": [0.004]},
            "sampler": "grid",
            "output_dir": "found",
        } | keys
        (tmp_path / "space.yaml").write_text(yaml.safe_dump(space))
        return start([sys.executable, SCRIPT, tmp_path / "space.yaml", *flags], wait=False, cwd=tmp_path)

    return run


def _steps(folder: Path) -> list[int]:
    path = folder / "found" / "trial_000" / "model.run" / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [record["step"] for record in records if record["kind"] == "step"]


def _trainers(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text()
        except OSError:
            continue
        if (
            "train_single.py" in command
            and "found/trial_000" in command
            and process.joinpath("cwd").readlink() == folder
        ):
            found.append(int(process.name))
    return found


def test_a_space_is_checked_before_ray_starts(start: Start) -> None:
    run = start("--address", "nowhere:1", metric="f1")

    assert run.wait() == 2
    assert "space.yaml: --best_metric f1 and --task classification: this task has accuracy" in run.err


@pytest.mark.slow
@needs_ray
def test_a_trial_whose_worker_is_killed_resumes_with_another(start: Start, tmp_path: Path) -> None:
    run = start()
    run.wait_until(lambda: len(_steps(tmp_path)) > 8)
    [trainer] = _trainers(tmp_path)
    worker = int(re.search(r"^PPid:\s+(\d+)", Path(f"/proc/{trainer}/status").read_text(), re.MULTILINE)[1])

    os.kill(worker, signal.SIGKILL)

    assert run.wait() == 0, run.out + run.err
    assert "Resuming from" in (tmp_path / "found" / "trial_000" / "output.txt").read_text()
    assert _steps(tmp_path) == list(range(1, NUM_STEPS + 1))
    assert "Best: trial 0" in run.out


@pytest.mark.slow
@needs_ray
def test_a_killed_search_takes_its_trials_along_and_resumes_them(start: Start, tmp_path: Path) -> None:
    run = start()
    run.wait_until(lambda: len(_steps(tmp_path)) > 8)

    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    wait_until(lambda: not _trainers(tmp_path))
    again = start()

    assert again.wait() == 0, again.out + again.err
    assert "Resuming from" in (tmp_path / "found" / "trial_000" / "output.txt").read_text()
    assert _steps(tmp_path) == list(range(1, NUM_STEPS + 1))
