"""Every launcher of bulk scoring, with the scorer itself: two copies at once write the bytes that one writes alone."""

from __future__ import annotations

import csv
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.rows import SAMPLE_NEWS
from tests.deployment.documented import REPOSITORY
from tests.deployment.manifests import SCORING, only
from tests.deployment.publishing import run_against
from tests.training.conftest import Run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("inference.score") is None, reason="needs inference/score.py, which these launchers start"
)
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -e '.[ray]'")

Start = Callable[..., Run]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, exported_folder: Path) -> Path:
    """A checkout with rows to score, and what one copy makes of them."""
    folder = tmp_path_factory.mktemp("checkout")
    for room in ("common", "deployment", "inference", "training"):
        (folder / room).symlink_to(REPOSITORY / room)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "distilbert_agnews").symlink_to(exported_folder)
    (folder / "in").mkdir()
    with (
        (SAMPLE_NEWS / "test.csv").open(newline="") as news,
        (folder / "in" / "rows.csv").open("w", newline="") as rows,
    ):
        found = [(number, f"{title}. {text}") for number, (_, title, text) in enumerate(csv.reader(news))]
        csv.writer(rows).writerows([("id", "text"), *found])
    command = [sys.executable, "-m", "inference.score", "in/rows.csv", "alone.csv", "--model", str(exported_folder)]
    subprocess.run(command, cwd=folder, env=_environment(), check=True, capture_output=True, timeout=240)
    return folder


@pytest.fixture
def start(start: Start, place: Path) -> Start:
    """`start(command, **variables)`: a command in the checkout."""
    return lambda command, **variables: start(command, wait=False, env=_environment() | variables, cwd=place)


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    packages = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PATH": path, "PYTHONPATH": packages, "HF_HUB_OFFLINE": "1"}


def _assert_all_end_well(runs: list[Run]) -> None:
    assert [run.wait() for run in runs] == [0] * len(runs), "\n".join(run.out + run.err for run in runs)


@pytest.mark.slow
def test_two_tasks_of_the_slurm_array(start: Start, place: Path) -> None:
    command = ["bash", "deployment/slurm/score.sbatch", "in/rows.csv", "slurm.csv"]
    model = ["--model", "checkpoints/distilbert_agnews"]
    of_slurm = {"SLURM_JOB_NAME": "score", "SLURM_JOB_ID": "7", "PYTHON": sys.executable}

    _assert_all_end_well([start(command + model, SLURM_ARRAY_TASK_ID=str(task), **of_slurm) for task in range(2)])

    assert (place / "slurm.csv").read_bytes() == (place / "alone.csv").read_bytes()


@pytest.mark.slow
def test_what_a_killed_task_of_the_array_leaves_behind_is_done_by_the_others(start: Start, place: Path) -> None:
    lines = (place / "in" / "rows.csv").read_text().splitlines(keepends=True)
    (place / "long.csv").write_text(lines[0] + "".join(lines[1:]) * 60)
    scorer = [sys.executable, "-m", "inference.score", "long.csv", "long_alone.csv"]
    task = ["bash", "deployment/slurm/score.sbatch", "long.csv", "long_out.csv"]
    model = ["--model", "checkpoints/distilbert_agnews"]
    of_slurm = {"SLURM_JOB_NAME": "score", "SLURM_JOB_ID": "7", "PYTHON": sys.executable}
    _assert_all_end_well([start(scorer + model)])

    lost, other = (start(task + model, SLURM_ARRAY_TASK_ID=number, **of_slurm) for number in "01")
    lost.wait_until(lambda: list(place.glob("long_out.csv.parts/*/*.part")))
    lost.kill()

    _assert_all_end_well([other])
    assert (place / "long_out.csv").read_bytes() == (place / "long_alone.csv").read_bytes()


def test_two_pods_of_the_indexed_job(start: Start, place: Path) -> None:
    (container,) = only(SCORING, "Job")["spec"]["template"]["spec"]["containers"]
    (place / "out").mkdir()
    # The volume of the rows is this folder.
    command = [part.replace("/rows/", f"{place}/") for part in (*container["command"], *container["args"])]

    _assert_all_end_well([start(command, JOB_COMPLETION_INDEX=str(pod)) for pod in range(2)])

    assert (place / "out" / "rows.csv").read_bytes() == (place / "alone.csv").read_bytes()


def test_the_command_of_a_job_on_the_hub(start: Start, place: Path, tmp_path: Path) -> None:
    arguments = ("hf://buckets/alice/news/rows.csv", "hf://buckets/alice/scored/hub.csv", "--model", "alice/news")
    said = run_against("http://127.0.0.1:9", tmp_path, "deployment/hub_jobs.py", *arguments, "--image", "any")
    mounted = {"/in/": f"{place}/in/", "/out/": f"{place}/", "/model": "checkpoints/distilbert_agnews"}
    command = said.stdout.splitlines()[0]
    for mount, here in mounted.items():
        command = command.replace(mount, here)

    _assert_all_end_well([start(shlex.split(command))])

    assert (place / "hub.csv").read_bytes() == (place / "alone.csv").read_bytes()


@pytest.mark.slow
@needs_ray
def test_two_workers_of_a_ray_cluster(start: Start, place: Path) -> None:
    command = [sys.executable, "deployment/ray/score.py", "in/rows.csv", "ray.csv", "--num_workers", "2"]

    _assert_all_end_well([start([*command, "--model", "checkpoints/distilbert_agnews"])])

    assert (place / "ray.csv").read_bytes() == (place / "alone.csv").read_bytes()
