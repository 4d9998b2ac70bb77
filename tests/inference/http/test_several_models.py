"""Several models in one server: each answers under its name, and one that fails leaves the others alone."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request

from inference.app import create_app
from inference.batching.served_model import Served
from inference.batching.served_models import ServedModels, has_several, paths_of
from inference.engines.answering import OneLabelAnswering
from inference.engines.base import TokenBatch
from inference.engines.model_loader import ModelLoader
from inference.errors import SettingsError, WorkerDownError
from inference.http.routes import explain
from inference.http.routes.answers import model_named
from inference.http.server_parts import Parts
from inference.http.workers import num_workers
from inference.metrics import ServerMetrics
from inference.settings import Settings
from tests.inference.cascades import make_artefact_with_head
from tests.inference.servers import ThreadedServer, metric, serving
from tests.inference.stand_in_model import StandInModel, text_of
from tests.processes import wait_until

TEXT = {"text": "Oil prices rise"}
LINES = {"content-type": "application/x-ndjson"}


def load(path: Path, engine: str) -> ModelLoader:
    """A stand-in whose labels begin with the name of its folder."""
    model = StandInModel(path)
    model.labels = [f"{path.name} {label}" for label in model.labels]
    model.answering = OneLabelAnswering(model.labels)
    return model


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A folder of two models, beside which there is something else."""
    folder = tmp_path / "models"
    for name in ("news", "spam"):
        (folder / name).mkdir(parents=True)
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(model_folder / file, folder / name)
    (folder / "news.run").mkdir()
    (folder / "notes.txt").touch()
    return folder


@contextmanager
def serving_several(
    checkpoint: Path | str, load_model: Callable[[Path, str], ModelLoader] = load, **settings: Any
) -> Iterator[httpx.Client]:
    app = create_app(Settings(model_checkpoint=Path(checkpoint), **settings), load_model)
    with ThreadedServer(app).running() as client:
        wait_until(lambda: all("still loading" not in one.get("error", "") for one in client.get("/models").json()))
        yield client


@pytest.fixture
def client(folder: Path) -> Iterator[httpx.Client]:
    with serving_several(f"{folder / 'spam'},{folder / 'news'}") as client:
        yield client


def test_models_are_named_one_by_one_or_by_their_folder(folder: Path, model_folder: Path, tmp_path: Path) -> None:
    def paths(checkpoint: Path | str) -> list[Path]:
        return paths_of(Settings(model_checkpoint=Path(checkpoint)))

    assert paths(folder) == [folder / "news", folder / "spam"]
    assert paths(f"{folder / 'spam'}, {folder / 'news'},") == [folder / "spam", folder / "news"]
    assert paths(model_folder) == [model_folder]
    assert paths(tmp_path / "nothing") == [tmp_path / "nothing"]
    with_comma = Path(shutil.copytree(model_folder, tmp_path / "with,comma"))
    assert paths(with_comma) == [with_comma]
    many = ",".join([str(folder / "news")] * 300)
    assert len(paths(many)) == 300
    # A damaged model with an exported artefact inside is no folder of models.
    damaged = Path(shutil.copytree(model_folder, tmp_path / "damaged"))
    shutil.copytree(model_folder, damaged / "native")
    (damaged / "config.json").unlink()
    assert not has_several(Settings(model_checkpoint=damaged))


@pytest.mark.parametrize(
    ("more", "names", "line"),
    [
        ({}, ("news", "other/news"), "have the same name; rename a folder"),
        ({}, ("news", "not plain"), "must be letters, digits"),
        ({"model_name": "mine"}, ("news", "spam"), "MODEL_NAME: it names a single model"),
        ({"model_weights": "new=2"}, ("news", "spam"), "'new': no model has this name; they are news, spam"),
        ({"model_weights": "news=fast"}, ("news", "spam"), "'news=fast': a weight is a number above 0"),
        ({"model_weights": "news=0"}, ("news", "spam"), "'news=0': a weight is a number above 0"),
        ({"model_weights": "news=2"}, ("news",), "MODEL_WEIGHTS: there is only one model"),
    ],
)
def test_models_that_cannot_be_told_apart_start_no_server(
    folder: Path, more: dict[str, str], names: tuple[str, ...], line: str
) -> None:
    checkpoint = Path(",".join(str(folder / name) for name in names))
    with pytest.raises(SettingsError, match=line) as error:
        create_app(Settings(model_checkpoint=checkpoint, **more))
    assert "\n" not in str(error.value)


def test_several_models_are_served_by_one_process(folder: Path) -> None:
    assert num_workers(Settings(model_checkpoint=folder)) == 1
    with pytest.raises(SettingsError, match="WORKERS 2: several models are served by one process"):
        num_workers(Settings(model_checkpoint=folder, workers=2))


def test_each_model_answers_under_its_name_on_every_route(client: httpx.Client) -> None:
    tensor = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["Oil prices rise"]}]}
    for name in ("spam", "news"):
        below = f"/models/{name}"
        answers = [
            client.post(f"{below}/predict", json=TEXT).json()["label"],
            client.post(f"{below}/predict/batch", json={"texts": ["Oil", "Goal!"]}).json()[1]["label"],
            client.post(f"{below}/explain", json=TEXT).json()["label"],
            client.post(f"{below}/hub", json={"inputs": "Goal!"}).json()[0][0]["label"],
            client.post("/hub", json={"inputs": "Goal!", "model": name}).json()[0][0]["label"],
            client.post("/classify", json={"input": "Goal!", "model": name}).json()["data"][0]["label"],
            *client.post("/v1/classify", json={"text": "Goal!", "model": name}).json()["labels"],
            client.post(f"/v2/models/{name}/infer", json=tensor).json()["outputs"][0]["data"][0],
            *client.get(below).json()["labels"],
        ]
        streamed = client.post(f"{below}/predict/batch", content=json.dumps(TEXT) + "\n", headers=LINES)
        answers.append(json.loads(streamed.text)["label"])
        assert {answer.split()[0] for answer in answers} == {name}
        assert client.get(f"/v2/models/{name}/ready").json() == {"name": name, "ready": True}


def test_what_names_no_model_is_answered_by_the_first_one(client: httpx.Client) -> None:
    answers = [
        client.post("/predict", json=TEXT).json()["label"],
        client.post("/hub", json={"inputs": "Goal!"}).json()[0][0]["label"],
        client.post("/classify", json={"input": "Goal!"}).json()["data"][0]["label"],
        *client.get("/model").json()["labels"],
        *client.get("/health").json()["labels"],
    ]
    assert {answer.split()[0] for answer in answers} == {"spam"}
    listed = client.get("/models").json()
    assert [(one["name"], one["default"], one["ready"], one["engine"]) for one in listed] == [
        ("spam", True, True, "stand-in"),
        ("news", False, True, "stand-in"),
    ]


def test_an_unknown_name_is_answered_with_the_names_that_there_are(client: httpx.Client) -> None:
    for path, body in (
        ("/models/other/predict", TEXT),
        ("/models/other/predict/batch", {"texts": ["Oil"]}),
        ("/models/other/explain", TEXT),
        ("/hub", {"inputs": "Oil", "model": "other"}),
        ("/classify", {"input": "Oil", "model": "other"}),
    ):
        response = client.post(path, json=body)
        assert response.status_code == 404
        assert response.json()["error"]["message"] == "no model of this name; spam, news are served"
    assert client.post("/models/other/predict/batch", content=json.dumps(TEXT), headers=LINES).status_code == 404
    assert client.get("/models/other").json()["error"]["code"] == "not_found"
    assert client.get("/v2/models/other/ready").json() == {"error": "no model of this name; spam, news are served"}


def test_of_many_names_only_some_are_listed(folder: Path, model_folder: Path) -> None:
    for number in range(20):
        shutil.copytree(folder / "news", folder / f"model-{number:02}")
    with serving_several(folder) as client:
        message = client.get("/models/other").json()["error"]["message"]
    assert message.startswith("no model of this name; model-00, model-01")
    assert len(message) < 200


def test_a_model_that_does_not_load_leaves_the_others_and_the_server_ready(folder: Path) -> None:
    (folder / "spam" / "tokenizer.json").unlink()
    with serving_several(folder) as client:
        assert client.get("/readyz").status_code == 200
        assert client.post("/predict", json=TEXT).status_code == 200
        news, spam = client.get("/models").json()
        assert news["ready"]
        assert not spam["ready"]
        assert "spam: lacks tokenizer.json" in spam["error"]
        assert str(folder) not in spam["error"]
        refused = client.post("/models/spam/predict", json=TEXT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
        assert client.get("/v2/models/spam/ready").status_code == 503
        assert metric(client, "model_ready", model_name="spam") == 0
        assert metric(client, "model_ready", model_name="news") == 1


def test_without_its_default_model_the_server_is_not_ready_though_others_answer(folder: Path) -> None:
    (folder / "news" / "tokenizer.json").unlink()
    with serving_several(folder) as client:
        assert "news: lacks tokenizer.json" in client.get("/readyz").json()["reason"]
        assert client.post("/models/spam/predict", json=TEXT).status_code == 200


def test_the_server_is_not_ready_before_all_models_have_been_tried(folder: Path) -> None:
    seen: list[str] = []

    def load_and_look(path: Path, engine: str) -> ModelLoader:
        seen.append(app.state.parts.unready or "ready")
        return load(path, engine)

    app = create_app(Settings(model_checkpoint=folder), load_and_look)
    with ThreadedServer(app).running() as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
    assert ["still loading" in one for one in seen] == [True, True]
    assert "spam" in seen[1]


def test_a_reload_replaces_what_loads_and_says_what_does_not(folder: Path) -> None:
    with serving_several(folder, api_key="key") as client:
        headers = {"X-API-Key": "key"}
        before = [one["revision"] for one in client.get("/models").json()]
        (folder / "news" / "tokenizer.json").touch()
        (folder / "spam" / "tokenizer.json").rename(folder / "elsewhere")
        response = client.post("/admin/reload", headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (422, "model_refused")
        assert "lacks tokenizer.json" in response.json()["error"]["message"]
        after = [one["revision"] for one in client.get("/models").json()]
        assert after[0] != before[0]
        assert after[1] == before[1]
        assert client.post("/models/spam/predict", json=TEXT, headers=headers).status_code == 200


def test_what_is_counted_about_a_model_has_its_name(client: httpx.Client) -> None:
    for name, times in (("spam", 1), ("news", 2)):
        for _ in range(times):
            client.post(f"/models/{name}/predict", json=TEXT)
    assert metric(client, "confidence_count", model_name="spam") == 1
    assert metric(client, "confidence_count", model_name="news") == 2
    assert metric(client, "confidence_count") == 3  # and nothing without a name
    assert metric(client, "requests_total", route="/models/{name}/predict", status="200") == 3
    assert metric(client, "model_info", name="news", model_name="news") == 1


def test_a_server_of_one_model_has_it_under_its_name_too_and_counts_without_it(model_folder: Path) -> None:
    with serving(model_folder) as client:
        (listed,) = client.get("/models").json()
        assert (listed["name"], listed["default"], listed["ready"]) == (model_folder.name, True, True)
        plain, named = (client.post(path, json=TEXT).json() for path in ("/predict", "/models/tiny/predict"))
        assert plain == named
        assert client.post("/models/other/predict", json=TEXT).status_code == 404
        # Clients of other servers send any name.
        assert client.post("/hub", json={"inputs": "Oil", "model": "other"}).status_code == 200
        assert "model_name" not in client.get("/metrics").text


def test_a_flood_of_texts_for_one_model_keeps_none_for_another_out(folder: Path) -> None:
    def load_slow(path: Path, engine: str) -> ModelLoader:
        return StandInModel(path, seconds_per_token=0.02)

    settings = Settings(model_checkpoint=folder, max_wait_seconds=0.5, max_batch_tokens=24)
    server = ThreadedServer(create_app(settings, load_slow))
    statuses: Counter[int] = Counter()
    is_over = threading.Event()

    def flood(first: int) -> None:
        for number in itertools.count(first, 10):
            status = client.post("/predict", json={"text": text_of(number)}).status_code
            statuses[status] += 1
            if is_over.wait(0.02 if status == 503 else 0):
                break

    with server.running() as client, ThreadPoolExecutor(10) as pool:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        flooding = [pool.submit(flood, number) for number in range(10)]
        try:
            # New texts each time: what is remembered is answered also while the queue is full.
            others = (text_of(number) for number in itertools.count(10_000))
            wait_until(lambda: client.post("/predict", json={"text": next(others)}).status_code == 503)
            # The gate cannot know which model a body names, so it leaves both to the route.
            wait_until(lambda: client.post("/hub", json={"inputs": next(others)}).status_code == 503)
            assert client.post("/hub", json={"inputs": "Oil", "model": "spam"}).status_code == 200
            assert client.post("/models/spam/predict", json=TEXT).status_code == 200
        finally:
            is_over.set()
        for one in flooding:
            one.result()
    assert statuses.keys() == {200, 503}


KEY = {"X-API-Key": "key"}


def _copy(folder: Path, name: str) -> None:
    shutil.copytree(folder / "spam", folder / name)


def test_a_model_is_put_under_a_new_name_replaced_and_removed_while_the_server_runs(folder: Path) -> None:
    _copy(folder, "topics-1")
    with serving_several(f"{folder / 'news'}", models_folder=folder, api_key="key") as client:
        client.headers.update(KEY)
        assert [one["name"] for one in client.get("/models").json()] == ["news"]
        for path in ("topics-1", str(folder / "spam")):
            described = client.put("/models/topics", json={"path": path})
            assert (described.status_code, described.json()["name"]) == (200, Path(path).name)
            label = client.post("/models/topics/predict", json=TEXT).json()["label"]
            assert label.startswith(Path(path).name)
        assert client.put("/models/news", json={"path": "spam"}).status_code == 200  # the default one
        assert client.post("/predict", json=TEXT).json()["label"].startswith("spam")
        assert metric(client, "model_reloads_total", model_name="topics", result="served") == 2
        assert client.delete("/models/topics").status_code == 204
        assert client.post("/models/topics/predict", json=TEXT).status_code == 404
        assert [one["name"] for one in client.get("/models").json()] == ["news"]
        assert 'model_name="topics"' not in client.get("/metrics").text


def test_what_is_put_there_has_to_lie_in_the_folder_of_models(folder: Path, model_folder: Path) -> None:
    (folder / "out").symlink_to(model_folder)
    (folder / "in").symlink_to("spam")
    (folder / "round").symlink_to("round")
    _copy(folder, "leaking")
    (folder / "leaking" / "config.json").unlink()
    (folder / "leaking" / "config.json").symlink_to(model_folder / "config.json")
    with serving_several(folder / "news", models_folder=folder, api_key="key") as client:
        client.headers.update(KEY)
        outside = (".", "..", "../models", str(model_folder), "out", "round", "leaking", "nothing", "notes.txt", "a\0b")
        for path in (*outside, "a" * 4000):
            response = client.put("/models/topics", json={"path": path})
            assert (response.status_code, response.json()["error"]["code"]) == (422, "model_refused")
            assert "is no folder in MODELS_FOLDER, or has symbolic links" in response.json()["error"]["message"]
        assert client.put("/models/topics", json={"path": "in"}).status_code == 200
        for name in ("not%20plain", ".hidden", "%C3%A9"):
            response = client.put(f"/models/{name}", json={"path": "spam"})
            assert (response.status_code, response.json()["error"]["code"]) == (422, "model_refused")
        for body in ({}, {"path": 5}, {"path": ""}, {"path": "spam", "more": 1}):
            response = client.put("/models/topics", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")


def test_a_model_that_does_not_load_takes_no_place(folder: Path) -> None:
    _copy(folder, "damaged")
    (folder / "damaged" / "tokenizer.json").unlink()
    with serving_several(f"{folder / 'news'},{folder / 'spam'}", models_folder=folder, api_key="key") as client:
        client.headers.update(KEY)
        for name in ("spam", "topics"):
            response = client.put(f"/models/{name}", json={"path": "damaged"})
            assert (response.status_code, response.json()["error"]["code"]) == (422, "model_refused")
            assert "lacks tokenizer.json" in response.json()["error"]["message"]
        assert client.post("/models/spam/predict", json=TEXT).json()["label"].startswith("spam")
        assert client.post("/models/topics/predict", json=TEXT).status_code == 404
        assert client.get("/readyz").status_code == 200
        assert client.post("/admin/reload").status_code == 200  # of what was served before


def test_models_are_changed_only_with_a_key_and_from_a_folder(folder: Path) -> None:
    one_by_one = f"{folder / 'news'},{folder / 'spam'}"
    for checkpoint, settings, headers, status, line in (
        (folder, {}, {}, 403, "needs a key"),
        (folder, {"api_key": "key"}, {}, 401, "send the API key"),
        (folder, {"api_key": "key"}, {"X-API-Key": "wrong"}, 401, "send the API key"),
        (one_by_one, {"api_key": "key"}, KEY, 403, "start it with MODELS_FOLDER"),
    ):
        with serving_several(checkpoint, **settings) as client:
            for response in (
                client.put("/models/spam", json={"path": "news"}, headers=headers),
                client.delete("/models/spam", headers=headers),
            ):
                assert response.status_code == status
                assert line in response.json()["error"]["message"]
            assert len(client.get("/models").json()) == 2


def test_the_default_model_and_one_that_is_not_there_are_not_removed(folder: Path) -> None:
    with serving_several(folder, api_key="key") as client:
        response = client.delete("/models/news", headers=KEY)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
        assert client.delete("/models/other", headers=KEY).status_code == 404
        assert client.post("/predict", json=TEXT, headers=KEY).status_code == 200


def test_a_folder_of_models_that_is_not_there_starts_no_server(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"MODELS_FOLDER: .* is no folder; make it, or unset it"):
        create_app(Settings(model_checkpoint=folder / "news", models_folder=folder / "nothing"))


def test_while_a_model_is_loaded_no_other_change_begins(folder: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    def load_later(path: Path, engine: str) -> ModelLoader:
        if path.name == "spam":
            begun.set()
            assert go.wait(30)
        return load(path, engine)

    with (
        serving_several(folder / "news", load_later, models_folder=folder, api_key="key") as client,
        ThreadPoolExecutor(1) as pool,
    ):
        client.headers.update(KEY)
        put = pool.submit(client.put, "/models/spam", json={"path": "spam"})
        assert begun.wait(30)
        for response in (
            client.put("/models/spam", json={"path": "news"}),
            client.delete("/models/spam"),
            client.post("/admin/reload"),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (409, "reload_running")
        assert client.post("/models/spam/predict", json=TEXT).status_code == 404
        go.set()
        assert put.result().status_code == 200


def test_a_hundred_changes_under_load_lose_no_request(folder: Path) -> None:
    names = ("spam", "topics-1")
    _copy(folder, names[1])
    statuses: list[int] = []
    ended = threading.Event()

    def ask_on(number: int, address: httpx.URL) -> None:
        with httpx.Client(base_url=address, headers=KEY, timeout=60) as client:
            for i in range(100_000):
                body = {"text": text_of(1000 * number + i)}
                statuses.append(client.post(f"/models/{('spam', 'news')[i % 2]}/predict", json=body).status_code)
                if ended.is_set():
                    return

    with serving_several(folder, api_key="key") as client, ThreadPoolExecutor(8) as pool:
        client.headers.update(KEY)
        asking = [pool.submit(ask_on, number, client.base_url) for number in range(8)]
        try:
            for number in range(100):
                wait_until(lambda at=20 * number: len(statuses) > at)
                assert client.put("/models/spam", json={"path": names[number % 2]}).status_code == 200
        finally:
            ended.set()
        for one in asking:
            one.result()
    assert len(statuses) > 1900
    assert set(statuses) == {200}


def test_the_lines_of_a_stream_that_outlives_its_model_are_told_so(folder: Path) -> None:
    with serving_several(folder, api_key="key") as client, httpx.Client(base_url=client.base_url, headers=KEY) as other:

        def lines() -> Iterator[bytes]:
            yield b'{"text": "Goal!"}\n'
            wait_until(lambda: metric(other, "predictions_total", model_name="spam") == 1)
            assert other.delete("/models/spam").status_code == 204
            yield b'{"text": "Goal!"}\n{"text": " "}\n'

        headers = {**LINES, **KEY}
        answers = client.post("/models/spam/predict/batch", content=lines(), headers=headers).text.splitlines()
    first, second, third = map(json.loads, answers)
    assert first["label"].startswith("spam")
    assert second["error"]["code"] == third["error"]["code"] == "model_unavailable"
    assert "spam: the model was removed" in second["error"]["message"]


def test_models_on_one_encoder_answer_as_each_alone_while_others_come_and_go(
    model_folder: Path, tmp_path: Path
) -> None:
    paths = {name: make_artefact_with_head(model_folder, tmp_path / name, i) for i, name in enumerate("abc")}
    texts = [text_of(number, 1 + number % 6) for number in range(12)]
    alone = {name: ModelLoader(path).predict_batch(texts) for name, path in paths.items()}
    settings = Settings(
        model_checkpoint=Path(f"{paths['a']},{paths['b']}"), models_folder=tmp_path, engine="native", api_key="key"
    )
    server, is_over = ThreadedServer(create_app(settings)), threading.Event()
    before = set(threading.enumerate())

    def ask(name: str, client: httpx.Client) -> int:
        count = 0
        while not is_over.is_set():
            place = count % len(texts)
            answer = client.post(f"/models/{name}/predict", json={"text": texts[place]}, headers=KEY).json()
            assert answer["probabilities"] == alone[name][place]["probabilities"]
            count += 1
        return count

    with server.running() as client, ThreadPoolExecutor(4) as pool:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        asking = [pool.submit(ask, name, client) for name in "abab"]
        try:
            for _ in range(3):
                assert client.put("/models/c", json={"path": "c"}, headers=KEY).status_code == 200
                answers = client.post("/models/c/predict/batch", json={"texts": texts}, headers=KEY).json()
                assert [one["probabilities"] for one in answers] == [one["probabilities"] for one in alone["c"]]
                models = [one.require().model for one in server.parts.models.all.values()]
                assert len({model.encoder for model in models}) == 1
                started = set(threading.enumerate()) - before
                assert sum(one.name == "tokenize" for one in started) == 1
                assert client.delete("/models/c", headers=KEY).status_code == 204
            assert client.put("/models/b", json={"path": "b"}, headers=KEY).status_code == 200
            batch = TokenBatch.of([[1, 2, 3]])
            wait_until(lambda: len(models[0].encoder.read_all(batch)) == 2)  # the heads that left take no time
        finally:
            is_over.set()
        assert all(one.result() > 0 for one in asking)


def test_a_load_that_is_cancelled_while_it_joins_an_encoder_leaves_it_again(folder: Path) -> None:
    has_begun, may_end, has_left = threading.Event(), threading.Event(), threading.Event()

    class Sharing(StandInModel):
        def share_encoder(self, others: object) -> None:
            has_begun.set()
            assert may_end.wait(30)

        def leave_encoder(self) -> None:
            has_left.set()

    async def run() -> None:
        settings = Settings(model_checkpoint=folder)
        models = ServedModels(settings, ServerMetrics(), lambda path, engine: Sharing(path))
        loading = asyncio.create_task(models.load())
        assert await asyncio.to_thread(has_begun.wait, 30)
        loading.cancel()
        await asyncio.wait([loading])
        may_end.set()
        assert await asyncio.to_thread(has_left.wait, 30)
        await models.close()

    asyncio.run(run())


def test_an_explanation_is_of_the_model_that_was_named_even_if_it_is_replaced_meanwhile(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    classify_some, calls = explain.classify_some, []

    async def replaced_at_first(request: Request, parts: Parts, served: Served, *rest: Any, **named: Any) -> list[Any]:
        calls.append(served)
        if len(calls) == 1:
            model_named(parts, "news")._current = copy.copy(served)
            raise WorkerDownError("the classifier was closed before this text was answered")
        return await classify_some(request, parts, served, *rest, **named)

    monkeypatch.setattr(explain, "classify_some", replaced_at_first)
    answer = client.post("/models/news/explain", json=TEXT)
    assert (answer.status_code, len(calls)) == (200, 2)
    assert answer.json()["label"].startswith("news ")
