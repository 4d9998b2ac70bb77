"""Runs what an image says, in its own root, read-only, as its own user, first process of its own: without an engine.

buildah gives the root; namespaces of the kernel do the rest, so that it works where no container engine can run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# $1 is the root. Nothing in it can be written: neither its files nor /tmp nor /dev/shm.
_ENTER = """
set -e
root=$1 user=$2 folder=$3; shift 3
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc -o ro proc "$root/proc"
mount -t tmpfs none "$root/dev"
for device in null urandom; do touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"; done
mount -o remount,ro "$root/dev"
exec chroot --userspec="$user" "$root" env --ignore-environment --chdir="$folder" "$@"
"""


@dataclass(frozen=True)
class Container:
    """An image's root and what the image says about running it.

    Attributes:
        root: Where the image's files lie on this machine.
        config: ``Env``, ``Cmd``, ``User``, ``WorkingDir``, ``Healthcheck``, ``Labels`` and so on, as Docker has them.
    """

    root: Path
    config: dict[str, Any]

    def command(self, *words: str, **environment: str) -> list[str]:
        """Return what runs these words in the container, or without any what the image runs by itself."""
        variables = [*self.config["Env"], *(f"{name}={value}" for name, value in environment.items())]
        inside = [str(self.root), self.config["User"], self.config["WorkingDir"], *variables]
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", _ENTER, "enter"]
        return [*enter, *inside, *(words or self.config["Cmd"])]

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a short command in the container."""
        return subprocess.run(self.command(*words, **environment), capture_output=True, text=True, timeout=120)


def why_not() -> str | None:
    """Say what is missing to run containers here, None if nothing is."""
    if os.geteuid() != 0:
        return "only root may enter an image's root"
    missing = [tool for tool in ("buildah", "unshare", "chroot") if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed (apt-get install buildah)" if missing else None


def has_image(name: str) -> bool:
    """Whether an image is there without a registry being asked."""
    return bool(_buildah("images", "--quiet", "--filter", f"reference={name}"))


@contextmanager
def opened(image: str) -> Iterator[Container]:
    """Give a container of an image that is there; it is removed at the end."""
    name = _buildah("from", "--pull-never", image)
    try:
        config = json.loads(_buildah("inspect", "--type", "image", image))["Docker"]["config"]
        yield Container(Path(_buildah("mount", name)), config)
    finally:
        _buildah("rm", name)


def stop(launcher: subprocess.Popen[Any]) -> int:
    """Send SIGTERM to a container's first process, as an engine does, and wait; returns the exit code."""
    first = _first_process(launcher)
    if first is not None:
        os.kill(first, signal.SIGTERM)
    return launcher.wait(timeout=60)


def resident_bytes(launcher: subprocess.Popen[Any]) -> int:
    """Return the resident memory of a container's first process."""
    status = Path(f"/proc/{_first_process(launcher)}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def _first_process(launcher: subprocess.Popen[Any]) -> int | None:
    """The launcher's only child; None before it is there, and after it is gone."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return int(children[0]) if children else None


def _buildah(*arguments: str) -> str:
    command = ["buildah", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
