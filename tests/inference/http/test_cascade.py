"""A cascade behind the server: one model to its clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.model_folder import SMALL_FOLDER
from inference.app import create_app
from inference.batching.audit import Audit
from inference.engines import native
from inference.engines.model_loader import ModelLoader
from inference.http.routes import explain
from inference.http.routes.answers import classify_some
from inference.settings import Settings
from tests.docs.pages import REPOSITORY
from tests.inference.cascades import make_artefact, make_cascade
from tests.inference.servers import ThreadedServer, metric

pytestmark = pytest.mark.skipif(not native.is_supported()[0], reason=native.is_supported()[1])
EASY = "The striker scored twice as the home side won the cup final"
HARD = "Apple sues a football club"
LONG = "The striker scored twice. " * 200  # more than the small model reads


@pytest.fixture(scope="module")
def folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cascade")
    big = make_artefact(model_folder, folder / "big")
    return make_cascade(big, REPOSITORY / "checkpoints" / "news", folder / "cascade", threshold=0.9)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    with (
        pytest.MonkeyPatch.context() as patch,
        ThreadedServer(create_app(Settings(model_checkpoint=folder, log_level="error"))).running() as client,
    ):
        patch.setattr(Audit, "draws", lambda *_, **__: False)
        yield client


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, ModelLoader]:
    model = ModelLoader(folder)
    assert model.cascade is not None
    model.cascade = None
    return {"big": model, "small": ModelLoader(folder / SMALL_FOLDER)}


@pytest.mark.parametrize(("text", "model"), [(EASY, "small"), (HARD, "big"), (LONG, "big")])
def test_a_text_gets_the_answer_of_the_model_that_it_is_for(
    client: httpx.Client, alone: dict[str, ModelLoader], text: str, model: str
) -> None:
    before = metric(client, "cascade_texts_total", model=model)
    answer = client.post("/predict", json={"text": text}).json()
    assert answer["probabilities"] == alone[model].predict(text)["probabilities"]
    assert metric(client, "cascade_texts_total", model=model) == before + 1


def test_lists_and_streams_mix_both(client: httpx.Client, alone: dict[str, ModelLoader]) -> None:
    texts = [EASY, HARD, LONG, "Goal!", "Oil prices rise"] * 5
    answers = client.post("/predict/batch", json={"texts": texts}).json()
    assert [one["label"] for one in answers] == [
        client.post("/predict", json={"text": t}).json()["label"] for t in texts
    ]
    lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
    stream = client.post("/predict/batch", content=lines, headers={"content-type": "application/x-ndjson"})
    assert len(stream.text.splitlines()) == len(texts)
    for line, answer in zip(stream.text.splitlines(), answers, strict=True):
        assert f'"label":"{answer["label"]}"' in line.replace(": ", ":")


@pytest.mark.parametrize(("text", "model"), [(EASY, "small"), (HARD, "big")])
def test_the_model_that_answers_explains(
    client: httpx.Client, alone: dict[str, ModelLoader], text: str, model: str
) -> None:
    found = client.post("/explain", json={"text": text}).json()
    label, words = found["label"], text.split()
    whole = alone[model].predict(text)["probabilities"][label]
    without = [alone[model].predict(" ".join(words[:i] + words[i + 1 :])) for i in range(len(words))]
    expected = [whole - one["probabilities"][label] for one in without]
    assert [one["weight"] for one in found["words"]] == pytest.approx(expected, abs=1e-9)


def test_the_model_page_says_that_two_answer_and_what_is_promised(client: httpx.Client) -> None:
    model = client.get("/model").json()
    assert model["cascade"]["threshold"] == metric(client, "cascade_threshold") == 0.9
    assert model["cascade"]["max_disagreement"] == 0.005
    assert model["cascade"]["small"]["name"]
    assert metric(client, "cascade_tightened") == 0


def test_a_promise_that_the_cascade_was_not_calibrated_for_is_refused(client: httpx.Client) -> None:
    refused = client.post("/predict", json={"text": EASY, "max_error": 0.02})
    assert refused.status_code == 422
    assert refused.json()["error"]["code"] == "no_guarantee"


def test_max_batch_tokens_must_hold_a_text_of_either_model(folder: Path) -> None:
    app = create_app(Settings(model_checkpoint=folder, log_level="error", max_batch_tokens=32))
    with ThreadedServer(app).running() as client:
        assert "MAX_BATCH_TOKENS 32" in client.get("/health").json()["error"]


def test_a_reload_between_the_answer_and_its_explanation_loses_no_request(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    reloads = []

    async def then_reload(request: Any, parts: Any, *rest: Any, **more: Any) -> Any:
        answers = await classify_some(request, parts, *rest, **more)
        if not reloads:
            reloads.append(await parts.served_model.load())
            await asyncio.wait(parts.served_model._draining)  # the model before has ended
        return answers

    monkeypatch.setattr(explain, "classify_some", then_reload)
    response = client.post("/explain", json={"text": HARD})
    assert response.status_code == 200
    assert len(response.json()["words"]) == len(HARD.split())
    assert reloads
