"""Several machines without a scheduler: a launcher on each, and one folder for all."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.documented import REPOSITORY, documented
from tests.processes import free_port

# Mounts an empty folder over the first argument, seen by the command after it alone: a disk of its own.
ON_ITS_OWN_DISK = ("unshare", "--mount", "--map-root-user", "bash", "-c", 'mount -t tmpfs none "$0" && exec "$@"')

# A core for each machine, where there are two: else each rank asks for all of them.
CORES = [*sorted(os.sched_getaffinity(0)), *sorted(os.sched_getaffinity(0))][:2]

pytestmark = pytest.mark.slow


@pytest.fixture
def commands() -> list[list[str]]:
    """The documented command, which is the same on both machines."""
    command = documented("docs/deployment.md", "two-machines")
    return [["taskset", "--cpu-list", str(core), "bash", "-c", command] for core in CORES]


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, Any]:
    """How it is started on each: what it is told, and where."""
    meeting = f"localhost:{free_port()}"
    shared = tmp_path / "shared"
    shared.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    told = {"MEETING": meeting, "PROCESSES": "1", "SHARED": str(shared), "PATH": path, "OMP_NUM_THREADS": "1"}
    return {"env": told, "cwd": REPOSITORY, "wait": False}


def test_two_machines_train_one_model(
    start: Callable[..., Any], commands: list[list[str]], machine: dict[str, Any], tmp_path: Path
) -> None:
    runs = [start(command, **machine) for command in commands]

    assert [run.wait() for run in runs] == [0, 0], [run.err for run in runs]
    assert "2 (gloo)" in "".join(run.out for run in runs)
    assert (tmp_path / "shared" / "demo" / "model.safetensors").exists()


def test_one_machine_can_train_while_others_may_still_join(
    start: Callable[..., Any], machine: dict[str, Any], tmp_path: Path
) -> None:
    run = start(["bash", "-c", documented("docs/deployment.md", "elastic")], **machine)

    assert run.wait() == 0, run.err
    assert "1 (gloo)" in run.out
    assert (tmp_path / "shared" / "demo" / "model.safetensors").exists()


def test_machines_that_do_not_share_the_folder_are_refused_in_one_line(
    start: Callable[..., Any], commands: list[list[str]], machine: dict[str, Any], tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    if subprocess.run([*ON_ITS_OWN_DISK, shared, "true"], capture_output=True).returncode != 0:
        pytest.skip("mount namespaces are not allowed here; run the tests as root")

    runs = [start(commands[0], **machine), start([*ON_ITS_OWN_DISK, shared, *commands[1]], **machine)]

    assert [run.wait() for run in runs] == [1, 1]
    [line] = [line for run in runs for line in run.error_lines]
    assert line.startswith(f"error: rank 1: --output_dir {shared}/demo: ")
    assert line.endswith(
        f"does not see what rank 0 writes to {shared}; name a folder that all machines share [folder-not-shared]"
    )
    assert list(shared.iterdir()) == []
