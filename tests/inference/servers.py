"""Starts servers in processes of their own, and sends many requests at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI

from inference.app import create_app
from inference.http.server_parts import Parts
from inference.settings import Settings
from tests.inference.stand_in_model import stand_in
from tests.processes import REPOSITORY, PythonProcess, free_port, wait_until

STARTUP_SECONDS = 60


class Server:
    """A running server process and a client for it."""

    def __init__(self, process: subprocess.Popen[str] | PythonProcess, port: int, log: Path, api_key: str = "") -> None:
        self.process = process
        self.address = f"http://127.0.0.1:{port}"
        self.port = port
        self.log_path = log
        self.client = self.new_client(api_key)

    def new_client(self, api_key: str = "") -> httpx.Client:
        """Make a client that sends a key, if there is one."""
        return httpx.Client(base_url=self.address, timeout=60, headers={"X-API-Key": api_key} if api_key else {})

    def is_ready(self) -> bool:
        """Whether the ready probe says so."""
        assert self.process.poll() is None, self.log()
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def has_decided(self) -> bool:
        """Whether the model is loaded, or refused."""
        assert self.process.poll() is None, self.log()
        try:
            return "still loading" not in self.client.get("/health").json().get("error", "")
        except httpx.TransportError:
            return False

    def log(self) -> str:
        """All that the process has written."""
        return self.log_path.read_text()

    def stop(self) -> int:
        """Send SIGTERM and wait; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@contextmanager
def running(
    command: list[str],
    port: int,
    log: Path,
    is_up: Callable[[Server], bool] = Server.is_ready,
    warm: bool = False,
    **settings: str,
) -> Iterator[Server]:
    """Start a server and wait until it is up; it is stopped at the end. A warm one begins with all imported."""
    environment = {**os.environ, **settings}
    if warm:
        process = PythonProcess(command[1:], environment, REPOSITORY, [log, log])
    else:
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
            )
    server = Server(process, port, log, settings.get("API_KEY", ""))
    try:
        wait_until(lambda: is_up(server), STARTUP_SECONDS)
        yield server
    finally:
        server.client.close()
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def stand_in_server(
    folder: Path,
    tmp_path: Path,
    seconds_per_token: float,
    command: tuple[str, ...] = (),
    is_up: Callable[[Server], bool] = Server.is_ready,
    **settings: str,
) -> Iterator[Server]:
    """Start a server whose model is a stand-in; `command` where it is not `python -m inference.serve`."""
    port = free_port()
    command = command or ("tests.inference.stand_in_server", "--host", "127.0.0.1")
    settings = {"MODEL_CHECKPOINT": str(folder), "SECONDS_PER_TOKEN": str(seconds_per_token), **settings}
    started = [sys.executable, "-m", *command, "--port", str(port)]
    with running(started, port, tmp_path / "log", is_up, warm=True, **settings) as server:
        yield server


class ThreadedServer:
    """A real server on a thread of the test's own process: quick to start, and its parts can be looked at."""

    def __init__(self, app: FastAPI, root_path: str = "") -> None:
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, log_config=None, access_log=False, ws="none", root_path=root_path
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self.parts: Parts = app.state.parts

    @contextmanager
    def running(self) -> Iterator[httpx.Client]:
        """Serve; yields a client."""
        self._thread.start()
        wait_until(lambda: self._server.started)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            wait_until(lambda: not self.parts.served_model.is_loading)
            yield client
        self._server.should_exit = True
        self._thread.join(timeout=30)
        assert not self._thread.is_alive(), "the server did not stop"


@contextmanager
def serving(
    folder: Path, seconds_per_token: float = 0.0, root_path: str = "", **settings: object
) -> Iterator[httpx.Client]:
    """Serve a stand-in for the model in `folder`, with these settings, below this path."""
    app = create_app(Settings(model_checkpoint=folder, **settings), stand_in(seconds_per_token))
    with ThreadedServer(app, root_path).running() as client:
        yield client


def num_arrived(client: httpx.Client) -> float:
    """How many requests for /predict have reached the server, answered or not."""
    answered = metric(client, "requests_total", route="/predict")
    return answered + metric(client, "requests_in_progress") - 1  # without the one for /metrics itself


def metric(client: httpx.Client, name: str, /, **labels: str) -> float:
    """Add up the values of /metrics with these labels."""
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    total = 0.0
    for line in client.get("/metrics").text.splitlines():
        match = re.fullmatch(rf"distrinews_{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and wanted <= set((match[1] or "").split(",")):
            total += float(match[2])
    return total
