"""Pods of training as processes of this machine: the manifests' own commands, replaced as Kubernetes does it."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.deployment.documented import REPOSITORY
from tests.deployment.manifests import only, pod_templates
from tests.inference.servers import free_port
from tests.training.conftest import Run

DEADLINE = 600.0
SCRIPT = "training/train_ddp.py"


class Pods:
    """The pods of a job, one for each index.

    Args:
        folder: A new folder; `app` in it is the image's working directory with the shared volume `checkpoints`.
        job: The specification of the job, whose policy decides what a failure means.
        command: What each of them runs.
        environments: The variables of each.
    """

    def __init__(
        self, folder: Path, job: dict[str, Any], command: Sequence[str], environments: list[dict[str, str]]
    ) -> None:
        assert command[0] == "python"
        self._folder, self._job, self._environments = folder, job, environments
        self._command = [sys.executable, *command[1:]]
        self.app = folder / "app"
        (self.app / "checkpoints").mkdir(parents=True)
        for package in ("training", "inference"):
            (self.app / package).symlink_to(REPOSITORY / package)
        self.failures: Counter[int] = Counter()  # those that count, by index
        self.failed = ""  # why the job has failed
        self.started: list[Run] = []
        self._disrupted: list[Run] = []
        self.newest = [self._start(index) for index in range(len(environments))]

    def _start(self, index: int) -> Run:
        place = self._folder / f"pod_{len(self.started)}"
        place.mkdir()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "HF_HUB_OFFLINE": "1", **self._environments[index], "HOME": str(place)}
        environment |= {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(place)}
        self.started.append(Run(self._command, place, environment, self.app, warm=True))
        return self.started[-1]

    @property
    def exit_codes(self) -> list[int | None]:
        """Of the newest pod of each index; None while it runs."""
        return [pod.process.poll() for pod in self.newest]

    def disrupt(self, index: int, end: Callable[[Run], object]) -> None:
        """End a pod as the cluster does: it gets the condition DisruptionTarget."""
        self._disrupted.append(self.newest[index])
        end(self.newest[index])

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Replace pods that fail, as the Job's controller does, until a condition holds."""
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, self.output()
            assert not self.failed, f"{self.failed}\n{self.output()}"
            for index, code in enumerate(self.exit_codes):
                if code and not self.failed:
                    self._count(index, code)
                    if not self.failed:
                        self.newest[index] = self._start(index)
            time.sleep(0.02)

    def wait_until_failed(self) -> None:
        """Replace pods until the job has failed for good."""
        self.wait_until(lambda: bool(self.failed))

    def _count(self, index: int, code: int) -> None:
        match self._action(self.newest[index], 128 - code if code < 0 else code):
            case "FailJob":
                self.failed = "PodFailurePolicy"
            case "Count":
                self.failures[index] += 1
                failed = [one for one, count in self.failures.items() if count > self._job["backoffLimitPerIndex"]]
                if len(failed) > self._job["maxFailedIndexes"]:
                    self.failed = "MaxFailedIndexesExceeded"

    def _action(self, pod: Run, code: int) -> str:
        """What the first rule that matches says; without one a failure counts."""
        for rule in self._job["podFailurePolicy"]["rules"]:
            conditions = [one["type"] for one in rule.get("onPodConditions", [])]
            if code in rule.get("onExitCodes", {}).get("values", []):
                return rule["action"]
            if "DisruptionTarget" in conditions and pod in self._disrupted:
                return rule["action"]
        return "Count"

    def output(self) -> str:
        """What all pods printed."""
        return "\n".join(f"pod {number}:\n{run.out}\n{run.err}" for number, run in enumerate(self.started))

    def kill(self) -> None:
        """End all pods."""
        for run in self.started:
            if run.process.poll() is None:
                run.kill()


def _variables(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def indexed_job(folder: Path, flags: Sequence[str], nodes: int = 2, **changes: Any) -> Pods:
    """Start the pods of the Indexed Job; see `_arguments` for the changes."""
    manifest = only("training/indexed-job", "Job")
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    meeting = f"{manifest['metadata']['name']}-0.{pod['subdomain']}:29400"
    here = f"127.0.0.1:{free_port()}"
    arguments = [argument.replace(meeting, here) for argument in container["args"]]
    assert arguments != container["args"], f"no rendezvous at {meeting}"
    environments = [
        {"JOB_COMPLETION_INDEX": str(index), **_variables(container), "PET_NNODES": str(nodes)}
        for index in range(nodes)
    ]
    command = [*container["command"], *_arguments(arguments, flags, **changes)]
    return Pods(folder, manifest["spec"], command, environments)


def train_job(folder: Path, flags: Sequence[str], nodes: int = 2, **changes: Any) -> Pods:
    """Start the pods that Kubeflow makes of the TrainJob, with the variables that its torch plugin sets."""
    trainer = only("training/kubeflow", "TrainJob")["spec"]["trainer"]
    runtime = only("training/kubeflow", "TrainingRuntime")["spec"]["template"]["spec"]
    job = runtime["replicatedJobs"][0]["template"]["spec"]
    (container,) = pod_templates("training/kubeflow")[0]["spec"]["containers"]
    shared = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"],
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    environments = [
        {**shared, "PET_NODE_RANK": str(index), "JOB_COMPLETION_INDEX": str(index), **_variables(container)}
        for index in range(nodes)
    ]
    # Kubernetes replaces $(NAME) in arguments.
    arguments = [re.sub(r"\$\((\w+)\)", lambda found: shared[found[1]], argument) for argument in trainer["args"]]
    return Pods(folder, job, [*trainer["command"], *_arguments(arguments, flags, **changes)], environments)


def _arguments(
    manifest: list[str], flags: Sequence[str], *, script: Path | None = None, restarts: int | None = None
) -> list[str]:
    """The manifest's arguments with more `flags` of training, which win; another `script` gets these alone."""
    torchrun, training = manifest[: manifest.index(SCRIPT)], manifest[manifest.index(SCRIPT) :]
    if restarts is not None:
        torchrun.append(f"--max_restarts={restarts}")
    return [*torchrun, *(training if script is None else [str(script)]), *flags]
