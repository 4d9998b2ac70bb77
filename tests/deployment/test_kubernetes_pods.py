"""What the pods of training run, run here, with pods that are lost on the way."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deployment.pods import Pods, indexed_job, train_job
from tests.training.conftest import BASE, Run

OUTPUT = Path("checkpoints") / "distilbert_agnews"
# The manifest's own flags stay before these, which win.
FLAGS = (*BASE, "--batch_size", "4", "--save_every", "2", "--metrics_port", "0")
LAST_STEP = 16
StartPods = Callable[[Path, tuple[str, ...]], Pods]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[StartPods], Pods]]:
    started: list[Pods] = []

    def start_pods(job: StartPods) -> Pods:
        started.append(job(tmp_path_factory.mktemp("job"), FLAGS))
        return started[-1]

    yield start_pods
    for pods in started:
        pods.kill()


def _finish(pods: Pods) -> str:
    pods.wait_until(lambda: pods.exit_codes == [0, 0])
    return hashlib.sha256((pods.app / OUTPUT / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(start: Callable[[StartPods], Pods]) -> str:
    """The hash of the weights of a run whose pods were left alone."""
    pods = start(indexed_job)
    weights = _finish(pods)
    assert pods.failures == 0, pods.output()
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
    start: Callable[[StartPods], Pods], undisturbed: str, job: StartPods, lose: Callable[[Run], None], index: int
) -> None:
    pods = start(job)
    pods.wait_until(lambda: _saved(pods))
    lose(pods.newest[index])

    # No pod may count as done before the run is: its index would never be started again.
    assert 0 not in pods.exit_codes
    assert _finish(pods) == undisturbed, pods.output()
    records = map(json.loads, (pods.app / f"{OUTPUT}.run" / "metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, LAST_STEP + 1))
