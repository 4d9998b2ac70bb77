"""A candidate in shadow behind the server: clients notice nothing of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import httpx
import pytest

from inference.app import create_app
from inference.engines import native
from inference.engines.model_loader import ModelLoader
from inference.observing.store import Store
from inference.settings import Settings
from loop.candidates import SHADOW, choose
from tests.inference.cascades import make_artefact_with_head
from tests.inference.conftest import TEXTS
from tests.inference.servers import ThreadedServer, metric, stand_in_server
from tests.processes import wait_until

needs_native = pytest.mark.skipif(not native.is_supported()[0], reason=native.is_supported()[1])
KEY = "open sesame"


def _compared(client: httpx.Client) -> float:
    return metric(client, "shadow_texts_total", result="same") + metric(client, "shadow_texts_total", result="differs")


@needs_native
def test_every_way_to_ask_gets_the_answers_of_the_live_model_and_both_are_compared(
    model_folder: Path, tmp_path: Path
) -> None:
    live, candidate = (make_artefact_with_head(model_folder, tmp_path / name, seed) for seed, name in enumerate("ab"))
    old, new = ModelLoader(live), ModelLoader(candidate)
    server = ThreadedServer(
        create_app(Settings(model_checkpoint=live, shadow=candidate, shadow_share=1.0, log_level="error"))
    )
    with server.running() as client:
        wait_until(lambda: "shadow" in client.get("/model").json())
        expected = [old.predict(text) for text in TEXTS]
        single = [client.post("/predict", json={"text": text}).json() for text in TEXTS]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
        stream = client.post("/predict/batch", content=lines, headers={"content-type": "application/x-ndjson"})
        batch = client.post("/predict/batch", json={"texts": TEXTS}).json()
        for answers in (single, batch, [json.loads(line) for line in stream.text.splitlines()]):
            assert [one["probabilities"] for one in answers] == [one["probabilities"] for one in expected]
        client.post("/explain", json={"text": TEXTS[0]})
        # Of what one machine reads at once, a part may be dropped.
        drawn = 3 * len(TEXTS)
        wait_until(lambda: metric(client, "shadow_texts_total") == drawn)
        assert _compared(client) >= len(TEXTS)
        shadow = client.get("/model").json()["shadow"]
        assert shadow["revision"] == new.info["revision"]
        assert shadow["texts"] == _compared(client)
        if shadow["texts"] == drawn:
            same = sum(new.predict(text)["label"] == old.predict(text)["label"] for text in TEXTS)
            assert shadow["agreement"] == pytest.approx(same / len(TEXTS))
        assert metric(client, "predictions_total") == drawn + 1  # the explained text has an answer too
        assert metric(client, "worker_failures_total") == 0


@needs_native
def test_what_a_candidate_answers_otherwise_is_kept_and_asked_about_if_texts_may_be_kept(
    model_folder: Path, tmp_path: Path
) -> None:
    live, candidate = (make_artefact_with_head(model_folder, tmp_path / name, seed) for seed, name in enumerate("ab"))
    path = tmp_path / "observed.sqlite"
    settings = Settings(model_checkpoint=live, shadow=candidate, shadow_share=1.0, observe=str(path), keep_texts="1h")
    server = ThreadedServer(create_app(settings))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    with server.running() as client:
        wait_until(lambda: "shadow" in client.get("/model").json())
        for text in TEXTS:
            before = _compared(client)
            client.post("/predict/batch", json={"texts": [TEXTS[0], text]})
            wait_until(lambda before=before: _compared(client) == before + 2)
        client.post("/predict/batch", content=lines, headers={"content-type": "application/x-ndjson"})

    store = Store(str(path))
    [model] = store.models()
    kept = {one.id: one for one in store.texts(model)}
    shadows = store.shadows(model)
    old, new = ModelLoader(live), ModelLoader(candidate)
    assert len(shadows) >= 2 * len(TEXTS)
    for one in shadows:
        assert (one.text, one.revision) == (kept[one.id].text, new.info["revision"])
        assert (kept[one.id].label, one.label) == (old.predict(one.text)["label"], new.predict(one.text)["label"])
    differing = {one.text for one in shadows if one.label != kept[one.id].label}
    drawn = {one.text for one in kept.values() if one.uniform}
    asked = choose(list(kept.values()), [], 10 * len(TEXTS), shadows=shadows)
    assert {one.text for one in asked if one.why == SHADOW} == differing - drawn
    store.close()


@pytest.fixture
def candidate(model_folder: Path, tmp_path: Path) -> Path:
    (tmp_path / "candidate").mkdir()
    shutil.copy(model_folder / "tokenizer.json", tmp_path / "candidate")
    os.utime(tmp_path / "candidate" / "tokenizer.json", ns=(1, 1))
    return tmp_path / "candidate"


def test_several_workers_have_the_candidate_in_shadow_also_after_a_reload(
    model_folder: Path, candidate: Path, tmp_path: Path
) -> None:
    settings = {"SHADOW": str(candidate), "SHADOW_SHARE": "100%", "API_KEY": KEY, "WORKERS": "2"}
    with stand_in_server(model_folder, tmp_path, 0.0, **settings) as server:
        for _ in range(2):
            before = _compared(server.client)
            served = server.client.get("/model").json()

            def compares(before: float = before) -> bool:
                assert server.client.post("/predict", json={"text": "oil prices rise"}).status_code == 200
                return _compared(server.client) > before

            wait_until(compares)
            (shadow,) = filter(None, [server.client.get("/model").json().get("shadow")])
            assert shadow["revision"] == f"{1:012x}" != served["revision"]
            assert server.client.post("/admin/reload").status_code == 200


def test_a_candidate_that_does_not_load_is_one_line_in_the_log_and_the_server_serves(
    model_folder: Path, tmp_path: Path
) -> None:
    with stand_in_server(model_folder, tmp_path, 0.0, SHADOW=str(tmp_path / "nothing")) as server:
        wait_until(lambda: "nothing is in shadow" in server.log())
        assert server.client.post("/predict", json={"text": "oil prices rise"}).status_code == 200
        assert "shadow" not in server.client.get("/model").json()
        (line,) = [json.loads(line) for line in server.log().splitlines() if "in shadow" in line]
        assert "lacks tokenizer.json" in line["message"]


def test_the_promoted_model_is_not_in_shadow_of_itself(candidate: Path, tmp_path: Path) -> None:
    with stand_in_server(candidate, tmp_path, 0.0, SHADOW=str(candidate)) as server:
        wait_until(lambda: "it is the model that is served" in server.log())
        assert server.client.post("/predict", json={"text": "oil prices rise"}).status_code == 200
