"""A server during a measurement: started, asked until it answers, loaded, weighed, stopped with all its processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.processes import ROOT, free_port, last_line
from benchmarks.serving.client import Load
from benchmarks.serving.servers import Server
from common.errors import ForeseenError, UserError

HERE = Path(__file__).parent
START_TIMEOUT = 90.0  # seconds until the first answer
GRACE = 8.0  # seconds for a server to stop by itself
TEXTS_PER_LIST = 16
# Frameworks start workers in separate sessions, so neither parents nor process groups say which
# processes belong to a server; a variable in the environment, which all of them inherit, does.
MARK = "SERVING_LOAD_MARK"
_TICKS = os.sysconf("SC_CLK_TCK")


def compiled(source: str, folder: Path, *flags: str) -> Path:
    """Compile a C file beside this module.

    Raises:
        UserError: there is no C compiler, or it fails.
    """
    target = folder / Path(source).stem
    # Compiled as the kernels are (pyproject.toml), or the loop would not be theirs.
    command = ["gcc", "-O3", "-std=gnu11", "-ffp-contract=off", *flags, str(HERE / source)]
    command += ["-o", str(target), "-lpthread", "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(
            f"gcc: {error.strerror}; install a C compiler", code="benchmark-failed"
        ) from error
    if done.returncode:
        raise UserError(
            f"gcc {source}: {done.stderr.strip().splitlines()[-1]}", code="benchmark-failed"
        )
    return target


def bare_rate(instruction_set: str, threads: int) -> float:
    """Int8 operations per second of the kernels' innermost loop on so many threads."""
    with tempfile.TemporaryDirectory() as folder:
        kernels = [f"-I{ROOT / 'inference/engines/native'}", f'-DKERNELS="{instruction_set}.c"']
        program = compiled("bare_loop.c", Path(folder), *kernels)
        command = [program, str(threads)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return float(told) * 1e9


class ServerFailure(ForeseenError):
    """A server did not start, or its answers are useless; the other servers are measured nevertheless."""


class ProcessTree:
    """The processes whose environment carries a mark."""

    def __init__(self, mark: str) -> None:
        self._needle = f"{MARK}={mark}".encode()

    def pids(self) -> list[int]:
        """Those that are alive now."""
        folders = (folder for folder in Path("/proc").iterdir() if folder.name.isdecimal())
        return [
            int(folder.name)
            for folder in folders
            if self._needle in _read(folder / "environ").split(b"\0")
        ]

    def pss_bytes(self) -> int:
        """Resident memory; pages that several of them share count once."""
        # PSS divides each page by the processes that have it, so that the sum over a server's
        # workers is what they really take; the sum of their RSS counts shared weights per worker.
        lines = (
            line
            for pid in self.pids()
            for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines()
        )
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss:"))

    def cpu_seconds(self) -> float:
        """Processor time of the living and of the children that they have waited for."""
        # After the name in brackets, which may hold blanks: fields 14 to 17 are the four times.
        fields = (
            _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split() for pid in self.pids()
        )
        return sum(sum(map(int, found[11:15])) for found in fields) / _TICKS

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Send SIGTERM to the first process, and after a grace period kill whatever is left."""
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        # Workers of some frameworks outlive their parent: the next server would be measured beside
        # them, so all that carries the mark must be gone.
        self._wait(process)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        self._wait(process)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + GRACE
        while (process.poll() is None or self.pids()) and time.monotonic() < end:
            time.sleep(0.05)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # gone, or a process of the kernel


@dataclass(frozen=True)
class Running:
    """A server that answers; ``start_s``: from the start of its process to its first answer to a text."""

    server: Server
    port: int
    start_s: float
    tree: ProcessTree

    def ask_labels(self, texts: list[str]) -> list[str]:
        """The labels that it gives texts, asked in short lists."""
        labels = []
        for start in range(0, len(texts), TEXTS_PER_LIST):
            body = self.server.body(texts[start : start + TEXTS_PER_LIST], True)
            status, answer = _request(self.port, "POST", self.server.paths[1], body, 60)
            if status != 200:
                raise ServerFailure(
                    f"a list of {TEXTS_PER_LIST} texts: answered {status}", code="benchmark-failed"
                )
            labels += self.server.labels(json.loads(answer))
        return labels

    def ask_engine(self) -> str:
        """The engine that our own server reports; empty for a peer."""
        if not self.server.is_ours:
            return ""
        _, answer = _request(self.port, "GET", "/model", None, 10)
        engine = json.loads(answer)["engine"]
        return f"{engine['engine']} ({engine['reason']})"

    def apply(self, load: Load) -> dict[str, Any]:
        """Let a client send a load; returns its figures and the processor time of server, client, others and host."""
        cpu, machine, began = self.tree.cpu_seconds(), _machine_seconds(), time.monotonic()
        # The client is a process of its own that imports the standard library alone: it starts
        # quickly, and its processor time can be told apart from that of this process.
        command = [sys.executable, "-m", "benchmarks.serving.client", json.dumps(asdict(load))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ServerFailure(f"the client failed: {last}", code="benchmark-failed")
        result = json.loads(done.stdout)
        # Of all core-seconds of this time: what was used by neither server nor client disturbs the
        # load.
        cores = (time.monotonic() - began) * (os.cpu_count() or 1)
        result["client_share_sending"] = result["client_cores"] / (os.cpu_count() or 1)
        # Stolen is what the host gave to other guests of its machine, which no process here shows.
        busy, stolen = (
            after - before for after, before in zip(_machine_seconds(), machine, strict=True)
        )
        result["server_cpu_s"] = self.tree.cpu_seconds() - cpu
        result["client_share"] = result["client_cpu_s"] / cores
        # Ticks are coarse, and the three counts are not read at the same moment, so that on a quiet
        # machine the difference may fall below zero.
        result["others_share"] = (
            max(0.0, busy - result["server_cpu_s"] - result["client_cpu_s"]) / cores
        )
        result["stolen_share"] = stolen / cores
        return result


@contextlib.contextmanager
def started(server: Server, model: Path, python: str, preload: str = "") -> Iterator[Running]:
    """Start a server and wait for its first answer; at the end, stop it with all its processes.

    ``preload``: a library that all of its processes load first.

    Raises:
        ServerFailure: it ended or did not answer in time, with the last line that it wrote.
    """
    # The port is free now and may be taken a moment later, but only by another program of this
    # machine, which should be quiet anyway. With the process id it names this server alone.
    port = free_port()
    mark = f"{os.getpid()}-{port}"
    folder = str(server.folder(model).resolve())
    environment = os.environ | server.environment
    # All files are here. Offline, no library asks the Hub about them, which would count as start.
    environment |= {MARK: mark, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= {"LD_PRELOAD": preload} if preload else {}
    environment |= {"SERVED_FOLDER": folder, "SERVED_PORT": str(port), "MODEL_CHECKPOINT": folder}
    arguments = [argument.format(port=port) for argument in server.command]
    tree = ProcessTree(mark)
    with (
        # Some peers write into the current folder, which must not be the project's. The log is a
        # file and not a pipe: nobody reads it meanwhile, and a full pipe would stop the server.
        tempfile.TemporaryDirectory(prefix="serving-load-") as cwd,
        tempfile.TemporaryFile("w+") as log,
    ):
        began = time.monotonic()
        process = subprocess.Popen(
            [python, *arguments], env=environment, cwd=cwd, stdout=log, stderr=log
        )
        try:
            _wait_for_answer(server, port, process, log)
            yield Running(server, port, time.monotonic() - began, tree)
        finally:
            tree.stop(process)


def _wait_for_answer(
    server: Server, port: int, process: subprocess.Popen[bytes], log: IO[str]
) -> None:
    # A text and not a health check: a server may listen long before it has a model, and answers
    # with an error until then.
    body = server.body(["Shares of the software maker fall"], False)
    end = time.monotonic() + START_TIMEOUT
    status = 0
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerFailure(
                f"ended with code {process.returncode}: {last_line(log)}", code="benchmark-failed"
            )
        try:
            status, _ = _request(port, "POST", server.paths[0], body, 30)
        except (OSError, http.client.HTTPException):
            status = 0  # not listening yet
        if status == 200:
            return
        # The start of a fast server is a fraction of a second, which a longer pause would round up.
        time.sleep(0.01)
    what = f"answers {status}" if status else "does not listen"
    raise ServerFailure(
        f"{what} after {START_TIMEOUT:.0f} s: {last_line(log)}", code="benchmark-failed"
    )


def _request(
    port: int, method: str, path: str, body: dict[str, Any] | None, timeout: float
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _machine_seconds() -> tuple[float, float]:
    """Processor seconds of this machine so far: busy with anything, and stolen by its host."""
    # The first line is the sum over all cores. Its last two fields, the time of guests, are left
    # out: the kernel has counted them under user and nice already.
    ticks = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _waiting, irq, soft_irq, stolen = ticks[:8]
    return (user + nice + system + irq + soft_irq) / _TICKS, stolen / _TICKS
