"""Corrections over HTTP: on the disk before they are answered, once each, bounded, and never half."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference.app import create_app
from inference.observing.feedback import Correction, FeedbackFullError
from inference.observing.store import Feedback, KeptText, Store
from inference.settings import Settings
from tests.inference.servers import Server, ThreadedServer, metric, serving, stand_in_server
from tests.inference.stand_in_model import stand_in
from tests.inference.test_pairs import make_pair_folder
from tests.processes import wait_until

CORRECTION = {"text": "Shares fall on Wall Street", "label": "Business", "by": "ann"}


@contextmanager
def _observing(folder: Path, tmp_path: Path, **settings: object) -> Iterator[tuple[httpx.Client, Store]]:
    path = str(tmp_path / "observed.sqlite")
    with serving(folder, observe=path, **settings) as client:
        yield client, Store(path)


def _code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def _recorded(store: Store) -> list[Feedback]:
    return store.feedback("tiny")


def test_a_correction_is_on_the_disk_when_it_is_answered(model_folder: Path, tmp_path: Path) -> None:
    with _observing(model_folder, tmp_path) as (client, store):
        answer = client.post("/feedback", json=CORRECTION)
        [found] = _recorded(store)
        again = client.post("/models/tiny/feedback", json=CORRECTION)
        revision = client.get("/model").json()["revision"]

        assert answer.json() == {"id": found.id, "recorded": True, "known": False}
        assert again.json() == {"id": found.id, "recorded": True, "known": True}
        assert (found.text, found.label, found.author, found.caller) == (*CORRECTION.values(), "anonymous")
        assert (found.kind, found.revision, found.answered, found.why) == ("correction", revision, "", "")
        assert len(_recorded(store)) == 1
        for result in ("recorded", "known"):
            assert metric(client, "feedback_total", result=result) == 1


def test_a_correction_by_request_id_finds_the_text_if_it_is_kept(model_folder: Path, tmp_path: Path) -> None:
    with _observing(model_folder, tmp_path) as (client, store):
        store.add({}, [KeptText("r7:1", 1.0, "tiny", "abc", "anonymous", "Shares fall", "World", 0.9, None, 0)])
        by_id = {"request_id": "r7", "label": "Business"}

        assert client.post("/feedback", json=by_id | {"position": 1}).status_code == 200
        unknown = client.post("/feedback", json=by_id)

        assert _code(unknown) == (422, "text_needed")
        assert "KEEP_TEXTS" in unknown.json()["error"]["message"]
        assert [(one.text, one.answered) for one in _recorded(store)] == [("Shares fall", "World")]


@pytest.mark.parametrize(
    ("more", "status", "code"),
    [
        ({"label": "Weather"}, 422, "unknown_label"),
        ({"text": None}, 422, "invalid_request"),
        ({"text": " \0"}, 422, "blank_text"),
        ({"text": "a" * 20_001}, 422, "text_too_long"),
        ({"text": "a" * 66_000}, 413, "body_too_large"),
        ({"request_id": "no word"}, 422, "invalid_request"),
        ({"model": "other"}, 404, "not_found"),
        ({"certainty": 1}, 422, "invalid_request"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    model_folder: Path, tmp_path: Path, more: dict[str, Any], status: int, code: str
) -> None:
    with _observing(model_folder, tmp_path) as (client, store):
        assert _code(client.post("/feedback", json=CORRECTION | more)) == (status, code)
        assert not _recorded(store)


def test_the_path_and_the_body_name_the_same_model(model_folder: Path, tmp_path: Path) -> None:
    with _observing(model_folder, tmp_path) as (client, _):
        answer = client.post("/models/tiny/feedback", json=CORRECTION | {"model": "other"})

        assert _code(answer) == (422, "invalid_request")


def test_without_the_setting_the_answer_names_it(model_folder: Path) -> None:
    with serving(model_folder) as client:
        answer = client.post("/feedback", json=CORRECTION)

        assert _code(answer) == (409, "feedback_off")
        assert "OBSERVE=1" in answer.json()["error"]["message"]
        assert client.get("/model").json()["feedback"] is False


def test_only_models_with_one_label_for_a_single_text_take_feedback(
    model_folder: Path, multi_label_folder: Path, regression_folder: Path, tmp_path: Path
) -> None:
    pairs = make_pair_folder(model_folder, tmp_path / "pairs", "bert")
    for folder in (multi_label_folder, regression_folder, pairs):
        # The stand-in of other tests gives every model one label.
        app = create_app(Settings(model_checkpoint=folder, engine="torch", observe=str(tmp_path / "observed.sqlite")))
        with ThreadedServer(app).running() as client:
            label = client.get("/model").json()["labels"][0]

            assert _code(client.post("/feedback", json=CORRECTION | {"label": label})) == (422, "wrong_kind_of_model")
            assert client.get("/model").json()["feedback"] is False


def test_feedback_needs_a_key_and_has_the_rate_limit_of_other_requests(model_folder: Path, tmp_path: Path) -> None:
    with _observing(model_folder, tmp_path, api_key="secret", rate_limit_per_s=1) as (client, store):
        assert _code(client.post("/feedback", json=CORRECTION)) == (401, "unauthorized")
        answers = [
            client.post("/feedback", json=CORRECTION | {"text": f"Text {i}"}, headers={"X-API-Key": "secret"})
            for i in range(4)
        ]

        assert _code(answers[-1]) == (429, "rate_limited")
        names = {one.caller for one in _recorded(store)}
        assert len(names) == 1
        assert not names & {"anonymous", "secret"}


def test_when_too_many_wait_for_the_disk_the_next_is_told_to_come_back(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "observed.sqlite"
    app = create_app(Settings(model_checkpoint=model_folder, observe=str(path)), stand_in(0.0))
    server = ThreadedServer(app)
    with server.running() as client:
        client.post("/feedback", json=CORRECTION)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            # Over HTTP, the bound on connections would come first.
            corrections = (Correction("tiny", f"r{i}", 0, "Text", "World", "ann", "", "") for i in range(10_000))
            with pytest.raises(FeedbackFullError):
                list(map(server.parts.feedback.submit, corrections))
            answer = client.post("/feedback", json=CORRECTION | {"text": "Another text"})
            other.execute("ROLLBACK")

        assert _code(answer) == (503, "feedback_full")
        assert int(answer.headers["Retry-After"]) > 0


def test_on_a_full_disk_nothing_is_accepted_and_nothing_is_lost(model_folder: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    accepted = []
    with _observing(model_folder, tmp_path) as (client, store):
        client.post("/feedback", json=CORRECTION)
        largest = max(path.stat().st_size for path in tmp_path.iterdir() if path.is_file())
        try:
            # The system refuses to let any file of this process grow further.
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 100_000, before[1]))
            for number in range(50):
                answer = client.post("/feedback", json=CORRECTION | {"text": f"{number} " + "word " * 2000})
                if answer.status_code != 200:
                    break
                accepted.append(number)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

        assert _code(answer) == (503, "feedback_failed")
        assert int(answer.headers["Retry-After"]) > 0
        assert str(tmp_path) not in answer.text
        assert metric(client, "feedback_total", result="failed") == 1
        assert client.post("/feedback", json=CORRECTION | {"text": "There is room again"}).status_code == 200
        texts = [one.text for one in _recorded(store)]
        assert [int(text.split()[0]) for text in texts[1:-1]] == accepted
        assert texts[-1] == "There is room again"


def _send_until_gone(server: Server, author: str) -> list[str]:
    """The texts that were recorded, as the server's answers say."""
    accepted = []
    with server.new_client() as client:
        try:
            for number in range(1_000_000):
                text = f"{author} {number}"
                if client.post("/feedback", json={"text": text, "label": "Business"}).status_code == 200:
                    accepted.append(text)
        except httpx.TransportError:
            return accepted
    return accepted


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_a_server_that_is_killed_under_load_has_what_it_accepted(
    model_folder: Path, tmp_path: Path, kills: int
) -> None:
    path = tmp_path / "observed.sqlite"
    accepted: list[str] = []
    for kill in range(kills):
        with (
            stand_in_server(model_folder, tmp_path, 0.0, OBSERVE=str(path), WORKERS="1", LOG_LEVEL="error") as server,
            ThreadPoolExecutor(4) as pool,
        ):
            sending = [pool.submit(_send_until_gone, server, f"{kill}.{i}") for i in range(4)]
            wait_until(lambda: metric(server.client, "feedback_total", result="recorded") >= 20)
            server.process.send_signal(9)
            accepted += [text for one in sending for text in one.result()]

    recorded = [one.text for one in Store(str(path)).feedback("tiny")]
    assert len(recorded) == len(set(recorded))
    assert len(accepted) >= 20 * kills - 4 * kills
    assert set(accepted) <= set(recorded)
