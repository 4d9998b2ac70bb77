"""Processes of the tests: Python programs, and functions on gloo ranks, that start with the slow imports done.

Importing PyTorch and transformers takes a process about five seconds of CPU. Python's fork server does it once for
each worker of pytest. What starts here is a fork of that server, which has computed nothing before: a process with its
own environment, files, signals and exit code. The plots of a report are blank images there.
"""

from __future__ import annotations

import base64
import fcntl
import io
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from learn.ranks import Ended, RankPool, send
from training.distributed.ranks import Ranks

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAM_SECONDS = 240.0  # after which a program counts as hanging
WHITE_PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="
)
PRELOADED = (
    "fastapi",
    "pytest",
    "sklearn.linear_model",
    "sklearn.svm",
    "tests.processes",
    "torch._dynamo",  # which every optimizer imports when it is made
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "transformers.models.bert.modeling_bert",
    "transformers.models.distilbert.modeling_distilbert",
    "transformers.models.llama.modeling_llama",
    "inference.engines.model_loader",
    "inference.http.routes.predict",
    "training.monitoring.plots",
    "training.run.trainer",
    "uvicorn",
)


def save_blank(figure: Figure, file: io.BytesIO | str | Path, **settings: Any) -> None:
    """Be ``Figure.savefig``, but render no plot of a report: they take half the processor time of a tiny run."""
    if isinstance(file, io.BytesIO):
        file.write(WHITE_PIXEL)
    else:
        _SAVE_FIGURE(figure, file, **settings)


_SAVE_FIGURE = Figure.savefig


def start_fork_server() -> None:
    """Start this process's fork server, unless it runs; whoever starts it decides what its forks need not import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # read when it is imported
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
        forkserver.ensure_running()


class PythonProcess:
    """What ``subprocess.Popen([sys.executable, *arguments])`` is, but a fork that has imported PyTorch.

    Args:
        arguments: ``-m MODULE``, ``-c CODE`` or a script, and theirs.
        env: the whole environment.
        cwd: where it starts.
        files: for its stdout and stderr, and its stdin, if it reads.
        method: ``forkserver``; ``fork`` where this process is such a fork itself.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        cwd: str | Path,
        files: Sequence[str | Path | None],
        method: str = "forkserver",
    ) -> None:
        if method == "forkserver":
            start_fork_server()
        self._process = multiprocessing.get_context(method).Process(
            target=_run_program, args=(list(arguments), dict(env), str(cwd), [file and str(file) for file in files])
        )
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        """The same."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; raises subprocess.TimeoutExpired as Popen does."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            # The fork server reaps a process that has been killed a moment before it reports its end.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run_program(arguments: list[str], env: dict[str, str], cwd: str, files: list[str | None]) -> None:
    """Be the program that ``python *arguments`` would be."""
    _start_afresh(env, cwd, files)
    # torchrun starts its ranks as programs: here they are forks of it. There is no public way (torch 2.13).
    SubprocessHandler._popen = lambda self, args, env: PythonProcess(
        args[1:], env, Path.cwd(), [self._stdout and self._stdout.name, self._stderr and self._stderr.name], "fork"
    )
    Figure.savefig = save_blank
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        arguments = arguments[1:]
    match arguments:
        case ["-m", module, *rest]:
            sys.argv, sys.path[0] = [module, *rest], cwd
            package = hasattr(sys.modules.get(module), "__path__")
            sys.modules.pop(f"{module}.__main__" if package else module, None)  # it was imported, and is to run
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv, sys.path[0] = ["-c", *rest], cwd
            exec(code, {"__name__": "__main__"})
        case [script, *rest]:
            sys.argv, sys.path[0] = [script, *rest], str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")


def _start_afresh(env: dict[str, str], cwd: str, files: list[str | None]) -> None:
    """Give this fork what a started program has: its own signals, streams, variables and folder."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals():  # a program that is started keeps none of its parent's handlers
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in zip((1, 2, 0), files, strict=False):
        if file is not None:
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has closed the one there was
    # The server's may be a file, which has positions, and ours a pipe, which has none.
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ |= env
    os.chdir(cwd)
    if "RANK" in env:  # for whoever looks for ranks: the environment in /proc is that of the fork server
        Path("/proc/self/comm").write_text(f"rank {env['RANK']}")
    if "OMP_NUM_THREADS" in env:  # read by OpenMP when it is loaded, which it is already
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))


def run_python(
    arguments: Sequence[str | Path], *, stdin: bytes = b"", cwd: Path = REPOSITORY, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end, with these variables besides our own."""
    with tempfile.TemporaryDirectory() as folder:
        out, err, given = (Path(folder) / name for name in ("out", "err", "in"))
        given.write_bytes(stdin)
        process = PythonProcess([*map(str, arguments)], {**os.environ, **env}, cwd, [out, err, given])
        try:
            code = process.wait(PROGRAM_SECONDS)
        finally:
            process.kill()
        return subprocess.CompletedProcess([*arguments], code, out.read_text(), err.read_text())


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Path:
    """A folder that ``make(folder)`` fills, once for all workers of pytest: no test may change what is in it."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed when the file is closed, or its process is gone
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def wait_until(what: Callable[[], Any], seconds: float = 60.0, otherwise: Callable[[], str] = str) -> None:
    """Poll until ``what`` holds; fail the test, with the text of ``otherwise``, if it does not in time."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            pytest.fail(f"it did not come true within {seconds:.0f} s\n{otherwise()}")
        time.sleep(0.01)


def free_port() -> int:
    """Find a port that nobody listens on, below those that the kernel lends to clients before a server takes it."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RankFailure(AssertionError):
    """What went wrong on a rank: its traceback, or that it was still at work at the deadline."""


def here(device: str = "cpu") -> Ranks:
    """This process's place among the ranks that :func:`run_on_ranks` started; on ``cuda`` they share the first GPU."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(rank, size, rank, size, torch.device(device, 0 if device == "cuda" else None), "gloo")


def run_on_ranks(world_size: int, function: Callable[..., T], *arguments: Any, seconds: float = 120.0) -> list[T]:
    """Call ``function(*arguments)`` on new gloo ranks, one thread each; returns its results in the order of ranks.

    Args:
        world_size: number of ranks; ``RANK`` and its like are set, and the process group stands.
        function: of a module's top level; what it takes and returns must pickle.
        seconds: after them the ranks are killed.

    Raises:
        RankFailure: a rank raised (the first to do so is quoted), ended without a word, or is late.
    """
    start_fork_server()
    with RankPool(world_size, _rank, function, arguments, seconds) as ranks:
        return _results(ranks, world_size, time.monotonic() + seconds)


def _rank(pipe: Connection, function: Callable[..., Any], arguments: tuple, seconds: float) -> None:
    Figure.savefig = save_blank
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    send(pipe, answer)


def _results(ranks: RankPool, world_size: int, end: float) -> list[Any]:
    results: dict[int, Any] = {}
    while waiting := sorted(set(range(world_size)) - results.keys()):
        found = ranks.messages(waiting, max(0.0, end - time.monotonic()))
        if not found:
            raise RankFailure(f"ranks {waiting} are still at work at the deadline")
        for rank, message in found.items():
            if isinstance(message, Ended):
                raise RankFailure(f"rank {rank} ended without a word")
            succeeded, results[rank] = message
            if not succeeded:
                raise RankFailure(f"rank {rank}:\n{results[rank]}")
    return [results[rank] for rank in range(world_size)]
