"""Real servers that observe: several processes, processes that are killed, databases that fail."""

from __future__ import annotations

import hashlib
import resource
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from inference.app import create_app
from inference.observing.store import Counted, Store
from inference.settings import Settings
from tests.inference.cascades import NEWS, make_cascade
from tests.inference.servers import Server, ThreadedServer, metric, stand_in_server
from tests.inference.stand_in_model import stand_in, text_of
from tests.processes import wait_until

MARK = "ministers meet in geneva secretly"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "observed.sqlite"


def _counts(address: Path | str, *kinds: str) -> dict[tuple[str, str], int]:
    """Of whatever was served."""
    store = Store(str(address))
    with store._transaction(writes=False) as run:
        rows = run("SELECT kind, key, SUM(n) FROM counts GROUP BY kind, key").fetchall()
    store.close()
    return {(kind, key): int(number) for kind, key, number in rows if kind in kinds}


def _num_texts(address: Path | str) -> int:
    return _counts(address, "texts").get(("texts", ""), 0)


@contextmanager
def _in_process(folder: Path, **settings: object) -> Iterator[tuple[httpx.Client, ThreadedServer]]:
    """A server that writes what it sees at once."""
    app = create_app(Settings(model_checkpoint=folder, **settings), stand_in(0.0))
    server = ThreadedServer(app)
    server.parts.observer.pause_s = (0.01, 0.02, 0.5)
    with server.running() as client:
        yield client, server


def _files_hold(folder: Path, text: str) -> bool:
    return any(text.encode() in one.read_bytes() for one in folder.glob("observed.sqlite*"))


def test_two_workers_add_up_in_one_file(model_folder: Path, path: Path, tmp_path: Path) -> None:
    texts = [text_of(number) for number in range(30)]
    with stand_in_server(model_folder, tmp_path, 0.0, WORKERS="2", OBSERVE=str(path), API_KEY="sesame") as server:
        workers = set()
        while len(workers) < 2:  # a new connection each time, which the kernel gives to one of them
            with server.new_client("sesame") as client:
                answered = client.post("/predict/batch", json={"texts": texts})
            assert answered.status_code == 200
            workers.add(answered.headers["x-request-id"].partition("-")[0])
            total = metric(server.client, "predictions_total")
        assert server.stop() == 0

    assert _num_texts(path) == total
    # The first digits of the key's hash.
    assert _counts(path, "caller").keys() == {("caller", hashlib.sha256(b"sesame").hexdigest()[:12])}


def test_servers_with_one_postgresql_add_up(request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path) -> None:
    address = request.getfixturevalue("postgres").new_database()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with (
        stand_in_server(model_folder, tmp_path / "one", 0.0, OBSERVE=address) as one,
        stand_in_server(model_folder, tmp_path / "other", 0.0, OBSERVE=address) as other,
    ):
        for server, number in ((one, 3), (other, 4)):
            for i in range(number):
                assert server.client.post("/predict", json={"text": text_of(i)}).status_code == 200
        assert (one.stop(), other.stop()) == (0, 0)

    assert _num_texts(address) == 7


@contextmanager
def _asking(server: Server, answered: list[int]) -> Iterator[None]:
    """Ask until the server is gone."""

    def ask() -> None:
        with server.new_client() as client:
            while True:
                try:
                    client.post("/predict", json={"text": text_of(len(answered))}).raise_for_status()
                except httpx.HTTPError:
                    return
                answered.append(1)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for one in threads:
        one.start()
    yield
    for one in threads:
        one.join()


def test_a_server_that_is_killed_loses_seconds_of_counts_and_harms_nothing(
    model_folder: Path, path: Path, tmp_path: Path
) -> None:
    answered: list[int] = []
    with (
        stand_in_server(model_folder, tmp_path, 0.0, OBSERVE=str(path)) as server,
        _asking(server, answered),
    ):
        wait_until(lambda: metric(server.client, "observed_texts_total") > 0)
        written = metric(server.client, "observed_texts_total")
        server.process.kill()
        server.process.wait()
    assert written <= _num_texts(path) <= len(answered) + 4
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]

    before = _num_texts(path)
    with _in_process(model_folder, observe=str(path)) as (client, _):
        client.post("/predict", json={"text": "Goal!"})
    assert _num_texts(path) == before + 1


def test_a_locked_database_is_one_line_and_its_counts_are_written_later(
    model_folder: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _in_process(model_folder, observe=str(path)) as (client, _):
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        sent = 0

        def has_complained() -> bool:
            nonlocal sent
            sent += 1
            assert client.post("/predict", json={"text": text_of(sent)}).status_code == 200
            return any("locked the file" in one for one in caplog.messages)

        wait_until(has_complained)  # it waits five seconds for the lock
        other.execute("ROLLBACK")
        other.close()
        wait_until(lambda: metric(client, "observed_texts_total") == sent)
    told = [one for one in caplog.messages if "is not recorded" in one]
    assert len(told) == 1
    assert "another program has locked the file for more than 5 s" in told[0]
    assert _num_texts(path) == sent


def test_a_full_disk_is_one_line_and_its_counts_are_written_later(
    model_folder: Path, path: Path, tmp_path: Path
) -> None:
    # No file of the process may grow beyond this: the log does not, the texts of the store would.
    limit, unlimited = 400_000, resource.RLIM_INFINITY
    texts = [f"{i} " + text_of(i) * 300 for i in range(100)]
    with stand_in_server(model_folder, tmp_path, 0.0, OBSERVE=str(path), KEEP_TEXTS="1h") as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit, unlimited))
        assert server.client.post("/predict/batch", json={"texts": texts}).status_code == 200
        wait_until(lambda: "is not recorded" in server.log(), 30)
        assert server.client.post("/predict", json={"text": "Goal!"}).status_code == 200
        assert metric(server.client, "observed_texts_total") == 0
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
        assert server.stop() == 0
        assert server.log().count("is not recorded") == 1
        assert "Traceback" not in server.log()

    assert _num_texts(path) == 101


def test_nothing_of_a_text_is_in_the_store_unless_texts_are_kept(model_folder: Path, path: Path) -> None:
    for keep, is_there in (("", False), ("1h", True)):
        with _in_process(model_folder, observe=str(path), keep_texts=keep) as (client, _):
            client.post("/predict", json={"text": MARK})
        assert _files_hold(path.parent, MARK) is is_there


def test_every_way_to_an_answer_counts_and_an_explanation_does_not(model_folder: Path, path: Path) -> None:
    line = b'{"text": "Oil"}\n'
    with _in_process(model_folder, observe=str(path), keep_texts="1h") as (client, server):
        name = server.parts.served_model.name
        client.post("/predict", json={"text": "Goal!"}, headers={"X-Request-ID": "mine"})
        client.post("/predict/batch", json={"texts": ["Oil", "Gas"]}, headers={"X-Request-ID": "batch"})
        client.post("/predict/batch", content=line * 2, headers={"content-type": "application/x-ndjson"})
        client.post("/hub", json={"inputs": "Oil"})
        client.post("/classify", json={"input": ["Oil", "Gas"]})
        tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["Oil"]}
        client.post(f"/v2/models/{name}/infer", json={"inputs": [tensor]})
        client.post("/explain", json={"text": "Oil prices"})
        client.post("/predict", json={"text": " "})
    store = Store(str(path))
    ids = {one.id for one in store.texts(name)}
    store.close()

    assert _counts(path, "texts", "caller") == {("texts", ""): 9, ("caller", "anonymous"): 9}
    assert _counts(path, "distinct") == {("distinct", ""): 3}
    assert ids >= {"mine:0", "batch:0", "batch:1"}
    assert len(ids) == 9


def test_an_explanation_of_a_cascade_does_not_count(tmp_path: Path, path: Path) -> None:
    folder = make_cascade(NEWS, NEWS, tmp_path / "cascade")
    server = ThreadedServer(create_app(Settings(model_checkpoint=folder, observe=str(path))))
    with server.running() as client:
        assert client.post("/explain", json={"text": "Shares fall"}).status_code == 200
        assert client.post("/predict", json={"text": "Shares fall"}).status_code == 200
        reason = client.get("/model").json()["observed"]["hour"]["reason"]

    assert _num_texts(path) == 1
    assert reason == "a cascade has no reference to compare with, because two models answer"


def test_what_max_error_leaves_without_an_answer_is_counted(path: Path) -> None:
    server = ThreadedServer(create_app(Settings(observe=str(path), max_error="0.02")))
    with server.running() as client:
        answers = client.post("/predict/batch", json={"texts": ["Shares", "Shares fall on Wall Street", "x y"]}).json()

    expected = sum(one["abstained"] is not None for one in answers)
    assert expected
    assert _counts(path, "abstained") == {("abstained", ""): expected}


def test_the_model_page_tells_what_all_servers_have_seen(path: Path) -> None:
    store, minute = Store(str(path)), int(time.time() // 60)
    server = ThreadedServer(create_app(Settings(observe=str(path))))
    with server.running() as client:
        model = client.get("/model").json()
    key = (minute, model["name"], model["revision"])
    assert model["observed"]["hour"] == {"texts": 0, "reason": "0 texts are too few, at least 50 are needed"}
    assert model["observed"]["alarm"]["active"] is False
    store.add({Counted(*key, "texts"): (80, 0.0), Counted(*key, "cell", "9"): (80, 79.0)})
    store.close()
    server = ThreadedServer(create_app(Settings(observe=str(path))))
    with server.running() as client:
        seen = client.get("/models/" + model["name"]).json()["observed"]

    assert seen["hour"]["texts"] == seen["week"]["texts"] == 80
    assert seen["day"]["low"] < seen["day"]["accuracy"] < seen["day"]["high"]
    assert seen["reference_accuracy"] > 0.9


def test_a_server_that_does_not_observe_says_nothing(model_folder: Path) -> None:
    server = ThreadedServer(create_app(Settings(model_checkpoint=model_folder), stand_in(0.0)))
    with server.running() as client:
        assert "observed" not in client.get("/model").json()
        assert metric(client, "observed_texts_total") == 0
