"""Runs an image without a container engine: in its own read-only root, as its own user, as the
first process.

buildah unpacks the root and the kernel's namespaces do the rest, so it works on machines where no
engine can run.
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

# $1 is the root. Nothing in it is writable: neither its files nor /tmp nor /dev/shm.
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
    """The folder with an unpacked image, and its ``Env``, ``Cmd``, ``User``, ``WorkingDir``, ... as Docker has them."""

    root: Path
    config: dict[str, Any]

    def command(self, *words: str, **environment: str) -> list[str]:
        """The command line that runs these words in the container; without any, the image's own command."""
        variables = [
            *self.config["Env"],
            *(f"{name}={value}" for name, value in environment.items()),
        ]
        inside = [str(self.root), self.config["User"], self.config["WorkingDir"], *variables]
        # --fork makes the command process 1 of its namespace, as in an engine: only then does it
        # get signals as the image's own command gets them. --kill-child ends it with its launcher.
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return [*enter, "bash", "-c", _ENTER, "enter", *inside, *(words or self.config["Cmd"])]

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words, **environment), capture_output=True, text=True, timeout=120
        )


def why_not() -> str | None:
    """What is missing to run containers here; None if nothing is."""
    if os.geteuid() != 0:
        return "only root may enter an image's root"
    missing = [tool for tool in ("buildah", "unshare", "chroot") if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed (apt-get install buildah)" if missing else None


def has_image(name: str) -> bool:
    """Whether an image is in buildah's local store."""
    command = ["buildah", "inspect", "--type", "image", name]
    return subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def opened(image: str) -> Iterator[Container]:
    """A container of a local image; it is removed at the end."""
    # Never pulled: an image of that name from a registry would not be the one that was just built.
    name = _buildah("from", "--pull-never", image)
    try:
        config = json.loads(_buildah("inspect", "--type", "image", image))["Docker"]["config"]
        yield Container(Path(_buildah("mount", name)), config)
    finally:
        _buildah("rm", name)


def stop(launcher: subprocess.Popen[Any]) -> int:
    """Send SIGTERM to a container's first process, as an engine does, and wait for its exit code."""
    # The signal goes to the process inside. Sent to the launcher, it would end `unshare`, and the
    # server would be killed instead of asked to stop.
    first = _first_process(launcher)
    if first is not None:
        os.kill(first, signal.SIGTERM)
    return launcher.wait(timeout=60)


def resident_bytes(launcher: subprocess.Popen[Any]) -> int:
    # Of the server's process; the launcher only waits for it.
    status = Path(f"/proc/{_first_process(launcher)}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def _first_process(launcher: subprocess.Popen[Any]) -> int | None:
    """The launcher's only child; None before it has started and after it has ended."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return int(children[0]) if children else None


def _buildah(*arguments: str) -> str:
    command = ["buildah", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
