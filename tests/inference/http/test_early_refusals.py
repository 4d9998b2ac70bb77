"""While the queue is full, requests are refused at their headers, in the same form as by the request gate."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from inference.app import create_app
from inference.http.early_refusals import EarlyRefusals, Headers
from inference.http.http1 import corrected
from inference.http.server_parts import RequestsInProgress
from inference.settings import Settings
from tests.inference.servers import Server, metric, stand_in_server
from tests.inference.stand_in_engine import StandInEngine
from tests.inference.stand_in_model import LABELS, StandInModel, text_of
from tests.processes import wait_until

BODY = b'{"text": "oil prices rise"}'
PLAIN = [(b"host", b"x"), (b"content-type", b"application/json"), (b"content-length", b"27")]
FULL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nfull"


def _post(path: bytes, body: bytes = BODY) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (path, len(body), body)


# ---------------------------------------------------------------- at the connection


class _Application:
    """Answers with the body that it got."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        await self.may_answer.wait()
        body = (await receive())["body"]
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


def _answer_early(url: bytes, headers: Headers, defaults: Headers) -> bytes | None:
    return FULL if url == b"/full" else None


@asynccontextmanager
async def _connected(application: _Application) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(application, log_config=None, ws="none", lifespan="off")
    config.load()
    protocol = corrected(HttpToolsProtocol, _answer_early)
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    yield reader, writer
    writer.close()
    server.close()


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    return await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))


def test_the_application_never_hears_of_what_is_answered_early_and_then_gets_the_next_request() -> None:
    async def run() -> None:
        application = _Application()
        application.may_answer.set()
        async with _connected(application) as (reader, writer):
            for num_refused in (1, 3):
                for _ in range(num_refused):
                    head, body = _post(b"/full", b"a" * 100_000).split(b"\r\n\r\n")
                    writer.write(head + b"\r\n\r\n")
                    assert await _read_answer(reader) == b"full"  # before the body is sent
                    writer.write(body)
                writer.write(_post(b"/open"))
                assert await _read_answer(reader) == BODY
        assert application.paths == ["/open", "/open"]

    asyncio.run(run())


def test_answers_keep_the_order_of_requests_that_are_sent_before_the_first_is_answered() -> None:
    async def run() -> None:
        application = _Application()
        async with _connected(application) as (reader, writer):
            writer.write(_post(b"/full") + _post(b"/open") + _post(b"/full", b"second"))
            assert await _read_answer(reader) == b"full"
            application.may_answer.set()
            assert await _read_answer(reader) == BODY
            assert await _read_answer(reader) == b"second"
        assert application.paths == ["/open", "/full"]

    asyncio.run(run())


@pytest.mark.parametrize(
    "head",
    [
        b"GET /full HTTP/1.1\r\nHost: x",
        b"POST /full HTTP/1.0\r\nConnection: keep-alive",
        b"POST /full HTTP/1.1\r\nHost: x\r\nConnection: close",
    ],
    ids=["GET", "HTTP/1.0", "the last request of a connection"],
)
def test_the_application_answers_other_requests_than_a_plain_post(head: bytes) -> None:
    async def run() -> None:
        application = _Application()
        application.may_answer.set()
        async with _connected(application) as (reader, writer):
            writer.write(head + b"\r\n\r\n")
            assert await _read_answer(reader) == b""
        assert application.paths == ["/full"]

    asyncio.run(run())


# ---------------------------------------------------------------- which requests


@asynccontextmanager
async def _full_queue(model_folder: Path, **settings: object) -> AsyncIterator[EarlyRefusals]:
    """The early refusals of an application whose queue is full for as long as this lasts."""
    engine = StandInEngine()
    engine.hold()

    def load_model(path: Path, _: str) -> StandInModel:
        model = StandInModel(path)
        model.engine = engine
        return model

    app = create_app(Settings(model_checkpoint=model_folder, max_wait_seconds=0.001, **settings), load_model)
    served = await app.state.parts.served_model.load()
    futures = served.classifier.submit(["oil prices rise"], timeout_s=60)
    yield app.state.early_refusals
    engine.broken = f"it has no scores for {len(LABELS)} labels"
    engine.let_go()
    await asyncio.gather(*futures, return_exceptions=True)
    await app.state.parts.served_model.close()
    app.state.parts.log.write_refused()


@pytest.mark.parametrize(
    ("url", "more", "settings", "is_refused"),
    [
        (b"/predict", {}, {}, True),
        (b"/predict/batch", {}, {}, True),
        (b"/predict/batch", {b"content-type": b"application/x-ndjson"}, {}, False),
        (b"/predict?a=b", {}, {}, False),
        (b"/admin/reload", {}, {}, False),
        (b"/nowhere", {}, {}, False),
        (b"/predict", {b"origin": b"https://example.org"}, {}, False),
        (b"/predict", {b"sec-fetch-site": b"cross-site"}, {}, False),
        (b"/predict", {b"expect": b"100-continue"}, {}, False),
        (b"/predict", {b"transfer-encoding": b"chunked"}, {}, False),
        (b"/predict", {b"content-length": b"99999999999"}, {}, False),
        (b"/predict", {}, {"api_key": "open sesame"}, False),
        (b"/predict", {}, {"rate_limit_per_s": 10}, False),
    ],
)
def test_only_what_the_full_queue_alone_refuses_is_refused_early(
    model_folder: Path, url: bytes, more: dict[bytes, bytes], settings: dict[str, object], *, is_refused: bool
) -> None:
    async def run() -> None:
        headers = list((dict(PLAIN) | more).items())
        async with _full_queue(model_folder, **settings) as refusals:
            assert (refusals.answer_to(url, headers, []) is not None) == is_refused

    asyncio.run(run())


def test_nothing_is_refused_early_while_the_queue_has_room(model_folder: Path) -> None:
    async def run() -> None:
        async with _full_queue(model_folder) as refusals:
            assert refusals.answer_to(b"/predict", PLAIN, []) is not None
        assert refusals.answer_to(b"/predict", PLAIN, []) is None

    asyncio.run(run())


@asynccontextmanager
async def _room_for_two(model_folder: Path) -> AsyncIterator[tuple[EarlyRefusals, RequestsInProgress]]:
    """The early refusals of an application whose connections have room for two requests in progress."""
    app = create_app(Settings(model_checkpoint=model_folder))
    parts = app.state.parts
    parts.in_progress.most = 2
    yield app.state.early_refusals, parts.in_progress
    parts.log.write_refused()


def test_the_first_request_for_which_no_connection_is_left_is_refused_early(model_folder: Path) -> None:
    async def run() -> None:
        async with _room_for_two(model_folder) as (refusals, in_progress):
            with in_progress:
                assert refusals.answer_to(b"/predict", PLAIN, []) is None
                await asyncio.sleep(0)  # no task has begun for it, so its place is free again
                with in_progress:
                    assert b"2 requests wait for answers" in refusals.answer_to(b"/predict", PLAIN, [])
                assert refusals.answer_to(b"/predict", PLAIN, []) is None

    asyncio.run(run())


def test_of_requests_that_arrive_in_one_turn_those_without_room_are_refused_early(model_folder: Path) -> None:
    async def run() -> None:
        async with _room_for_two(model_folder) as (refusals, _):
            is_refused = [refusals.answer_to(b"/predict", PLAIN, []) is not None for _ in range(4)]
            assert is_refused == [False, False, True, True]

    asyncio.run(run())


# ---------------------------------------------------------------- of a whole server


@pytest.fixture(scope="module")
def full_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that works on its first text for longer than these tests take, and has no room for another."""
    folder = tmp_path_factory.mktemp("full")
    with stand_in_server(model_folder, folder, 100.0, MAX_WAIT_SECONDS="0.001") as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(_post(b"/predict"))
            # This one, and the one for the metrics; before that, the next would be the first text.
            wait_until(lambda: metric(server.client, "requests_in_progress") == 2)
            wait_until(lambda: server.client.post("/predict", content=BODY).status_code == 503)
            yield server
        server.process.kill()


def test_half_of_the_connections_are_kept_for_requests_that_are_refused(model_folder: Path, tmp_path: Path) -> None:
    # Five of ten are in use by requests in progress; the queue alone would take hundreds more.
    with (
        stand_in_server(model_folder, tmp_path, 100.0, MAX_CONNECTIONS="10", MAX_WAIT_SECONDS="60") as server,
        ExitStack() as stack,
    ):
        for number in range(5):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(_post(b"/predict", json.dumps({"text": text_of(number)}).encode()))
        wait_until(lambda: metric(server.client, "requests_in_progress") == 6)  # with the one for the metrics
        for headers in ({}, {"Origin": "https://example.org"}):  # early, and by the gate
            for _ in range(3):
                refused = server.client.post("/predict", content=BODY, headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_busy")
                assert int(refused.headers["retry-after"]) >= 1
                assert "5 requests" in refused.text
        assert server.client.get("/livez").status_code == 200
        server.process.kill()


def _form(response: httpx.Response) -> tuple[int, list[str], str]:
    """What two refusals have in common: status, names of the headers, the body without its figures and its id."""
    body = response.text.replace(response.headers["x-request-id"], "ID")
    return response.status_code, sorted(response.headers), re.sub(r"\d+\.\d+", "N", body)


@pytest.mark.parametrize("path", ["/predict", "/predict/batch", "/classify", "/explain"])
def test_an_early_refusal_has_the_form_of_one_by_the_gate(full_server: Server, path: str) -> None:
    early = full_server.client.post(path, content=BODY)
    by_the_gate = full_server.client.post(path, content=BODY, headers={"Origin": "https://example.org"})
    assert _form(early) == _form(by_the_gate)
    assert early.json()["error"]["request_id"] == early.headers["x-request-id"]
    assert int(early.headers["retry-after"]) >= 1


def test_the_body_of_a_refused_request_is_not_read(full_server: Server) -> None:
    before = metric(full_server.client, "refusals_total", code="queue_full")
    for body in (b"{", b"\xff", b"[" * 100_000):
        refused = full_server.client.post("/predict", content=body, headers={"X-Request-ID": "order-67"})
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["x-request-id"] == "order-67"
        assert "connection" not in refused.headers
    assert metric(full_server.client, "refusals_total", code="queue_full") == before + 3


def test_refusals_share_lines_of_the_log_that_count_them_all(full_server: Server) -> None:
    def logged() -> list[dict[str, object]]:
        lines = [json.loads(line) for line in full_server.log().splitlines() if '"inference.requests"' in line]
        return [line for line in lines if line.get("code") == "queue_full"]

    for _ in range(200):
        assert full_server.client.post("/predict", content=BODY).status_code == 503
    num_refused = metric(full_server.client, "refusals_total", code="queue_full")
    wait_until(lambda: sum(line["requests"] for line in logged()) == num_refused)
    assert len(logged()) < num_refused / 2
    assert {line["message"] for line in logged()} == {"requests refused"}
