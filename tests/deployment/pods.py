"""Pods of training as processes of this machine: the manifests' own commands, replaced as Kubernetes does it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.deployment.documented import REPOSITORY
from tests.deployment.manifests import only, pod_templates
from tests.inference.servers import free_port
from tests.training.conftest import Run

DEADLINE = 600.0
MOST_FAILURES = 6


class Pods:
    """The pods of a job, one for each index.

    Args:
        folder: A new folder; `app` in it is the image's working directory with the shared volume `checkpoints`.
        command: What each of them runs.
        environments: The variables of each.
    """

    def __init__(self, folder: Path, command: list[str], environments: list[dict[str, str]]) -> None:
        self._folder, self._command, self._environments = folder, command, environments
        self.app = folder / "app"
        (self.app / "checkpoints").mkdir(parents=True)
        for package in ("training", "inference"):
            (self.app / package).symlink_to(REPOSITORY / package)
        self.failures = 0
        self.started: list[Run] = []
        self.newest = [self._start(index) for index in range(len(environments))]

    def _start(self, index: int) -> Run:
        place = self._folder / f"pod_{len(self.started)}"
        place.mkdir()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "HF_HUB_OFFLINE": "1", **self._environments[index], "HOME": str(place)}
        self.started.append(Run(self._command, place, environment, self.app))
        return self.started[-1]

    @property
    def exit_codes(self) -> list[int | None]:
        """Of the newest pod of each index; None while it runs."""
        return [pod.process.poll() for pod in self.newest]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Replace pods that fail, as the Job's controller does, until a condition holds."""
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, self.output()
            for index, code in enumerate(self.exit_codes):
                if code:
                    self.failures += 1
                    assert self.failures <= MOST_FAILURES, self.output()
                    self.newest[index] = self._start(index)
            time.sleep(0.02)

    def output(self) -> str:
        """What all pods printed."""
        return "\n".join(f"pod {number}:\n{run.out}\n{run.err}" for number, run in enumerate(self.started))

    def kill(self) -> None:
        """End all pods."""
        for run in self.started:
            if run.process.poll() is None:
                run.kill()


def _variables(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


def indexed_job(folder: Path, flags: tuple[str, ...]) -> Pods:
    """Start the pods of the Indexed Job; `flags` of training win over the manifest's."""
    manifest = only("training/indexed-job", "Job")
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    meeting = f"{manifest['metadata']['name']}-0.{pod['subdomain']}:29400"
    here = f"127.0.0.1:{free_port()}"
    arguments = [argument.replace(meeting, here) for argument in container["args"]]
    assert arguments != container["args"], f"no rendezvous at {meeting}"
    environments = [
        {"JOB_COMPLETION_INDEX": str(index), **_variables(container)}
        for index in range(manifest["spec"]["completions"])
    ]
    return Pods(folder, [*container["command"], *arguments, *flags], environments)


def train_job(folder: Path, flags: tuple[str, ...]) -> Pods:
    """Start the pods that Kubeflow makes of the TrainJob, with the variables that its torch plugin sets."""
    trainer = only("training/kubeflow", "TrainJob")["spec"]["trainer"]
    (container,) = pod_templates("training/kubeflow")[0]["spec"]["containers"]
    shared = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"],
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    environments = [
        {**shared, "PET_NODE_RANK": str(index), **_variables(container)} for index in range(trainer["numNodes"])
    ]
    return Pods(folder, [*trainer["command"], *trainer["args"], *flags], environments)
