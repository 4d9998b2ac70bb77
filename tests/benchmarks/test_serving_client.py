"""The load client accounts for every request, whatever the server does with it."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.client import Client
from benchmarks.serving.load import BROKEN, NO_ANSWER, Load

_SPEC = importlib.util.spec_from_file_location("stand_in_server", Path(__file__).with_name("stand_in_server.py"))
stand_in_server = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(stand_in_server)


@pytest.fixture
def server() -> Iterator[Any]:
    with stand_in_server.StandInServer() as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield running
        running.shutdown()


def send(server: Any, folder: Path, texts: list[str], **how: Any) -> dict[str, Any]:
    bodies = folder / "bodies.jsonl"
    bodies.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    load = Load(str(bodies), server.server_port, "/predict", 1, **how)
    client = Client(load)
    began = client.closed_loop() if load.clients else client.open_loop()
    return client.tally.summary(load, began)


def test_a_closed_loop_counts_what_the_server_answered(server: Any, tmp_path: Path) -> None:
    summary = send(server, tmp_path, ["a", "b"], clients=3, seconds=0.3)
    assert summary["outcomes"] == {"200": server.num_answered}
    assert summary["texts_answered"] == server.num_answered >= 3
    assert summary["texts_per_second"] > 0


def test_an_open_loop_sends_at_its_rate_whatever_is_answered(server: Any, tmp_path: Path) -> None:
    texts = ["a", "refuse", "b", "hang up"]
    summary = send(server, tmp_path, texts, rate=100, seconds=0.4, patience=5)
    assert summary["outcomes"] == {"200": 20, "503": 10, BROKEN: 10}
    assert set(summary["latency"]["503"]) == {"p50", "p95", "p99", "max"}


def test_random_gaps_send_as_much(server: Any, tmp_path: Path) -> None:
    summary = send(server, tmp_path, ["a"], rate=200, seconds=0.5, poisson=True)
    assert summary["outcomes"] == {"200": 100}


def test_requests_without_an_answer_are_not_forgotten(server: Any, tmp_path: Path) -> None:
    summary = send(server, tmp_path, ["keep silent", "a"], rate=50, seconds=0.2, patience=0.3)
    assert summary["outcomes"] == {"200": 5, NO_ANSWER: 5}


def test_a_client_that_is_cut_off_stays_out(server: Any, tmp_path: Path) -> None:
    summary = send(server, tmp_path, ["hang up"], clients=4, seconds=0.2)
    assert summary["outcomes"] == {BROKEN: 4}
    assert summary["texts_per_second"] == 0
