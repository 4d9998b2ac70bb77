"""Ray Serve answers as the plain server does, and a replica that dies costs nobody an answer."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from deployment.ray.proxy_layer import RetryableRefusals
from tests.deployment.documented import REPOSITORY, documented
from tests.inference.conftest import TEXTS
from tests.inference.servers import Server, free_port, running
from tests.processes import wait_until

SCRIPT = REPOSITORY / "deployment" / "ray" / "serve.py"
NUM_CLIENTS = 8
# Ray starts a dozen processes of its own before the first of ours.
SECONDS_TO_START = 240

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -e '.[ray]'")


def _serve(*flags: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, flags)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS_TO_START)


def test_without_ray_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('stands for no Ray')")

    ended = _serve("--model", tmp_path, PYTHONPATH=str(tmp_path))

    assert ended.returncode == 2
    assert ended.stderr == 'error: Ray is not installed: pip install "distrinews[ray]" [package-missing]\n'


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--replicas", "3..1"), "argument --replicas: 3..1: 3 is more than 1 (see --help) [usage]"),
        (
            ("--cpus_per_replica", "0"),
            "argument --cpus_per_replica: 0: must be a whole number, at least 1 (see --help) [usage]",
        ),
        ((), "--model no/such: there is no such folder; train one, or give its path [model-not-found]"),
    ],
)
def test_what_cannot_be_served_is_one_line(flags: tuple[str, ...], line: str) -> None:
    ended = _serve("--model", "no/such", *flags)

    assert ended.returncode == 2
    assert ended.stderr == f"error: {line}\n"


def _ask(app: ASGIApp) -> httpx.Response:
    transport = httpx.ASGITransport(RetryableRefusals(app))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return await client.post("/predict", headers={"X-Request-ID": "mine"})

    return asyncio.run(ask())


def test_a_request_that_ends_without_an_answer_is_refused_as_one_to_send_again() -> None:
    async def lost(scope: Scope, receive: Receive, send: Send) -> None:
        """Return as Serve's proxy does when the replica is gone."""

    refusal = _ask(lost)

    assert (refusal.status_code, refusal.headers["Retry-After"]) == (503, "1")
    assert refusal.json()["error"]["code"] == "replica_lost"
    assert refusal.json()["error"]["request_id"] == refusal.headers["X-Request-ID"] == "mine"


def test_an_answer_passes_with_one_request_id_and_a_503_with_retry_after() -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"x-request-id", b"mine"), (b"x-request-id", b"mine")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": b"full"})

    refusal = _ask(refuse)

    assert (refusal.status_code, refusal.text) == (503, "full")
    assert refusal.headers["Retry-After"] == "1"
    assert refusal.headers.get_list("X-Request-ID") == ["mine"]


def _comes_up(server: Server) -> bool:
    wait_until(server.is_ready, SECONDS_TO_START)
    return True


@contextmanager
def _on_ray(command: list[str], log: Path, **environment: str) -> Iterator[Server]:
    port = free_port()
    with running([*command, "--port", str(port)], port, log, _comes_up, **environment) as server:
        yield server


@pytest.fixture(scope="module")
def served(exported_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas, started as the guide says."""
    command = documented("docs/deployment.md", "ray-serve").split()
    command = [sys.executable, *command[1:], "--model", str(exported_folder), "--host", "127.0.0.1"]
    with _on_ray(command, tmp_path_factory.mktemp("ray") / "log", MAX_TEXT_CHARS="2000") as server:
        yield server


def _replicas(server: Server) -> set[int]:
    """The processes of the replicas, among those that this server started."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    raylets = {pid for pid, parent, command in rows if int(parent) == server.process.pid and "/raylet" in command}
    return {int(pid) for pid, parent, command in rows if parent in raylets and "ray::ServeReplica" in command}


def _labels(client: httpx.Client) -> dict[str, str]:
    return {text: client.post("/predict", json={"text": text}).json()["label"] for text in TEXTS}


def _clear_labels(client: httpx.Client) -> dict[str, str]:
    """Labels by a margin that another batch, which an int8 engine rounds by, does not turn."""
    answers = {text: client.post("/predict", json={"text": text}).json() for text in TEXTS}
    margins = {text: sorted(answer["probabilities"].values())[-2:] for text, answer in answers.items()}
    clear = {text: answers[text]["label"] for text, (second, first) in margins.items() if first - second > 0.1}
    assert len(set(clear.values())) > 1
    return clear


def _rounded(body: str) -> list[object]:
    """A body's JSON lines, without the last digits, which depend on how many cores added up."""
    return [json.loads(line, parse_float=lambda digits: round(float(digits), 4)) for line in body.splitlines()]


@pytest.mark.slow
@needs_ray
def test_answers_are_those_of_the_plain_server(
    served: Server, exported_folder: Path, start_server: Callable[..., AbstractContextManager[httpx.Client]]
) -> None:
    stream = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    bodies = [
        *({"url": "/predict", "json": {"text": text}} for text in TEXTS),
        {"url": "/predict/batch", "json": {"texts": TEXTS, "top_k": 2}},
        {"url": "/predict/batch", "content": stream, "headers": {"Content-Type": "application/x-ndjson"}},
        {"url": "/hub", "json": {"inputs": TEXTS}},
        {"url": "/predict", "json": {"text": " "}, "headers": {"X-Request-ID": "mine"}},
        {"url": "/predict", "json": {"text": "x" * 2001}, "headers": {"X-Request-ID": "mine"}},
    ]

    with start_server(exported_folder, MAX_TEXT_CHARS="2000") as plain:
        expected = [plain.post(**body) for body in bodies]
        answers = [served.client.post(**body) for body in bodies]

    assert [answer.status_code for answer in answers] == [answer.status_code for answer in expected]
    assert [_rounded(answer.text) for answer in answers] == [_rounded(answer.text) for answer in expected]
    assert answers[-1].headers.get_list("X-Request-ID") == ["mine"]


class _Clients:
    """Clients that ask until they are stopped, and send again only what is refused as to be sent again."""

    def __init__(self, address: str, expected: dict[str, str], num_clients: int = NUM_CLIENTS) -> None:
        self.address, self.expected, self.num_clients = address, expected, num_clients
        self.num_answers = 0
        self.num_refused = 0
        self.surprises: list[str] = []
        self.stopped = threading.Event()

    @contextmanager
    def asking(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._ask_on) for _ in range(self.num_clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stopped.set()
            for thread in threads:
                thread.join()

    def _ask_on(self) -> None:
        with httpx.Client(base_url=self.address, timeout=60) as client:
            while not self.stopped.is_set():
                for text, label in self.expected.items():
                    self._ask_until_answered(client, text, label)

    def _ask_until_answered(self, client: httpx.Client, text: str, label: str) -> None:
        while True:
            try:
                answer = client.post("/predict", json={"text": text})
            except httpx.TransportError:
                self.num_refused += 1
                continue
            if answer.status_code == 200 and answer.json()["label"] == label:
                self.num_answers += 1
                return
            if answer.status_code != 503:
                self.surprises.append(f"{answer.status_code}: {answer.text}")
                return
            self.num_refused += 1
            self.stopped.wait(int(answer.headers["Retry-After"]))


@pytest.mark.slow
@needs_ray
def test_a_replica_killed_under_load_costs_nobody_an_answer_and_comes_back(served: Server) -> None:
    wait_until(lambda: len(_replicas(served)) == 2)
    before = _replicas(served)
    clients = _Clients(served.address, _clear_labels(served.client))

    with clients.asking():
        wait_until(lambda: clients.num_answers >= 200, SECONDS_TO_START)
        killed = min(before)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: len(_replicas(served) - {killed}) == 2, SECONDS_TO_START)
        answered = clients.num_answers
        wait_until(lambda: clients.num_answers >= answered + 200, SECONDS_TO_START)

    assert clients.surprises == []
    wait_until(lambda: len(_start_times(served.client)) == 2, SECONDS_TO_START)


@pytest.mark.slow
@needs_ray
def test_a_replica_that_does_not_respond_is_replaced_within_a_minute(exported_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--model", str(exported_folder)]
    with _on_ray(command, tmp_path / "log") as server:
        [frozen] = _replicas(server)
        os.kill(frozen, signal.SIGSTOP)
        wait_until(lambda: _replicas(server) - {frozen}, 60)
        wait_until(server.is_ready, SECONDS_TO_START)
        assert _labels(server.client)


def _start_times(client: httpx.Client) -> set[str]:
    """When the replicas that answer were started: /metrics is that of whichever the request went to."""
    pages = [client.get("/metrics").text for _ in range(16)]
    return {line for page in pages for line in page.splitlines() if line.startswith("process_start_time_seconds ")}


@pytest.mark.slow
@needs_ray
def test_a_second_replica_comes_with_the_load(exported_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--model", str(exported_folder), "--replicas", "1..2"]
    with _on_ray(command, tmp_path / "log") as server:
        assert len(_replicas(server)) == 1
        clients = _Clients(server.address, _clear_labels(server.client), num_clients=48)

        with clients.asking():
            wait_until(lambda: len(_start_times(server.client)) == 2, SECONDS_TO_START)

        assert clients.surprises == []


@pytest.mark.slow
@needs_ray
def test_sigterm_ends_the_application_and_its_cluster_with_exit_code_0(exported_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--model", str(exported_folder)]
    with _on_ray(command, tmp_path / "log") as server:
        [replica] = _replicas(server)

        assert server.stop() == 0

        wait_until(lambda: not Path(f"/proc/{replica}").exists())


@pytest.mark.slow
@needs_ray
def test_a_model_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    ended = _serve("--model", tmp_path, "--port", str(free_port()))

    assert ended.returncode == 2
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert str(tmp_path) in line


@pytest.mark.slow
@needs_ray
def test_the_configuration_for_clusters_serves(exported_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    config = (REPOSITORY / "deployment" / "ray" / "serve.yaml").read_text()
    config = config.replace("port: 7860", f"port: {port}").replace("/app/model", str(exported_folder))
    config = config.replace("cpus_per_replica: 2", "cpus_per_replica: 1").replace("max_replicas: 4", "max_replicas: 1")
    (tmp_path / "serve.yaml").write_text(config)
    name, value = re.search(r"(RAY_SERVE_\w+)=(\S+)", config).groups()
    command = [str(Path(sys.executable).with_name("serve")), "run", str(tmp_path / "serve.yaml")]

    environment = {name: value, "RAY_USAGE_STATS_ENABLED": "0"}
    with running(command, port, tmp_path / "log", _comes_up, **environment) as server:
        assert set(_labels(server.client)) == set(TEXTS)
