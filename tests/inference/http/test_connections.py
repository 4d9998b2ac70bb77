"""Connections that only hold memory and files are ended, under both commands that start a server."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.inference.servers import Server, free_port, metric, running, stand_in_server
from tests.processes import wait_until

COMMANDS = {
    "python -m inference.serve": ("tests.inference.stand_in_server", "--host", "127.0.0.1"),
    "uvicorn": ("uvicorn", "tests.inference.stand_in_server:app"),
    "uvicorn with h11": ("uvicorn", "tests.inference.stand_in_server:app", "--http", "h11", "--loop", "asyncio"),
}


@pytest.fixture(scope="module", params=COMMANDS)
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


def test_a_connection_that_is_kept_alive_is_left_alone_while_it_waits(hasty_server: Server) -> None:
    with _connected(hasty_server) as connection:
        for _ in range(3):
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b'"alive"}'):
                answer += connection.recv(4096)
            connection.settimeout(1.5)  # longer than headers may take
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(20)


@pytest.mark.parametrize("command", COMMANDS)
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
    with stand_in_server(model_folder, tmp_path, 0.5, MAX_CONNECTIONS="3") as server, ExitStack() as stack:
        num_files = _num_files(server)
        server.client.close()
        wait_until(lambda: _num_files(server) < num_files)
        at_work = [stack.enter_context(_connected(server, request)) for _ in range(3)]
        wait_until(lambda: b"503 Service Unavailable" in _first_line(server))
        for connection in at_work:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
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


def test_clients_that_are_refused_in_a_flood_leave_no_errors_in_the_log(model_folder: Path, tmp_path: Path) -> None:
    with stand_in_server(model_folder, tmp_path, 0, MAX_CONNECTIONS="3") as server, ExitStack() as stack:
        server.client.close()
        for _ in range(80):
            stack.enter_context(_connected(server))
        wait_until(lambda: _first_line(server) == b"HTTP/1.1 200 OK")  # once they have been idle for a second
        assert "Exception" not in server.log()
