"""The Indexed Job's pods as processes of this machine: its own command, and pods replaced as Kubernetes does it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.deployment.documented import REPOSITORY
from tests.inference.servers import free_port
from tests.training.conftest import Run

DEADLINE = 240.0
MOST_FAILURES = 6


class IndexedJob:
    """A Job whose pods run here.

    Args:
        manifest: The Job.
        folder: A new folder; `app` in it is the image's working directory with the shared volume `checkpoints`.
        flags: More flags of training; they win over the manifest's.
    """

    def __init__(self, manifest: Mapping[str, Any], folder: Path, flags: tuple[str, ...]) -> None:
        (self._container,) = manifest["spec"]["template"]["spec"]["containers"]
        name = manifest["metadata"]["name"]
        meeting = f"{name}-0.{manifest['spec']['template']['spec']['subdomain']}:29400"
        here = f"127.0.0.1:{free_port()}"
        arguments = [argument.replace(meeting, here) for argument in self._container["args"]]
        assert arguments != self._container["args"], f"no rendezvous at {meeting}"
        self._command = [*self._container["command"], *arguments, *flags]
        self._folder = folder
        self.app = folder / "app"
        (self.app / "checkpoints").mkdir(parents=True)
        for package in ("training", "inference"):
            (self.app / package).symlink_to(REPOSITORY / package)
        self.failures = 0
        self.started: list[Run] = []
        self.pods = [self._start(index) for index in range(manifest["spec"]["completions"])]

    def _start(self, index: int) -> Run:
        place = self._folder / f"pod_{len(self.started)}"
        place.mkdir()
        environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "JOB_COMPLETION_INDEX": str(index),
            **{entry["name"]: entry["value"] for entry in self._container["env"]},
            "HOME": str(place),
        }
        self.started.append(Run(self._command, place, environment, self.app))
        return self.started[-1]

    @property
    def exit_codes(self) -> list[int | None]:
        """Of the newest pod of each index; None while it runs."""
        return [pod.process.poll() for pod in self.pods]

    def replace_failed(self) -> None:
        """Do what the Job's controller does: start a pod for each index whose newest one failed."""
        for index, code in enumerate(self.exit_codes):
            if code:
                self.failures += 1
                assert self.failures <= MOST_FAILURES, self.output()
                self.pods[index] = self._start(index)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Look after the pods until a condition holds."""
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, self.output()
            self.replace_failed()
            time.sleep(0.02)

    def output(self) -> str:
        """What all pods printed."""
        return "\n".join(f"pod {number}:\n{run.out}\n{run.err}" for number, run in enumerate(self.started))

    def kill(self) -> None:
        """End all pods."""
        for run in self.started:
            if run.process.poll() is None:
                run.kill()
