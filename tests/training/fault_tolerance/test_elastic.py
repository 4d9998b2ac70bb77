"""Elastic runs: launchers come and go, each as a machine of its own, and the run goes on with those that are there."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployment.launchers import Cluster, usable_cores
from tests.processes import wait_until
from tests.training.monitoring.small_training import train_on_ranks
from training.monitoring.events import read_events

# 57 rows in batches of 8 on two ranks: 30 epochs of 8 steps, at a rate at which rounding stays rounding.
FLAGS = ("--batch_size", "4", "--epochs", "30", "--learning_rate", "1e-4", "--save_every", "20")
DEADLINE = 300.0

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(base_flags: tuple[str, ...], tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    """`cluster(most)`: no machines yet, up to so many; they are gone at the test's end."""
    made: list[Cluster] = []

    def make(most: int) -> Cluster:
        made.append(Cluster((*base_flags, *FLAGS), tmp_path / "model", most))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where the cluster writes."""
    return tmp_path / "model.run"


def _events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["kind"] == kind]


def _wait_until(holds: Callable[[], Any], cluster: Cluster) -> None:
    def checked() -> bool:
        cluster.check()
        return holds()

    wait_until(checked, DEADLINE, lambda: str({name: cluster.log(name).read_text() for name in cluster.machines}))


def _start(cluster: Cluster, run_dir: Path, names: str) -> None:
    for name in names:
        cluster.start(name, 1, usable_cores()[-1:])
    _wait_until(lambda: len(_events(run_dir, "step")) > 25, cluster)
    assert [start["world_size"] for start in _events(run_dir, "start")] == [len(names)]


def _ended(cluster: Cluster) -> bool:
    return all(launcher.poll() == 0 for launcher in cluster.machines.values())


@pytest.fixture(scope="module")
def left_alone(
    run_on_ranks: Callable[..., Any],
    base_flags: tuple[str, ...],
    metrics_of: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, float]:
    """The losses of the same run on two ranks that stay two."""
    output = tmp_path_factory.mktemp("alone") / "model"
    run_on_ranks(2, train_on_ranks, [*base_flags, *FLAGS, "--output_dir", str(output)], seconds=DEADLINE)
    return {record["step"]: record["loss"] for record in metrics_of(output.with_name("model.run"))}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_a_launcher_leaves_with_its_ranks_the_other_continues_without_losing_a_step(
    number: signal.Signals,
    cluster: Callable[[int], Cluster],
    run_dir: Path,
    metrics_of: Callable[..., Any],
    left_alone: dict[int, float],
) -> None:
    machines = cluster(2)
    _start(machines, run_dir, "AB")

    os.kill(machines.machines["B"].pid, number)
    machines.machines.pop("B").wait()
    _wait_until(lambda: _ended(machines), machines)

    _, second = _events(run_dir, "start")
    before = [event["step"] for event in read_events(run_dir) if event["time"] < second["time"]]
    assert (second["world_size"], second["step"]) == (1, max(before))
    losses = {record["step"]: record["loss"] for record in metrics_of(run_dir)}
    assert list(losses) == list(left_alone)
    np.testing.assert_allclose(list(losses.values()), list(left_alone.values()), rtol=1e-4)


def test_a_machine_can_join_two_others(
    cluster: Callable[[int], Cluster], run_dir: Path, metrics_of: Callable[..., Any], left_alone: dict[int, float]
) -> None:
    machines = cluster(3)
    _start(machines, run_dir, "AB")

    machines.start("C", 1, usable_cores()[-1:])
    _wait_until(lambda: _ended(machines), machines)

    assert _events(run_dir, "start")[-1]["world_size"] == 3
    losses = {record["step"]: record["loss"] for record in metrics_of(run_dir)}
    assert list(losses) == list(left_alone)
    np.testing.assert_allclose(list(losses.values()), list(left_alone.values()), rtol=1e-4)
