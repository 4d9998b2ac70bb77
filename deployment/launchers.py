"""Launchers: torchrun's, each of which stands for a machine, started, lost and joined again on this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.errors import TrainingFailure

TRAIN = Path(__file__).resolve().parents[1] / "training" / "train_ddp.py"
# How long the others wait for one machine more, and how soon one that says nothing counts as lost:
# seconds.
RENDEZVOUS = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"
# The launchers' own store is kept from the ranks: PyTorch 2.13 would wait in it forever if a
# machine joins again.
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


class Cluster:
    """Machines that train together, simulated on this one; with fewer than ``most``, a start waits
    a few seconds for more.
    """

    def __init__(self, flags: Sequence[str], output_dir: Path, most: int = 2) -> None:
        self.output_dir = output_dir
        self._most = most
        self._flags = (*flags, "--output_dir", str(output_dir))
        self.machines: dict[str, subprocess.Popen[bytes]] = {}
        self._meeting = tempfile.TemporaryDirectory(prefix="meeting_")

    def start(self, name: str, processes: int, cores: Sequence[int]) -> None:
        """Start a machine with some ranks on some cores."""
        launcher = (
            *("--rdzv_backend=c10d", "--rdzv_id=demo", "--local_addr=127.0.0.1"),
            *(f"--nnodes=1:{self._most}", f"--nproc_per_node={processes}", "--max_restarts=5"),
            # Real machines would need a port, which torchrun opens to everyone; these share a file
            # of this user.
            f"--rdzv_endpoint={self._meeting.name}/store",
            f"--rdzv_conf={RENDEZVOUS},store_type=file",
        )
        self.machines[name] = launch(launcher, self._flags, self.log(name), cores)

    def log(self, name: str) -> Path:
        return self.output_dir.with_name(f"{self.output_dir.name}.machine_{name}.log")

    def lose(self, name: str) -> None:
        """SIGKILL a machine's ranks and its launcher, as in a power failure."""
        kill_tree(self.machines.pop(name))

    def check(self) -> None:
        """Raise TrainingFailure if a machine has failed."""
        for name, launcher in self.machines.items():
            if launcher.poll():
                raise TrainingFailure(
                    f"machine {name} ended with code {launcher.returncode}; see {self.log(name)}",
                    code="demo-failed",
                )

    def close(self) -> None:
        for launcher in self.machines.values():
            kill_tree(launcher)
        self._meeting.cleanup()


def launch(
    launcher: Sequence[str], flags: Sequence[str], log: Path, cores: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start torchrun, pinned to ``cores`` if any; as many as ranks, so that each rank computes with one thread."""
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, str(TRAIN), *flags]
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Ctrl-C at the terminal then reaches the caller alone, which ends the machines itself.
            start_new_session=True,
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )


def usable_cores() -> list[int]:
    """The cores that this process may use, by number; empty if the system does not say (not Linux)."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def kill_tree(launcher: subprocess.Popen[bytes]) -> None:
    """SIGKILL a launcher and its ranks."""
    if launcher.poll() is None:
        # The ranks are listed before anybody dies: afterwards they have another parent.
        listed = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True)
        kill([*map(int, listed.stdout.split()), launcher.pid])
    launcher.wait()


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
