"""Bodies that weigh far more as objects than as bytes: refused in one line, while the server stays quick and small."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inference.http.routes.json_route import json_list
from tests.inference.servers import Server, metric, serving, stand_in_server
from tests.processes import wait_until

MIB = 2**20
MODEL = "tiny"
# The promise is 100 ms on an idle machine. Tests share theirs, so we count the processor time that the server spends
# while a probe waits for it. Before bodies were bounded, it was seconds to minutes.
MOST_WORK_S = 1.0
MOST_MEMORY_MB = 50


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    with stand_in_server(model_folder, folder, 0.0, LOG_LEVEL="warning") as server:
        yield server


def _filled(head: str, item: str, tail: str, num_bytes: int) -> bytes:
    """A body of so many bytes: an item again and again, with commas between."""
    times = (num_bytes - len(head) - len(tail)) // (len(item.encode()) + 1)
    return (head + ",".join([item] * times) + tail).encode()


def _with_keys(head: str, tail: str, num_bytes: int) -> bytes:
    times = (num_bytes - len(head) - len(tail)) // 12
    return (head + ",".join(f'"{i:07x}":1' for i in range(times)) + tail).encode()


def _tensor(fields: str) -> str:
    return f'{{"inputs":[{{"name":"text","shape":[1],"datatype":"BYTES",{fields}'


_V2 = f"/v2/models/{MODEL}/infer"
_BODIES = {
    "numbers for a text": ("/predict", lambda n: _filled('{"text":[', "1", "]}", n)),
    "unknown keys": ("/predict", lambda n: _with_keys('{"text":"Goal!",', "}", n)),
    "a text far too long": ("/predict", lambda n: _filled('{"text":"\U0001f600', "a", '"}', n)),
    "half characters": ("/predict", lambda n: _filled('{"text":"\U0001f600', "\\ud83d", '"}', n)),
    "a number of a million digits": ("/predict", lambda n: b'{"text":' + b"9" * (n - 9) + b"}"),
    "blanks": ("/predict", lambda n: b" " * n),
    "brackets": ("/predict", lambda n: b"[" * n),
    "quotes": ("/predict", lambda n: b'"' * n),
    "numbers for texts": ("/predict/batch", lambda n: _filled('{"texts":[', "1", "]}", n)),
    "empty texts": ("/predict/batch", lambda n: _filled('{"texts":[', '""', "]}", n)),
    "texts of one backslash": ("/predict/batch", lambda n: _filled('{"texts":[', '"\\\\"', "]}", n)),
    "lists for texts": ("/predict/batch", lambda n: _filled('{"texts":[', "[]", "]}", n)),
    "long texts of half characters": (
        "/predict/batch",
        lambda n: _filled('{"texts":[', '"\U0001f600' + "a" * 200_000 + '\\ud83d"', "]}", n),
    ),
    "numbers to explain": ("/explain", lambda n: _filled('{"text":[', "1", "]}", n)),
    "unknown keys to explain": ("/explain", lambda n: _with_keys('{"text":"Goal!",', "}", n)),
    "numbers for the hub": ("/hub", lambda n: _filled('{"inputs":[', "1", "]}", n)),
    "options of the hub": ("/hub", lambda n: _with_keys('{"inputs":"Goal!","options":{', "}}", n)),
    "numbers for a gateway": ("/classify", lambda n: _filled('{"input":[', "1", "]}", n)),
    "unknown keys of a gateway": ("/v1/classify", lambda n: _with_keys('{"input":"Goal!",', "}", n)),
    "numbers for a tensor": (_V2, lambda n: _filled(_tensor('"data":['), "1", "]}]}", n)),
    "lists for a tensor": (_V2, lambda n: _filled(_tensor('"data":['), "[]", "]}]}", n)),
    "parameters": (_V2, lambda n: _filled('{"parameters":{"a":[', "[]", "]}}", n)),
    "tensors": (_V2, lambda n: _filled('{"inputs":[', "{}", "]}", n)),
    "outputs": (_V2, lambda n: _filled('{"outputs":[', "{}", "]}", n)),
}  # fmt: skip


@pytest.mark.parametrize("mib", [1, 8])
@pytest.mark.parametrize("kind", _BODIES)
def test_a_body_of_what_no_request_needs_is_refused_in_one_line_at_no_cost(server: Server, kind: str, mib: int) -> None:
    path, body_of = _BODIES[kind]
    body = body_of(mib * MIB)
    with _watched(server, len(body)):
        _assert_refused(server, path, body)


@pytest.mark.parametrize("mib", [1, 8])
@pytest.mark.parametrize("element", [b"", b"a"])
def test_a_binary_tensor_of_tiny_texts_is_refused_in_one_line_at_no_cost(
    server: Server, element: bytes, mib: int
) -> None:
    element = len(element).to_bytes(4, "little") + element
    times = mib * MIB // len(element) - 100
    head = _tensor(f'"parameters":{{"binary_data_size":{times * len(element)}}}}}]}}').encode()
    body = head + element * times
    with _watched(server, len(body)):
        _assert_refused(server, _V2, body, {"Inference-Header-Content-Length": str(len(head))})


def test_a_binary_tensor_of_one_endless_text_is_refused_before_it_is_decoded(server: Server) -> None:
    text = "\U0001f600".encode() + b"a" * (8 * MIB - 1000)
    element = len(text).to_bytes(4, "little") + text
    head = _tensor(f'"parameters":{{"binary_data_size":{len(element)}}}}}]}}').encode()
    with _watched(server, len(head) + len(element)):
        _assert_refused(server, _V2, head + element, {"Inference-Header-Content-Length": str(len(head))})


_LINES = {
    "refused": b"{}",
    "empty": b"",
    "blank": b'{"text":""}',
    "numbers": b'{"text":[' + b",".join([b"1"] * 10_000) + b"]}",
    "unknown keys": _with_keys('{"text":"Goal!",', "}", 10_000),
    "too long": b"a" * 300_000,
}


@pytest.mark.parametrize("kind", _LINES)
def test_a_stream_of_lines_that_hold_nothing_leaves_time_and_memory_to_others(server: Server, kind: str) -> None:
    line = _LINES[kind] + b"\n"
    body = line * (MIB // len(line))
    with _watched(server, len(body)):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        connection.request("POST", "/predict/batch", body, {"Content-Type": "application/x-ndjson"})
        response = connection.getresponse()
        assert response.status == 200
        answers = [json.loads(line) for line in response]
        connection.close()
    assert all("error" in answer for answer in answers)
    assert [answer["index"] for answer in answers] == list(range(len(answers)))


def test_clients_that_read_nothing_fill_no_more_than_the_memory_set_aside_for_bodies(server: Server) -> None:
    piece = (b'{"text":"Goal!"}\n' + b"{}\n" * 20) * 1000
    connections = [_connect_to_stream(server) for _ in range(4)]
    sent = 0
    with _watched(server, 16 * MIB):
        for connection in connections:
            connection.settimeout(1)
            with contextlib.suppress(TimeoutError):
                for _ in range(14 * MIB // len(piece)):
                    connection.sendall(piece)
                    sent += len(piece)
        assert sent > 16 * MIB, "the server reads ahead"
        held = metric(server.client, "pending_body_bytes")
        assert 16 * MIB < held < sent
    for connection in connections:
        connection.close()
    wait_until(lambda: metric(server.client, "pending_body_bytes") == 0)


def _connect_to_stream(server: Server) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    head = b"POST /predict/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
    connection.sendall(head + b"Content-Length: 999999999\r\n\r\n")
    return connection


def test_a_text_that_takes_long_to_clean_is_explained_beside_the_event_loop(server: Server) -> None:
    text = " ".join(["&#60;" * 63] * 62)
    with _watched(server, len(text)):
        answer = server.client.post("/explain", json={"text": text})
    assert answer.status_code == 200
    assert len(answer.json()["words"]) == 62


def test_texts_in_progress_count_with_what_they_weigh_as_objects(model_folder: Path) -> None:
    text = "\U0001f600" + "oil " * 4000  # four bytes a character
    with serving(model_folder, seconds_per_token=0.05, max_pending_mb=1) as client:
        thread = threading.Thread(target=lambda: client.post("/predict", json={"text": text}))
        thread.start()
        wait_until(lambda: metric(client, "pending_body_bytes") > 4 * len(text))
        thread.join()
        assert metric(client, "pending_body_bytes") == 0
        refused = client.post("/predict/batch", json={"texts": [text] * 40})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_busy")
        assert metric(client, "pending_body_bytes") == 0


def test_a_list_of_large_answers_lets_others_get_on_between_them() -> None:
    async def turns_of_others() -> int:
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        others = asyncio.create_task(take_turns())
        response = await json_list([{"label": float(i)} for i in range(50_000)] for _ in range(20))
        others.cancel()
        assert len(json.loads(response.body)) == 20
        return turns

    assert asyncio.run(turns_of_others()) > 2


def _assert_refused(server: Server, path: str, body: bytes, headers: dict[str, str] | None = None) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request("POST", path, body, headers or {})
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    connection.close()
    message = error if isinstance(error, str) else error["message"]
    assert 400 <= response.status < 500, message
    assert message.isprintable()
    assert len(message) < 300


@contextmanager
def _watched(server: Server, num_body_bytes: int) -> Iterator[None]:
    """Ask /livez all the while, and look how much memory the process ever takes above the body."""
    worst, is_done = 0.0, threading.Event()

    def probe() -> None:
        nonlocal worst
        while not is_done.wait(0.01):
            started = _processor_seconds(server)
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
            connection.request("GET", "/livez")
            assert connection.getresponse().read()
            connection.close()
            worst = max(worst, _processor_seconds(server) - started)

    status = Path(f"/proc/{server.process.pid}/status")
    status.with_name("clear_refs").write_text("5")  # the highest memory starts again from what it is now
    before = _kilobytes(status, "VmRSS")
    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
    grown_mb = (_kilobytes(status, "VmHWM") - before) / 1024 - num_body_bytes / MIB
    print(f"  /livez waited for {worst * 1000:.0f} ms of work at most, memory grew by {grown_mb:.0f} MB above the body")
    assert worst < MOST_WORK_S
    assert grown_mb < MOST_MEMORY_MB


def _processor_seconds(server: Server) -> float:
    """What all threads of a server have had of the processors, in ticks of the kernel's clock."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _kilobytes(status: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))
