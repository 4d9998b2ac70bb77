"""Worker processes: started together, each on its cores, and their results gathered."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from common.errors import TrainingFailure, UserError
from common.hardware import usable_cpus
from deployment.launchers import usable_cores

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 4 * 3600  # seconds that a measurement may take


@dataclass(frozen=True)
class Layout:
    """How many processes, and how many threads each has, on as many cores of its own."""

    processes: int
    threads: int

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``PROCESSESxTHREADS``.

        Raises:
            UserError: it is not of that form, or the machine has too few cores.
        """
        processes, times, threads = text.partition("x")
        if not (times and processes.isdecimal() and threads.isdecimal() and int(processes) and int(threads)):
            raise UserError(f"--layouts {text}: must be PROCESSESxTHREADS, such as 2x1", code="flag-value")
        layout = cls(int(processes), int(threads))
        if layout.cores > usable_cpus():
            raise UserError(
                f"--layouts {text}: needs {layout.cores} cores, and this process may use {usable_cpus()}",
                code="cores-too-few",
            )
        return layout

    @property
    def cores(self) -> int:
        """Cores that it takes in all."""
        return self.processes * self.threads

    def __str__(self) -> str:
        return f"{self.processes} × {self.threads}"


def end_with_children() -> None:
    """On SIGTERM leave as on an error, so that no worker is left behind."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def run_ranks(
    arguments: Sequence[str], layout: Layout, *, pin: bool = True, module: str = "benchmarks.worker"
) -> list[dict[str, Any]]:
    """Run ``python -m benchmarks.worker``, or another module, as every rank of a layout.

    Ranks beyond the cores share them, from the first on.

    Returns:
        The JSON line of each rank, in their order.

    Raises:
        TrainingFailure: a rank failed, with the last line that it wrote.
    """
    port = free_port()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * layout.processes)]
        outputs, errors = files[: layout.processes], files[layout.processes :]
        processes: list[subprocess.Popen[str]] = []
        stack.callback(_end, processes)
        for rank in range(layout.processes):
            with on_cores(_cores_of(rank, layout) if pin else ()):
                processes.append(_start([module, *arguments], layout, rank, port, outputs[rank], errors[rank]))
        _wait(processes, errors, " ".join(arguments[1:]))
        return [json.loads(_lines(output)[-1]) for output in outputs]


def _cores_of(rank: int, layout: Layout) -> list[int]:
    cores = usable_cores()
    return [cores[(rank * layout.threads + i) % len(cores)] for i in range(layout.threads)] if cores else []


def _start(
    arguments: Sequence[str], layout: Layout, rank: int, port: int, output: IO[str], error: IO[str]
) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(layout.threads)}
    if layout.processes > 1:
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(layout.processes),
            "LOCAL_WORLD_SIZE": str(layout.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    command = [sys.executable, "-m", *arguments]
    return subprocess.Popen(command, env=environment, stdout=output, stderr=error, text=True)


def _wait(processes: list[subprocess.Popen[str]], errors: list[IO[str]], what: str) -> None:
    deadline = time.monotonic() + LONGEST
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        if time.monotonic() > deadline:
            raise TrainingFailure(f"{what}: not done after {LONGEST // 3600} hours", code="benchmark-failed")
        time.sleep(0.05)
    failed = next((rank for rank, process in enumerate(processes) if process.poll()), None)
    if failed is not None:
        last = (_lines(errors[failed]) or ["it wrote nothing"])[-1]
        raise TrainingFailure(
            f"{what}: rank {failed} ended with code {processes[failed].returncode} ({last})", code="benchmark-failed"
        )


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """What starts in this context runs on these cores alone; with none, as without it."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _lines(file: IO[str]) -> list[str]:
    file.seek(0)
    return [line for line in file.read().splitlines() if line.strip()]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
