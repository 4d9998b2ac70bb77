from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference.http.routes.lines import LineBuffer
from inference.http.server_parts import Parts
from inference.settings import Settings
from tests.inference.servers import metric, serving
from tests.inference.stand_in_model import stand_in, text_of
from tests.processes import wait_until

STREAM = {"content-type": "application/x-ndjson"}


def _post(client: httpx.Client, body: bytes | Iterator[bytes]) -> list[dict[str, Any]]:
    response = client.post("/predict/batch", content=body, headers=STREAM)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def _lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def test_every_line_is_answered_in_order_as_a_single_request_is(model_folder: Path, texts: list[str]) -> None:
    with serving(model_folder) as client:
        answers = _post(client, _lines(texts * 40))
        singles = [client.post("/predict", json={"text": text}).json() for text in texts]
        assert answers == [{"index": i, **singles[i % len(texts)]} for i in range(len(texts) * 40)]
        assert metric(client, "predictions_total") == len(texts) * 41


def test_a_bad_line_is_answered_with_an_error_for_it_alone(model_folder: Path) -> None:
    body = (
        b'{"text": "Oil prices", "top_k": 1}\n\n{"text": "\\u200d"}\n{oil}\n{"txet": "Oil"}\n{"text": "\xff"}\r\n'
        b'{"text": "penalties penalties"}\n{"text": "\\ud83d"}\n"Oil"\n{"text": "'
        + b"a" * 70_000
        + b'"}\n{"text": "Goal!"}'
    )
    with serving(model_folder, max_text_chars=4000) as client:
        answers = _post(client, body)
    assert [answer["index"] for answer in answers] == list(range(10))
    assert len(answers[0]["probabilities"]) == 1
    assert [answer["error"]["code"] for answer in answers[1:9]] == [
        "blank_text",
        "invalid_request",
        "invalid_request",
        "unreadable_body",
        "inference_failed",
        "blank_text",
        "invalid_request",
        "text_too_long",
    ]
    assert answers[9]["label"]


def test_answers_flow_while_the_body_still_arrives(model_folder: Path) -> None:
    with serving(model_folder) as client, socket.create_connection(("127.0.0.1", client.base_url.port)) as connection:
        head = b"POST /predict/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        received = connection.makefile("rb")
        for i in range(3):
            line = b'{"text": "Goal!"}\n'
            connection.sendall(b"%x\r\n%s\r\n" % (len(line), line))
            while f'"index":{i}'.encode() not in (answer := received.readline()):
                assert answer, "the server closed the connection"
        connection.sendall(b"0\r\n\r\n")
        assert b"0\r\n" in [received.readline() for _ in range(2)]


def test_a_client_that_reads_nothing_before_it_has_sent_everything_is_answered(model_folder: Path) -> None:
    # httpx is one; the answers fill every buffer on the way while it still sends.
    num_lines = 20_000
    piece = _lines(["Goal!"] * 100)
    with serving(model_folder) as client:
        answers = _post(client, (piece for _ in range(num_lines // 100)))
    assert [answer["index"] for answer in answers] == list(range(num_lines))


def test_a_stream_waits_for_room_in_the_queue_instead_of_failing(model_folder: Path) -> None:
    text = "oil prices rise " * 8  # 24 tokens, of 200 in the queue: less than a group of lines has
    with serving(model_folder, seconds_per_token=0.0002, max_wait_seconds=0.05) as client:
        bodies = [_lines([f"{text_of(i)} {text}" for i in range(start, start + 100)]) for start in (0, 100, 200)]
        found: list[list[dict[str, Any]]] = []
        threads = [threading.Thread(target=lambda body=body: found.append(_post(client, body))) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [len(answers) for answers in found] == [100, 100, 100]
    assert all("label" in answer for answers in found for answer in answers)


def test_a_stream_waits_for_its_clients_rate_longer_than_a_request_may(model_folder: Path) -> None:
    texts = [text_of(i) for i in range(96)]
    with serving(model_folder, rate_limit_per_s=12, request_timeout_s=2) as client:
        answers = _post(client, _lines(texts))  # after two groups of 32, the bucket of 24 lacks 40, which is 3.3 s
    assert [answer["index"] for answer in answers if "label" in answer] == list(range(96))


def test_a_body_that_stops_arriving_ends_in_an_error_line(model_folder: Path) -> None:
    with (
        serving(model_folder, request_timeout_s=0.5) as client,
        socket.create_connection(("127.0.0.1", client.base_url.port)) as connection,
    ):
        head = b"POST /predict/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
        connection.sendall(head + b'Content-Length: 999\r\n\r\n{"text": "Goal!"}\n')
        connection.settimeout(20)
        received = b""
        while b'"body_timeout"' not in received:
            piece = connection.recv(65536)
            assert piece, received
            received += piece
        assert b'"index":0,"label"' in received


def test_streams_leave_half_of_the_memory_for_bodies_to_single_requests(model_folder: Path) -> None:
    parts = Parts.of(Settings(model_checkpoint=model_folder, max_pending_mb=2), stand_in(), None)
    whole, streams = parts.body_budget, parts.stream_budget
    streams.take(2**20)
    assert not streams.has_room(1)
    assert whole.has_room(2**20)
    whole.take(2**19)  # what single requests hold counts for streams too
    streams.release(2**19)
    assert streams.has_room(2**19)
    whole.take(2**19)
    assert streams.has_room(2**19)
    whole.take(1)
    assert not streams.has_room(2**19)


def test_streams_that_wait_for_each_other_s_room_end(model_folder: Path) -> None:
    head = b"POST /predict/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
    with serving(model_folder, max_pending_mb=1, request_timeout_s=2) as client, ExitStack() as opened:
        address = ("127.0.0.1", client.base_url.port)
        streams = [opened.enter_context(socket.create_connection(address)) for _ in range(4)]
        for stream in streams:
            stream.sendall(head + b'Content-Length: 999999\r\n\r\n{"text": "')
        for _ in range(45):  # in turns, so that each still wants more when there is no room left
            for stream in streams:
                with suppress(OSError):  # it has been ended already
                    stream.sendall(b"a" * 10_000)
        for stream in streams:
            stream.settimeout(30)
            received = b""
            while b'"server_busy"' not in received and b'"body_timeout"' not in received:
                piece = stream.recv(65536)
                assert piece, received
                received += piece
        wait_until(lambda: metric(client, "pending_body_bytes") == 0)
        assert [answer["index"] for answer in _post(client, _lines(["oil"] * 50))] == list(range(50))


def test_without_a_model_a_stream_is_refused_as_a_whole(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        response = client.post("/predict/batch", content=_lines(["Goal!"]), headers=STREAM)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "model_unavailable"


def test_a_stream_whose_client_left_takes_its_texts_along(model_folder: Path) -> None:
    with serving(model_folder, seconds_per_token=0.02) as client:
        with socket.create_connection(("127.0.0.1", client.base_url.port)) as connection:
            head = b"POST /predict/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
            connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            lines = _lines([text_of(i) for i in range(32)])
            connection.sendall(b"%x\r\n%s\r\n" % (len(lines), lines))
            wait_until(lambda: metric(client, "batch_texts_count") + metric(client, "queue_tokens") > 0)
        wait_until(lambda: metric(client, "requests_total", route="/predict/batch", status="499") == 1)
        wait_until(lambda: metric(client, "queue_tokens") == 0)


def test_a_stream_whose_client_takes_no_answers_is_ended(model_folder: Path) -> None:
    lines = _lines(["Goal!"]) * 1_000_000
    with (
        serving(model_folder, request_timeout_s=0.5, max_body_mb=0.5) as client,
        socket.create_connection(("127.0.0.1", client.base_url.port)) as connection,
    ):
        head = b"POST /predict/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
        connection.sendall(head + b"Content-Length: 999999999\r\n\r\n")
        connection.settimeout(1)
        with pytest.raises(OSError, match=r"timed out|reset|Broken pipe"):
            connection.sendall(lines)
        wait_until(lambda: metric(client, "requests_total", route="/predict/batch", status="499") == 1)
        assert metric(client, "pending_body_bytes") == 0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_come_out_whole_however_the_body_is_cut(size: int) -> None:
    body = b"one\ntwo\r\n\n   \nthree is too long for it\nfour\nfive"
    lines = LineBuffer(max_line_bytes=10)
    found = []
    for start in range(0, len(body), size):
        lines.feed(body[start : start + size])
        found += lines.take(99)
    assert found + lines.take(99, is_end=True) == [b"one", b"two\r", None, b"four", b"five"]


def test_a_stream_of_refused_lines_is_ended_with_a_line_that_says_so(model_folder: Path) -> None:
    with serving(model_folder) as client:
        answers = _post(client, b"{}\n" * 100_000)
        assert 1000 < len(answers) < 1200
        assert answers[-1]["error"]["code"] == "too_many_refused"
        assert "lines in a row were refused" in answers[-1]["error"]["message"]
        mixed = _post(client, (b"{}\n" * 500 + b'{"text": "Goal!"}\n') * 5)
        assert [answer["index"] for answer in mixed] == list(range(501 * 5))
        assert [answer for answer in mixed if "label" in answer][-1]["index"] == len(mixed) - 1
        assert metric(client, "pending_body_bytes") == 0
