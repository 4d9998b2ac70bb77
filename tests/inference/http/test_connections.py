"""Connections that only hold memory and files are ended, under both commands that start a server."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from inference.http.connections import ConnectionKeeper
from tests.inference.servers import Server, free_port, metric, running, stand_in_server
from tests.processes import wait_until

COMMANDS = {
    "python -m inference.serve": ("tests.inference.stand_in_server", "--host", "127.0.0.1"),
    "uvicorn": ("uvicorn", "tests.inference.stand_in_server:app"),
    "uvicorn with h11": ("uvicorn", "tests.inference.stand_in_server:app", "--http", "h11", "--loop", "asyncio"),
}


# "uvicorn" reads HTTP with the library that "python -m inference.serve" reads it with.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name == "uvicorn" else ()) for name in COMMANDS],
)
def hasty_server(request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory):  # noqa: ANN201
    """A server that waits for nobody longer than a second."""
    folder = tmp_path_factory.mktemp("server")
    with stand_in_server(model_folder, folder, 0, COMMANDS[request.param], REQUEST_TIMEOUT_S="1") as server:
        yield server


@contextmanager
def _connected(server: Server, sent: bytes = b"", receive_buffer: int = 0) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(sent)
        yield connection


def _is_closed_by_server(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_connection_is_given_back_with_an_answer_once_it_is_old_enough(
    model_folder: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    with (
        stand_in_server(model_folder, tmp_path, 0, command, MAX_CONNECTION_AGE_S="1") as server,
        server.new_client() as client,
    ):
        assert "connection" not in client.get("/livez").headers
        wait_until(lambda: client.get("/livez").headers.get("connection") == "close")
        after = client.get("/livez")  # on a new connection
        assert (after.status_code, after.headers.get("connection")) == (200, None)


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_connection_whose_headers_do_not_come_is_ended(hasty_server: Server, sent: bytes) -> None:
    with _connected(hasty_server, sent) as connection:
        assert _is_closed_by_server(connection)


def test_headers_that_come_byte_by_byte_are_not_awaited_for_ever(hasty_server: Server) -> None:
    with _connected(hasty_server, b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Slow: ") as connection:
        connection.settimeout(0.05)

        def is_ended() -> bool:
            try:
                connection.sendall(b"a")
                return connection.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(is_ended)


def test_headers_without_an_end_are_cut_off(hasty_server: Server) -> None:
    with _connected(hasty_server, b"GET /livez HTTP/1.1\r\n") as connection:

        def is_cut_off() -> bool:
            try:
                connection.sendall(b"X-More: " + b"a" * 1000 + b"\r\n")
            except OSError:
                return True
            return False

        assert any(is_cut_off() for _ in range(10_000))


def test_an_answer_that_nobody_reads_is_given_up(hasty_server: Server) -> None:
    text = "oil " * 4500
    body = json.dumps({"text": text}).encode()
    head = b"POST /explain HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    # Too many bytes for what the kernel keeps for both ends, and none is taken.
    with _connected(hasty_server, (head + body) * 20, receive_buffer=2048) as connection:
        wait_until(lambda: metric(hasty_server.client, "requests_total", route="/explain") > 0)
        wait_until(lambda: _has_no_connection_from(hasty_server, connection.getsockname()[1]))


def _has_no_connection_from(server: Server, port: int) -> bool:
    """Whether the server's end of a connection is gone."""
    established = "01"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    ends = [line.split()[1:4] for line in lines]
    return not any(
        state == established and local.endswith(f":{server.port:04X}") and remote.endswith(f":{port:04X}")
        for local, remote, state in ends
    )


def test_a_body_that_is_refused_may_still_be_sent_to_its_end(hasty_server: Server) -> None:
    answer = hasty_server.client.post("/predict", content=b"a" * (9 << 20))
    assert answer.status_code == 413


_OFFERS = {
    "JDK": b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n",
    "curl": b"Connection: keep-alive, upgrade, HTTP2-Settings\r\nupgrade: H2C\r\nHTTP2-Settings: AAMAAABkAAQCAAAA\r\n",
    "TLS": b"Upgrade: TLS/1.2\r\nConnection: UPGRADE\r\n",
    "websocket": b"upgrade: WebSocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: AAAA\r\n",
    "several": b"Upgrade: h2c, websocket\r\nConnection: keep-alive\r\nConnection: Upgrade\r\nUpgrade: TLS/1.2\r\n",
}
_JSON = b'{"text": "GET /model HTTP/1.1"}'
_REQUEST_IN_BODY = b"GET /model HTTP/1.1\r\nHost: x\r\n\r\n"
_LINES = b'{"text": "Goal!"}\n' * 3


def _chunked(body: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:5], body[5:])) + b"0\r\n\r\n"


def _statuses(server: Server, pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    """Send pieces, then a last request that ends the connection; the status of each answer, and all that came."""
    with _connected(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = b""
        with suppress(ConnectionError):  # a connection that the server closes earlier may be reset
            for piece in [*pieces, b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"]:
                connection.sendall(piece)
        with suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                received += piece
    return re.findall(rb"HTTP/1\.1 (\d+) ", received), received


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("offer", _OFFERS)
def test_an_offer_of_another_protocol_is_ignored_and_each_request_is_answered_once(
    hasty_server: Server, offer: str, in_pieces: bool, is_chunked: bool
) -> None:
    sent = b"GET /readyz HTTP/1.1\r\nHost: x\r\n" + _OFFERS[offer] + b"\r\n"
    expected = [b"200"]
    for path, kind, body, status in (
        (b"/predict", b"text/plain", _JSON, b"200"),
        (b"/predict/batch", b"application/x-ndjson", _LINES, b"200"),
        (b"/predict", b"application/json", _REQUEST_IN_BODY, b"422"),
    ):
        length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\n%s\r\n%s\r\n"
        sent += head % (path, kind, length, _OFFERS[offer]) + (_chunked(body) if is_chunked else body)
        expected.append(status)
    pieces = [sent[i : i + 40] for i in range(0, len(sent), 40)] if in_pieces else [sent]
    statuses, received = _statuses(hasty_server, pieces)
    assert statuses == [*expected, b"200"]
    assert received.count(b'"index":') == 3
    assert received.count(b'"label":') == 4


@pytest.mark.parametrize(
    ("path", "kind"), [(b"/predict", b"application/json"), (b"/predict/batch", b"application/x-ndjson")]
)
def test_a_client_that_offers_another_protocol_may_send_its_body_when_told_to(
    hasty_server: Server, path: bytes, kind: bytes
) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s\r\n"
    with _connected(hasty_server, head % (path, kind, len(_JSON), _OFFERS["JDK"])) as connection:
        answers = connection.makefile("rb")
        assert answers.readline() == b"HTTP/1.1 100 Continue\r\n"
        connection.sendall(_JSON)
        assert (answers.readline(), answers.readline()) == (b"\r\n", b"HTTP/1.1 200 OK\r\n")


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(hasty_server: Server) -> None:
    head = b"POST /predict/batch HTTP/1.0\r\nContent-Type: application/x-ndjson\r\nContent-Length: %d\r\n\r\n"
    with _connected(hasty_server, head % len(_LINES) + _LINES) as connection:
        headers, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in headers.lower()
    assert [json.loads(line)["index"] for line in body.splitlines()] == [0, 1, 2]


def test_headers_that_come_at_once_are_bounded_too(hasty_server: Server, request: pytest.FixtureRequest) -> None:
    def answer(size: int) -> bytes:
        head = b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Big: %s\r\n\r\n" % (b"a" * size)
        with _connected(hasty_server, head) as connection:
            return connection.recv(12)

    assert answer(60_000) == b"HTTP/1.1 200"
    if "h11" not in request.node.name:  # whose own limit is for headers that come piece by piece
        assert answer(70_000) == b"HTTP/1.1 400"


def test_a_body_never_runs_as_a_request_after_connect(hasty_server: Server) -> None:
    for target in (b"/predict", b"example.com:443"):
        request = b"CONNECT %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (target, len(_REQUEST_IN_BODY))
        statuses, _ = _statuses(hasty_server, [request, _REQUEST_IN_BODY])
        assert statuses in ([], [b"400"], [b"405", b"200"], [b"404", b"200"])


def test_a_segment_of_nothing_but_offers_is_answered_offer_by_offer(hasty_server: Server) -> None:
    num_requests = 300
    statuses, _ = _statuses(
        hasty_server, [b"HEAD /livez HTTP/1.1\r\nHost: x\r\n%s\r\n" % _OFFERS["TLS"] * num_requests]
    )
    assert statuses == [b"200"] * (num_requests + 1)


def test_a_connection_that_is_kept_alive_is_left_alone_while_it_waits(hasty_server: Server) -> None:
    with _connected(hasty_server) as connection:
        for _ in range(2):
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b'"alive"}'):
                answer += connection.recv(4096)
            connection.settimeout(1.5)  # longer than headers may take
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(20)


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=pytest.mark.slow if name.startswith("uvicorn") else ()) for name in COMMANDS]
)
def test_idle_connections_beyond_the_files_of_the_process_keep_nobody_out(
    command: str, model_folder: Path, tmp_path: Path
) -> None:
    port = free_port()
    started = " ".join((sys.executable, "-m", *COMMANDS[command], "--port", str(port)))
    settings = {"MODEL_CHECKPOINT": str(model_folder), "SECONDS_PER_TOKEN": "0"}
    with running(["bash", "-c", f"ulimit -n 256; exec {started}"], port, tmp_path / "log", **settings) as server:
        with ExitStack() as idle:
            for _ in range(300):
                idle.enter_context(_connected(server))
            with server.new_client() as client:
                wait_until(lambda: _answers(client))
                assert _num_files(server) < 256
        assert "as the process may open 256 files" in server.log()


def _num_files(server: Server) -> int:
    return sum(1 for _ in Path(f"/proc/{server.process.pid}/fd").iterdir())


def _answers(client) -> bool:  # noqa: ANN001
    try:
        return client.get("/livez").status_code == 200
    except OSError:
        return False


def test_a_connection_beyond_the_limit_is_refused_while_all_others_are_at_work(
    model_folder: Path, tmp_path: Path
) -> None:
    body = b'{"text": "oil prices rise again"}'
    request = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    # Of several, half would be kept for requests that are refused.
    with stand_in_server(model_folder, tmp_path, 0.5, MAX_CONNECTIONS="1") as server, ExitStack() as stack:
        num_files = _num_files(server)
        server.client.close()
        wait_until(lambda: _num_files(server) < num_files)
        at_work = stack.enter_context(_connected(server, request))
        wait_until(lambda: b"503 Service Unavailable" in _first_line(server))
        assert at_work.recv(4096).startswith(b"HTTP/1.1 200 OK")
        wait_until(lambda: _first_line(server) == b"HTTP/1.1 200 OK")  # once they have been idle for a second


def _first_line(server: Server) -> bytes:
    with _connected(server, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n") as connection:
        return connection.recv(4096).partition(b"\r\n")[0]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_of_many_clients_that_come_at_once_each_is_answered_or_refused(
    loop: str, model_folder: Path, tmp_path: Path
) -> None:
    # Connections are made before their requests are read: none may be ended for the next one in between.
    command = ("uvicorn", "tests.inference.stand_in_server:app", "--loop", loop)
    with stand_in_server(model_folder, tmp_path, 0, command, MAX_CONNECTIONS="3") as server, ExitStack() as stack:
        request = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
        server.client.close()
        server.process.send_signal(signal.SIGSTOP)
        clients = [stack.enter_context(_connected(server, request)) for _ in range(20)]
        server.process.send_signal(signal.SIGCONT)
        lines = [connection.recv(4096).partition(b"\r\n")[0] for connection in clients]
        assert set(lines) == {b"HTTP/1.1 200 OK", b"HTTP/1.1 503 Service Unavailable"}


@pytest.mark.parametrize("where", ["port", "uds"])
def test_connections_that_wait_are_accepted_in_a_few_turns_of_the_event_loop(where: str, tmp_path: Path) -> None:
    # uvloop alone accepts one per turn.
    address = {"port": 0, "uds": str(tmp_path / "socket")}

    async def run() -> None:
        config = uvicorn.Config(_no_application, log_config=None, ws="none", lifespan="off", **{where: address[where]})
        config.load()
        server = uvicorn.Server(config)
        async with ConnectionKeeper(1000, 60, 0, lambda *_: None).watching(server):
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            listening = server.servers[0].sockets[0]
            with ExitStack() as stack:
                for _ in range(40):
                    client = stack.enter_context(socket.socket(listening.family))
                    client.connect(listening.getsockname())
                for _ in range(20):
                    await asyncio.sleep(0)
                assert len(server.server_state.connections) == 40
            server.should_exit = True
            await serving

    uvloop.run(run())


async def _no_application(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("no request was sent")


def test_clients_that_are_refused_in_a_flood_leave_no_errors_in_the_log(model_folder: Path, tmp_path: Path) -> None:
    with stand_in_server(model_folder, tmp_path, 0, MAX_CONNECTIONS="3") as server, ExitStack() as stack:
        server.client.close()
        for _ in range(80):
            stack.enter_context(_connected(server))
        wait_until(lambda: _first_line(server) == b"HTTP/1.1 200 OK")  # once they have been idle for a second
        assert "Exception" not in server.log()
