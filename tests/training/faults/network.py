"""Two machines in one: two network namespaces, joined by a cable that can be cut."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

CABLE = "cable"  # its end's name on each machine


@dataclass(frozen=True)
class Machine:
    """A network namespace with one address and half of the cores; number 0 keeps the store at which all meet."""

    number: int

    @property
    def name(self) -> str:
        """The namespace's."""
        return f"faults-{self.number}"

    @property
    def address(self) -> str:
        """On the cable."""
        return f"10.77.0.{self.number + 1}"

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` there."""
        cores = sorted(os.sched_getaffinity(0))
        mine = ",".join(map(str, cores[self.number :: 2] or cores))
        return ["ip", "netns", "exec", self.name, "taskset", "--cpu-list", mine, *command]

    @property
    def environment(self) -> dict[str, str]:
        """What torchrun must know there, where no name of a machine leads anywhere; gloo finds its interface itself."""
        return {
            "PET_LOCAL_ADDR": self.address,
            "PET_RDZV_CONF": f"is_host={int(self.number == 0)}",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Lay the cable, and take all away again."""
    machines = Machine(0), Machine(1)
    with ExitStack() as stack:
        for machine in machines:
            if subprocess.run(["ip", "netns", "add", machine.name], capture_output=True).returncode:
                pytest.skip("no network namespace can be made here: that takes root")
            stack.callback(_ip, "netns", "del", machine.name)
        a, b = (machine.name for machine in machines)
        _ip("link", "add", CABLE, "netns", a, "type", "veth", "peer", "name", CABLE, "netns", b)
        for machine in machines:
            _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", CABLE)
            _ip("-n", machine.name, "link", "set", "lo", "up")
            _ip("-n", machine.name, "link", "set", CABLE, "up")
        yield machines


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
