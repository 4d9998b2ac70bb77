"""What clients do to a server in the open: too much load, leaving early, sending slowly, breaking the model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from inference.app import create_app
from inference.engines.answering import OneLabelAnswering
from inference.http.request_log import JsonLines
from inference.settings import Settings
from tests.inference.servers import Server, ThreadedServer, metric, serving, stand_in_server
from tests.inference.stand_in_model import DIES, RAISES, StandInModel, text_of
from tests.processes import wait_until

TENSOR = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["Goal!"]}
TEXT = {"text": "oil prices rise again as stocks fall on wall street"}
# Minutes of the soak test.
SOAK_MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))


def _connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection(("127.0.0.1", client.base_url.port), timeout=30)


def _head(num_bytes: int, path: str = "/predict") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {num_bytes}\r\n\r\n".encode()


def test_the_texts_of_a_client_that_left_never_reach_the_model(model_folder: Path) -> None:
    with serving(model_folder, seconds_per_token=0.03, max_batch_tokens=24) as client:
        texts = [text_of(i) for i in range(40)]
        body = json.dumps({"texts": texts}).encode()
        connection = _connect(client)
        connection.sendall(_head(len(body), "/predict/batch") + body)
        wait_until(lambda: metric(client, "queue_tokens") > 0)
        connection.close()
        wait_until(lambda: metric(client, "requests_total", route="/predict/batch", status="499") == 1)
        wait_until(lambda: metric(client, "queue_tokens") == 0)
        assert client.post("/predict", json=TEXT).status_code == 200
        assert metric(client, "batch_texts_sum") < 40
        assert metric(client, "dropped_texts_total", reason="cancelled") > 20


def test_a_body_that_comes_too_slowly_ends_in_408_and_holds_nobody_up(model_folder: Path) -> None:
    with serving(model_folder, request_timeout_s=0.5) as client, _connect(client) as connection:
        connection.sendall(_head(100) + b'{"text": ')
        assert client.post("/predict", json=TEXT).status_code == 200
        answer = connection.recv(65536).decode()
        assert answer.startswith("HTTP/1.1 408 ")
        assert '"body_timeout"' in answer


def test_a_client_that_leaves_amid_its_body_is_no_error(model_folder: Path) -> None:
    with serving(model_folder) as client:
        connection = _connect(client)
        connection.sendall(_head(100) + b'{"text": ')
        wait_until(lambda: metric(client, "requests_in_progress") > 1)
        connection.close()
        wait_until(lambda: metric(client, "requests_total", route="/predict", status="499") == 1)


def test_a_text_that_waits_too_long_ends_in_504(model_folder: Path) -> None:
    with serving(model_folder, seconds_per_token=0.2, request_timeout_s=0.5) as client:
        response = client.post("/predict", json=TEXT)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert "0.5" in response.json()["error"]["message"]


def test_a_text_that_breaks_the_model_fails_alone_and_the_worker_starts_again(model_folder: Path) -> None:
    with serving(model_folder) as client:
        for breaking in (RAISES, DIES):
            broken = client.post("/predict", json={"text": breaking})
            assert broken.status_code == 500
            error = broken.json()["error"]
            assert error["code"] == "inference_failed"
            assert error["request_id"] == broken.headers["x-request-id"]
            assert client.post("/predict", json=TEXT).status_code == 200
        wait_until(lambda: client.get("/readyz").status_code == 200)
        assert metric(client, "worker_failures_total") >= 2


def test_an_error_nobody_expected_is_a_500_whose_id_is_in_the_log(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def with_too_few_labels(path: Path, engine: str) -> StandInModel:
        model = StandInModel(path)
        model.labels = model.labels[:2]
        model.answering = OneLabelAnswering(model.labels)
        return model

    server = ThreadedServer(create_app(Settings(model_checkpoint=model_folder), with_too_few_labels))
    with server.running() as client:
        for path, body in (("/predict", TEXT), ("/v2/models/tiny/infer", {"inputs": [TENSOR]})):
            broken = client.post(path, json=body)
            assert broken.status_code == 500
            assert "its log has the request id" in broken.text
            failures = [record for record in caplog.records if record.name == "inference.errors"]
            assert failures[-1].fields["request_id"] == broken.headers["x-request-id"]
            # Which of the two depends on the label that the model happens to give.
            assert re.search(r'"type":"(IndexError|ValueError)"', JsonLines().format(failures[-1]))
        assert client.get("/livez").status_code == 200


def test_bodies_in_progress_are_bounded_together(model_folder: Path) -> None:
    megabyte = (b'"' + b"a" * (2**17 - 3) + b'",') * 8
    with serving(model_folder, max_pending_mb=2.5, max_body_mb=2) as client:
        connections = [_connect(client) for _ in range(2)]
        for connection in connections:
            connection.sendall(_head(len(megabyte) + 1) + megabyte)
        wait_until(lambda: metric(client, "pending_body_bytes") == 2 * len(megabyte))
        refused = client.post("/predict", content=megabyte)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_busy")
        assert int(refused.headers["retry-after"]) > 0
        assert client.post("/predict", json=TEXT).status_code == 200
        for connection in connections:
            connection.close()
        wait_until(lambda: metric(client, "pending_body_bytes") == 0)


class _OpenLoop:
    """Requests at fixed instants, whatever becomes of those before; each on a connection of its own."""

    def __init__(self, port: int) -> None:
        self.statuses: Counter[int] = Counter()
        self.retry_after: list[int] = []
        self.seconds_to_answers: list[float] = []
        self._port = port

    async def run(self, per_second: float, seconds: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            start = time.monotonic()
            for i in range(int(per_second * seconds)):
                await asyncio.sleep(start + i / per_second - time.monotonic())
                tasks.create_task(self._ask(i))

    async def _ask(self, i: int) -> None:
        body = json.dumps({"text": text_of(i, num_words=12)}).encode()
        started = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(_head(len(body)) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        writer.close()
        status = int(head.split()[1])
        self.statuses[status] += 1
        if status == 200:
            self.seconds_to_answers.append(time.monotonic() - started)
        if status == 503:
            self.retry_after.append(int(re.search(r"retry-after: (\d+)", head)[1]))


def _memory_mb(server: Server) -> float:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_at_three_times_its_capacity_it_refuses_the_rest_and_answers_what_it_took(
    model_folder: Path, tmp_path: Path
) -> None:
    # 14 tokens a text at 1.8 ms each: about 40 texts a second; 120 come.
    with stand_in_server(model_folder, tmp_path, 0.0018, LOG_LEVEL="warning", MAX_WAIT_SECONDS="0.7") as server:
        asyncio.run(_OpenLoop(server.port).run(20, 1))
        before = _memory_mb(server)
        load = _OpenLoop(server.port)
        asyncio.run(load.run(120, 4))
        assert set(load.statuses) == {200, 503}
        assert sum(load.statuses.values()) == 480
        assert load.statuses[200] > 80
        assert load.statuses[503] > 80
        assert all(1 <= seconds <= 30 for seconds in load.retry_after)
        # 0.7 s of waiting and a pass of as much; without a bound the last ones would wait for 8 s. The limit is far
        # from both, since a machine that takes a core away for a while makes all of them wait.
        assert max(load.seconds_to_answers) < 6
        assert metric(server.client, "requests_total", route="/predict", status="200") == load.statuses[200] + 20
        assert metric(server.client, "queue_tokens") == 0
        assert _memory_mb(server) < before + 50
        assert server.is_ready()


@pytest.mark.slow
def test_memory_stays_flat_over_a_long_time_of_everything(model_folder: Path, tmp_path: Path) -> None:
    settings = {"LOG_LEVEL": "warning", "MAX_WAIT_SECONDS": "2", "CACHE_ENTRIES": "1000"}
    with stand_in_server(model_folder, tmp_path, 0.0001, **settings) as server:
        _soak(server, 20)
        samples = [_memory_mb(server)]
        until_then = time.monotonic() + SOAK_MINUTES * 60
        while time.monotonic() < until_then:
            _soak(server, 20)
            samples.append(_memory_mb(server))
        assert max(samples) < samples[0] + 30, samples
        assert server.is_ready()
        assert metric(server.client, "queue_tokens") == 0
        assert metric(server.client, "requests_in_progress") == 1
        assert metric(server.client, "pending_body_bytes") == 0


def _soak(server: Server, seconds: float) -> None:
    load = _OpenLoop(server.port)
    until_then = time.monotonic() + seconds
    asyncio.run(load.run(100, seconds / 2))
    assert set(load.statuses) <= {200, 503}
    stream = {"content-type": "application/x-ndjson"}
    lines = b"".join(json.dumps({"text": RAISES if i % 10 == 0 else text_of(i)}).encode() + b"\n" for i in range(200))
    while time.monotonic() < until_then:
        texts = [text_of(i) for i in range(200)]
        assert server.client.post("/predict/batch", json={"texts": texts}).status_code in (200, 503)
        assert server.client.post("/predict/batch", content=lines, headers=stream).status_code == 200
        assert server.client.post("/explain", json=TEXT).status_code in (200, 503)
        server.process.send_signal(signal.SIGHUP)
        with _connect(server.client) as connection:
            connection.sendall(_head(100) + b'{"text": ')
