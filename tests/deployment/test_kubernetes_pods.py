"""What the pods of training run, run here, with pods that are lost on the way."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.pods import Pods, indexed_job, train_job
from tests.training.conftest import BASE, Run

OUTPUT = Path("checkpoints") / "distilbert_agnews"
# The manifest's own flags stay before these, which win.
FLAGS = (*BASE, "--batch_size", "4", "--save_every", "2", "--metrics_port", "0")
LAST_STEP = 16
CHEAP_RANK = Path(__file__).with_name("cheap_rank.py")
StartPods = Callable[..., Pods]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pods]]:
    started: list[Pods] = []

    def start_pods(job: StartPods, *flags: str, **options: Any) -> Pods:
        started.append(job(tmp_path_factory.mktemp("job"), flags, **options))
        return started[-1]

    yield start_pods
    for pods in started:
        pods.kill()


def _finish(pods: Pods) -> str:
    pods.wait_until(lambda: pods.exit_codes == [0, 0])
    return hashlib.sha256((pods.app / OUTPUT / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(start: Callable[..., Pods]) -> str:
    """The hash of the weights of a run whose pods were left alone."""
    pods = start(indexed_job, *FLAGS)
    weights = _finish(pods)
    assert len(pods.started) == 2, pods.output()
    return weights


def _saved(pods: Pods) -> bool:
    checkpoints = pods.app / f"{OUTPUT}.run" / "checkpoints"
    return any((checkpoints / f"step_{step:08d}").exists() for step in range(4, LAST_STEP))


def _kill(pod: Run) -> None:
    pod.kill()


def _evict(pod: Run) -> None:
    pod.process.send_signal(signal.SIGTERM)
    pod.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "lose", "index"),
    [
        (indexed_job, _kill, 0),
        (indexed_job, _kill, 1),
        (indexed_job, _evict, 0),
        (indexed_job, _evict, 1),
        (train_job, _kill, 0),
        (train_job, _evict, 1),
    ],
)
def test_a_run_goes_on_when_a_lost_pod_is_replaced(
    start: Callable[..., Pods], undisturbed: str, job: StartPods, lose: Callable[[Run], None], index: int
) -> None:
    pods = start(job, *FLAGS)
    pods.wait_until(lambda: _saved(pods))
    pods.disrupt(index, lose)

    # No pod may count as done before the run is: its index would never be started again.
    assert 0 not in pods.exit_codes
    assert _finish(pods) == undisturbed, pods.output()
    assert pods.failures == {}, pods.output()
    records = map(json.loads, (pods.app / f"{OUTPUT}.run" / "metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, LAST_STEP + 1))


def _step(volume: Path) -> int:
    saved = volume / "step"
    return int(saved.read_text() or 0) if saved.exists() else 0


def _starts(volume: Path) -> list[str]:
    return (volume / "starts").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("job", [indexed_job, train_job])
def test_eight_nodes_lose_one_pod_and_then_two_and_no_failure_counts(
    start: Callable[..., Pods], job: StartPods
) -> None:
    pods = start(job, nodes=8, script=CHEAP_RANK)
    volume = pods.app / "checkpoints"
    pods.wait_until(lambda: _step(volume) > 3)

    pods.disrupt(0, _kill)  # where all of them meet
    pods.wait_until(lambda: len(_starts(volume)) == 2)
    pods.disrupt(3, _evict)
    pods.disrupt(5, _kill)
    pods.wait_until(lambda: len(_starts(volume)) == 3)
    (volume / "finish").touch()

    pods.wait_until(lambda: pods.exit_codes == [0] * 8)
    assert pods.failures == {}
    starts = [re.fullmatch(r"8 ranks from step (\d+)", line) for line in _starts(volume)]
    assert 0 == int(starts[0][1]) < int(starts[1][1]) < int(starts[2][1])


@pytest.mark.slow
@pytest.mark.parametrize("job", [indexed_job, train_job])
def test_a_wrong_flag_ends_a_job_of_eight_nodes_at_once(start: Callable[..., Pods], job: StartPods) -> None:
    pods = start(job, "--epoch", "3", nodes=8)

    pods.wait_until_failed()

    assert pods.failed == "PodFailurePolicy"
    assert len(pods.started) == 8
    assert "error: --epoch: no such flag; did you mean --epochs? [flag-unknown]" in pods.output()


@pytest.mark.slow
def test_a_node_that_keeps_failing_ends_the_job_and_the_others_do_not_count(start: Callable[..., Pods]) -> None:
    pods = start(train_job, script=CHEAP_RANK, restarts=0)
    (pods.app / "checkpoints" / "broken").write_text("1")

    pods.wait_until_failed()

    assert pods.failed == "MaxFailedIndexesExceeded"
    assert pods.failures.keys() == {1}


@pytest.mark.slow
def test_ranks_that_never_met_count_as_a_failure_of_the_node_where_they_meet(
    start: Callable[..., Pods], tmp_path: Path
) -> None:
    script = tmp_path / "never_met.py"
    script.write_text("import sys; sys.exit(69)")  # that of a rank that lost another one
    pods = start(train_job, script=script, restarts=0)

    pods.wait_until_failed()

    assert pods.failed == "MaxFailedIndexesExceeded"
    assert pods.failures.keys() == {0}


@pytest.mark.slow
@pytest.mark.parametrize("has_made_steps", [False, True])
def test_missing_data_ends_a_new_job_at_once_and_counts_in_one_that_has_made_steps(
    start: Callable[..., Pods], tmp_path: Path, has_made_steps: bool
) -> None:
    if has_made_steps:
        (tmp_path / "model.run").mkdir()
        (tmp_path / "model.run" / "metrics.jsonl").touch()
    pods = start(train_job, *FLAGS, "--dataset", "gone.csv", "--output_dir", str(tmp_path / "model"))

    pods.wait_until(lambda: bool(pods.failed or pods.failures))

    assert (pods.failed, bool(pods.failures)) == (("", True) if has_made_steps else ("PodFailurePolicy", False))
    assert "gone.csv" in pods.output()
