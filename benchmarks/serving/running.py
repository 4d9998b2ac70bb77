"""A server's life within a measurement: started, found to answer, loaded, weighed, ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.processes import ROOT, free_port
from benchmarks.serving.load import Load
from benchmarks.serving.process_tree import MARK, ProcessTree
from benchmarks.serving.servers import Server
from common.errors import ForeseenError

LONGEST_START = 90.0  # seconds until the first answer
GRACE = 8.0  # seconds to end by itself
LIST_ASKED = 16
_PROBE_GAP = 0.01


class ServerFailure(ForeseenError):
    """A server did not start, or its answers are of no use; the others are measured all the same."""


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
        port: Where it listens.
        start_s: From the start of its process to its first answer to a text.
        tree: Its processes.
    """

    server: Server
    port: int
    start_s: float
    tree: ProcessTree

    def ask_labels(self, texts: list[str]) -> list[str]:
        """The labels that it gives texts, asked in short lists."""
        labels = []
        for start in range(0, len(texts), LIST_ASKED):
            body = self.server.body(texts[start : start + LIST_ASKED], True)
            status, answer = _request(self.port, "POST", self.server.paths[1], body, 60)
            if status != 200:
                raise ServerFailure(f"a list of {LIST_ASKED} texts: answered {status}", code="benchmark-failed")
            labels += self.server.labels(json.loads(answer))
        return labels

    def ask_engine(self) -> str:
        """What our own server says that runs its model; empty for a peer."""
        if not self.server.is_ours:
            return ""
        _, answer = _request(self.port, "GET", "/model", None, 10)
        engine = json.loads(answer)["engine"]
        return f"{engine['engine']} ({engine['reason']})"

    def apply(self, load: Load) -> dict[str, Any]:
        """Let a client send a load; the client's figures, and the processor time of all concerned."""
        cpu, machine, began = self.tree.cpu_seconds(), _machine_seconds(), time.monotonic()
        command = [sys.executable, "-m", "benchmarks.serving.client", json.dumps(asdict(load))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerFailure(
                f"the client failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}", code="benchmark-failed"
            )
        result = json.loads(done.stdout)
        cores = (time.monotonic() - began) * (os.cpu_count() or 1)
        busy, stolen = (after - before for after, before in zip(_machine_seconds(), machine, strict=True))
        result["server_cpu_s"] = self.tree.cpu_seconds() - cpu
        result["client_share"] = result["client_cpu_s"] / cores
        result["others_share"] = max(0.0, busy - result["server_cpu_s"] - result["client_cpu_s"]) / cores
        result["stolen_share"] = stolen / cores
        return result


@contextlib.contextmanager
def started(server: Server, model: Path, python: str) -> Iterator[Running]:
    """Start a server and wait for its first answer; end it with all its processes.

    Raises:
        ServerFailure: It ended or did not answer in time, with the last line that it wrote.
    """
    port = free_port()
    mark = f"{os.getpid()}-{port}"
    environment = os.environ | server.environment
    environment |= {MARK: mark, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    folder = str(server.folder(model).resolve())
    environment |= {"SERVED_FOLDER": folder, "SERVED_PORT": str(port), "MODEL_CHECKPOINT": folder}
    arguments = [argument.format(port=port) for argument in server.command]
    tree = ProcessTree(mark)
    with tempfile.TemporaryDirectory(prefix="serving-load-") as cwd, tempfile.TemporaryFile("w+") as log:
        began = time.monotonic()
        process = subprocess.Popen([python, *arguments], env=environment, cwd=cwd, stdout=log, stderr=log)
        try:
            _wait_for_answer(server, port, process, log)
            yield Running(server, port, time.monotonic() - began, tree)
        finally:
            tree.end(process, GRACE)


def _wait_for_answer(server: Server, port: int, process: subprocess.Popen[bytes], log: IO[str]) -> None:
    body = server.body(["Is anyone there?"], False)
    end = time.monotonic() + LONGEST_START
    answered = 0
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerFailure(f"ended with code {process.returncode}: {_last_line(log)}", code="benchmark-failed")
        try:
            answered, _ = _request(port, "POST", server.paths[0], body, 30)
        except (OSError, http.client.HTTPException):
            answered = 0  # not listening yet
        if answered == 200:
            return
        time.sleep(_PROBE_GAP)
    what = f"answers {answered}" if answered else "does not listen"
    raise ServerFailure(f"{what} after {LONGEST_START:.0f} s: {_last_line(log)}", code="benchmark-failed")


def _request(port: int, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _machine_seconds() -> tuple[float, float]:
    """Processor seconds of this machine so far: busy with anything, and taken by its host."""
    ticks = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _waiting, irq, soft_irq, stolen = ticks[:8]
    second = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + soft_irq) / second, stolen / second


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    return lines[-1] if lines else "it wrote nothing"
