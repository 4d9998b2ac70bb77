"""Ranks of a real training run without a launcher: train_ddp.py's main in forks of a server that has all imported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from common.errors import run_command
from tests.processes import free_port, start_fork_server, wait_until
from training import train_ddp
from training.fault_tolerance.interruption import run_rank

DEADLINE = 120.0  # seconds after which a run counts as hanging


class StartedRanks:
    """Ranks that run, or have run, each with files of what it printed.

    Args:
        folder: a new folder.
        world_size: number of ranks; one is a process without a group.
        flags: of train_ddp.py.
        fault: called on each rank before it trains, with its number.
    """

    def __init__(
        self, folder: Path, world_size: int, flags: Sequence[Any], fault: Callable[[int], None] | None = None
    ) -> None:
        self.folder = folder
        folder.mkdir()
        port = free_port()
        context = multiprocessing.get_context("forkserver")
        start_fork_server()
        self.processes = [
            context.Process(target=_train, args=(folder, (rank, world_size, port), [*map(str, flags)], fault))
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def out(self, rank: int = 0) -> str:
        """What a rank has printed so far."""
        path = self.folder / f"{rank}.out"
        return path.read_text() if path.exists() else ""

    @property
    def errors(self) -> list[str]:
        """What all ranks have said of errors, line by line."""
        return [line for path in sorted(self.folder.glob("*.err")) for line in path.read_text().splitlines()]

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a rank a signal."""
        os.kill(self.processes[rank].pid, number)

    def wait_until(self, what: Callable[[], Any]) -> None:
        """Look until ``what`` holds; a failed test if it does not in time."""
        wait_until(what, DEADLINE, lambda: f"{self.out()}\n{self.errors}")

    def exit_code(self, rank: int) -> int:
        """A rank's exit code, once it has ended; a failed test if it does not in time."""
        self.processes[rank].join(DEADLINE)
        if self.processes[rank].exitcode is None:
            pytest.fail(f"rank {rank} still runs\n{self.out()}\n{self.errors}")
        return self.processes[rank].exitcode

    def kill(self) -> None:
        """End all, stopped ones too."""
        for process in self.processes:
            process.kill()
            process.join()


def _train(folder: Path, place: tuple[int, int, int], flags: list[str], fault: Callable[[int], None] | None) -> None:
    rank, world_size, port = place
    for number, suffix in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{rank}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    os.chdir(folder)
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    sys.stdout.reconfigure(line_buffering=True)
    sys.argv = ["train_ddp.py", *flags]
    if fault is not None:
        fault(rank)
    run_rank(lambda: run_command(train_ddp.main))
