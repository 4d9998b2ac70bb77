"""Ray Train runs the Trainer that torchrun runs: the same numbers, through lost workers too."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployment.ray.train import fit
from tests.deployment.documented import REPOSITORY, documented
from tests.training.conftest import BASE, Run
from training.config import parse_config

SCRIPT = REPOSITORY / "deployment" / "ray" / "train.py"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -e '.[ray]'")
FLAGS = (*BASE, "--batch_size", "4", "--save_every", "2")

Start = Callable[..., Run]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(start: Start, tmp_path: Path, cache: Path) -> Start:
    """`start(command, *flags)`: a training command on the base flags, in an empty folder, killed at the test's end."""

    def run(command: list[str | Path], *flags: str | Path, warm: bool = False) -> Run:
        return start([*command, *FLAGS, "--cache_dir", cache, *flags], wait=False, cwd=tmp_path, warm=warm)

    return run


def _weights(output: Path) -> str:
    return hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()


def _losses(output: Path) -> dict[int, float]:
    records = map(json.loads, output.with_name(output.name + ".run").joinpath("metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


def _workers(run: Run) -> list[int]:
    """The processes in which Ray trains, that of rank 0 first."""
    command = ["ps", "-s", str(run.process.pid), "-o", "pid=,args="]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [int(line.split()[0]) for line in listed if "ray::RayTrainWorker" in line]
    [first] = {int(pid) for pid in re.findall(r"RayTrainWorker pid=(\d+)", run.out)}
    return sorted(found, key=lambda pid: pid != first)


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The model of the same run under torchrun."""
    folder = tmp_path_factory.mktemp("torchrun")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, REPOSITORY / "training" / "train_ddp.py", *FLAGS, "--cache_dir", cache]
    run = Run([*map(str, command), "--output_dir", str(folder / "model")], folder, dict(os.environ), folder)
    assert run.wait() == 0, run.err
    return folder / "model"


@pytest.mark.parametrize(
    ("flags", "use_gpu", "backend"),
    [
        (("--strategy", "zero3", "--cpu_offload"), True, "cpu:gloo,cuda:nccl"),
        (("--strategy", "zero3"), True, "nccl"),
        (("--strategy", "zero3", "--cpu_offload"), False, "gloo"),
    ],
)
def test_offloaded_state_has_a_backend_for_tensors_in_the_machines_memory(
    flags: tuple[str, ...], use_gpu: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Ray: what it would be told."""
    asked = {}

    class Trainer:
        def __init__(self, *arguments: Any, torch_config: Any, **settings: Any) -> None:
            asked.update(torch_config)

        def fit(self) -> SimpleNamespace:
            return SimpleNamespace(return_value={})

    names = ("FailureConfig", "LoggingConfig", "RunConfig", "ScalingConfig")
    train = SimpleNamespace(TrainingFailedError=OSError, **{name: lambda *_, **__: None for name in names})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(train=train))
    monkeypatch.setitem(sys.modules, "ray.train", train)
    told = SimpleNamespace(TorchConfig=lambda backend, **_: {"backend": backend}, TorchTrainer=Trainer)
    monkeypatch.setitem(sys.modules, "ray.train.torch", told)

    fit(parse_config(flags, environment={}), {"use_gpu": use_gpu}, max_failures=0)

    assert asked["backend"] == backend


def test_a_wrong_flag_is_one_line_before_any_cluster_is_looked_for(start: Start) -> None:
    run = start([sys.executable, SCRIPT], "--num_workers", "two", "--address", "nowhere:1", warm=True)

    assert run.wait() == 2
    assert (
        run.err
        == "error: argument --num_workers/--num-workers: two: must be a whole number, at least 1 (see --help) [usage]\n"
    )


@pytest.mark.slow
@needs_ray
def test_the_documented_command_trains_the_very_model_of_torchrun(
    start: Start, by_torchrun: Path, tmp_path: Path
) -> None:
    command = documented("docs/deployment.md", "ray-train").split()

    run = start([sys.executable, REPOSITORY / command[1], *command[2:]], "--output_dir", "model")

    assert run.wait() == 0, run.out + run.err
    assert _losses(tmp_path / "model") == _losses(by_torchrun)
    assert _weights(tmp_path / "model") == _weights(by_torchrun)
    assert re.search(r"^model: accuracy 0\.\d+ on the test rows$", run.out, re.MULTILINE)
    assert {path.name for path in tmp_path.iterdir()} >= {"model", "model.pt", "model.run"}
    assert not (tmp_path / "model.ray").exists()


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_replaced_and_the_model_is_the_same(
    start: Start, by_torchrun: Path, tmp_path: Path, rank: int
) -> None:
    checkpoints = tmp_path / "model.run" / "checkpoints"
    run = start([sys.executable, SCRIPT, "--num_workers", "2"], "--output_dir", "model")
    run.wait_until(lambda: (checkpoints / "step_00000004").exists())

    os.kill(_workers(run)[rank], signal.SIGKILL)

    assert run.wait() == 0, run.out + run.err
    assert "Resuming from" in run.out
    assert _losses(tmp_path / "model") == _losses(by_torchrun)
    assert _weights(tmp_path / "model") == _weights(by_torchrun)


@pytest.mark.slow
@needs_ray
def test_a_worker_killed_once_more_than_allowed_ends_the_run_in_one_line(start: Start, tmp_path: Path) -> None:
    checkpoints = tmp_path / "model.run" / "checkpoints"
    run = start([sys.executable, SCRIPT, "--num_workers", "2"], "--max_failures", "0", "--output_dir", "model")
    run.wait_until(lambda: (checkpoints / "step_00000004").exists())

    os.kill(_workers(run)[1], signal.SIGKILL)

    assert run.wait() == 1
    [line] = run.error_lines
    assert line.endswith("to resume, rerun the same command [ray-train-failed]")


@pytest.mark.slow
@needs_ray
def test_a_run_that_cannot_start_says_so_in_one_line_and_is_not_tried_again(start: Start) -> None:
    run = start([sys.executable, SCRIPT], "--dataset", "no-such-file.csv", "--output_dir", "model")

    assert run.wait() == 2
    assert len(run.error_lines) == 1
    assert "no-such-file.csv" in run.error_lines[0]
    assert "Traceback" not in run.out + run.err


@pytest.mark.slow
@needs_ray
def test_more_workers_than_the_cluster_has_cores_are_refused_at_once(start: Start) -> None:
    run = start([sys.executable, SCRIPT], "--num_workers", "9999", "--output_dir", "model")

    assert run.wait() == 2
    assert "--num_workers 9999: takes 9999 CPUs and this machine has" in run.err
