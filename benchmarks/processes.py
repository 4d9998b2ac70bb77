"""Ranks of a measurement: processes started together, each on its own cores, and what a function returns on each."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from common.errors import TrainingFailure, UserError
from common.hardware import usable_cpus
from deployment.launchers import usable_cores

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 4 * 3600  # seconds


@dataclass(frozen=True)
class Layout:
    """How many processes, and how many threads each has; each thread gets a core."""

    processes: int
    threads: int

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``PROCESSESxTHREADS``.

        Raises:
            UserError: it is not of that form, or the machine has too few cores.
        """
        processes, times, threads = text.partition("x")
        is_count = [part.isdecimal() and int(part) > 0 for part in (processes, threads)]
        if not (times and all(is_count)):
            raise UserError(
                f"--layouts {text}: must be PROCESSESxTHREADS, such as 2x1", code="flag-value"
            )
        layout = cls(int(processes), int(threads))
        cores = layout.processes * layout.threads
        if cores > usable_cpus():
            message = (
                f"--layouts {text}: needs {cores} cores, and this process may use {usable_cpus()}"
            )
            raise UserError(message, code="cores-too-few")
        return layout

    def __str__(self) -> str:
        return f"{self.processes} × {self.threads}"


def run_ranks(
    function: Callable[..., Any], layout: Layout, *, pin: bool = True, **arguments: Any
) -> list[Any]:
    """Call a module's function on every rank of a layout, each in a new process.

    Ranks beyond the number of cores share them, from the first on. Arguments and results must be
    what JSON can hold.

    Returns:
        What the function returned on each rank.

    Raises:
        TrainingFailure: a rank failed, with the last line that it wrote.
    """
    # A rank imports the function by its file's name: in a module started with -m, `__module__` is
    # only "__main__".
    file = Path(inspect.getfile(function)).resolve().relative_to(ROOT).with_suffix("")
    module, given = ".".join(file.parts), json.dumps(arguments)
    command = [sys.executable, "-m", "benchmarks.processes", module, function.__name__, given]
    port, cores = free_port(), usable_cores()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(layout.threads)}
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * layout.processes)
        ]
        # Two streams per rank: libraries may warn on the second one while the first ends with the
        # result.
        outputs, errors = files[: layout.processes], files[layout.processes :]
        processes: list[subprocess.Popen[str]] = []
        stack.callback(_kill, processes)
        for rank in range(layout.processes):
            own = [
                cores[(rank * layout.threads + i) % len(cores)]
                for i in range(layout.threads)
                if pin and cores
            ]
            # Without these variables, which torchrun would set, a process forms no process group.
            if layout.processes > 1:
                size = str(layout.processes)
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                environment |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            # A child inherits its parent's cores, so the rank is pinned from its first instruction:
            # libraries count the cores when they are loaded, and start that many threads.
            with on_cores(own):
                # Files and not pipes: a rank that writes more than a pipe holds would wait for a
                # reader.
                streams = {"stdout": outputs[rank], "stderr": errors[rank]}
                processes.append(subprocess.Popen(command, env=environment, text=True, **streams))
        _wait(processes, errors, f"{module}.{function.__name__}")
        return [json.loads(_lines(output)[-1]) for output in outputs]


def _wait(processes: list[subprocess.Popen[str]], errors: list[IO[str]], what: str) -> None:
    # Until all have ended or one has failed: the others would then wait for it in a collective, up
    # to its timeout.
    deadline = time.monotonic() + TIMEOUT
    while None in (codes := [process.poll() for process in processes]) and not any(codes):
        if time.monotonic() > deadline:
            raise TrainingFailure(
                f"{what}: not done after {TIMEOUT // 3600} hours", code="benchmark-failed"
            )
        time.sleep(0.05)
    failed = next((rank for rank, process in enumerate(processes) if process.poll()), None)
    if failed is not None:
        message = (
            f"{what}: rank {failed} ended with code {processes[failed].returncode} "
            f"({last_line(errors[failed])})"
        )
        raise TrainingFailure(message, code="benchmark-failed")


def _kill(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Processes started in this context run only on these cores; an empty list changes nothing."""
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


def last_line(file: IO[str]) -> str:
    """The last line of a log that is not blank."""
    return (_lines(file) or ["it wrote nothing"])[-1]


def free_port() -> int:
    """A port that no process listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    module, name, given = sys.argv[1:]
    print(
        json.dumps(getattr(importlib.import_module(module), name)(**json.loads(given))), flush=True
    )
