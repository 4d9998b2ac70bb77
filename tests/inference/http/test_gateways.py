"""What gateways send and read: `/classify` of vLLM, Semantic Router and ort-server, `/v1/classify` of lemonade."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docs.pages import REPOSITORY
from tests.inference.conftest import LABELS
from tests.inference.servers import Server, metric, serving
from tests.processes import free_port, wait_until

GUIDE = (REPOSITORY / "docs" / "gateways.md").read_text()
TEXT = "Oil prices rise"


@pytest.fixture(scope="module")
def client(model_folder: Path) -> Iterator[httpx.Client]:
    with serving(model_folder, max_batch_texts=3, max_text_chars=100) as client:
        yield client


def _predict(client: httpx.Client, text: str = TEXT) -> dict[str, Any]:
    return client.post("/predict", json={"text": text}).json()


def _best(scores: dict[str, float], num: int) -> dict[str, float]:
    return dict(sorted(scores.items(), key=lambda one: -one[1])[:num])


def test_vllm_s_clients_get_an_item_per_text_and_the_tokens_of_all(client: httpx.Client, model_folder: Path) -> None:
    texts = [TEXT, "Goal!"]
    expected = [_predict(client, text) for text in texts]
    before = int(time.time())
    body = {"model": model_folder.name, "input": texts, "user": "someone", "priority": 0}
    answer = client.post("/classify", json=body, headers={"X-Request-ID": "mine"}).json()
    assert before <= answer.pop("created") <= time.time()
    num_tokens = sum(one["num_tokens"] for one in expected)
    assert answer == {
        "id": "classify-mine",
        "object": "list",
        "model": model_folder.name,
        "data": [
            {
                "index": i,
                "label": one["label"],
                "probs": [one["probabilities"][label] for label in LABELS],
                "num_classes": len(LABELS),
            }
            for i, one in enumerate(expected)
        ],
        "usage": {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }


def test_one_text_of_vllm_s_clients_is_a_list_of_one(client: httpx.Client) -> None:
    one, listed = (client.post("/classify", json={"input": given}).json()["data"] for given in (TEXT, [TEXT]))
    assert one == listed


def test_the_semantic_router_gets_every_label_once_with_scores_that_add_up_to_one(client: httpx.Client) -> None:
    answer = client.post("/classify", json={"inputs": TEXT}).json()
    assert all(list(one) == ["label", "score"] for one in answer)
    assert {one["label"]: one["score"] for one in answer} == _predict(client)["probabilities"]
    assert len(answer) == len(LABELS)
    assert sum(one["score"] for one in answer) == pytest.approx(1)


def test_ort_server_s_clients_get_labels_with_scores_all_or_the_best(client: httpx.Client) -> None:
    scores = _predict(client)["probabilities"]
    for top_k in (None, 0, 2):
        answer = client.post("/classify", json={"text": TEXT, "top_k": top_k}).json()
        assert answer == {"labels": _best(scores, top_k or len(LABELS))}


@pytest.mark.parametrize("name", ["input", "text"])
def test_lemonade_s_clients_get_labels_with_scores_and_the_model_s_name(
    client: httpx.Client, model_folder: Path, name: str
) -> None:
    scores = _predict(client)["probabilities"]
    for more, num in (({}, len(LABELS)), ({"top_k": 1, "model": model_folder.name}, 1)):
        answer = client.post("/v1/classify", json={name: TEXT, **more}).json()
        assert answer == {"object": "classification", "model": model_folder.name, "labels": _best(scores, num)}


@pytest.mark.parametrize(
    ("path", "body", "code", "line"),
    [
        ("/classify", {}, "invalid_request", "exactly one of input, inputs, text"),
        ("/classify", {"messages": [{"role": "user", "content": TEXT}]}, "invalid_request", "exactly one of"),
        ("/classify", {"input": TEXT, "inputs": TEXT}, "invalid_request", "exactly one of"),
        ("/classify", {"input": []}, "invalid_request", "at least 1 item"),
        ("/classify", {"input": [1, 2]}, "invalid_request", "valid string"),
        ("/classify", {"inputs": [TEXT]}, "invalid_request", "inputs: Input should be a valid string"),
        ("/classify", {"input": TEXT, "model": 5}, "invalid_request", "model: Input should be a valid string"),
        ("/classify", {"input": TEXT, "top_k": 1}, "invalid_request", "top_k goes with text"),
        ("/classify", {"input": TEXT, "use_activation": False}, "invalid_request", "use_activation"),
        ("/classify", {"input": TEXT, "add_special_tokens": False}, "invalid_request", "add_special_tokens"),
        ("/classify", {"input": TEXT, "truncate_prompt_tokens": 5}, "invalid_request", "should be -1"),
        ("/classify", {"input": [TEXT, " "]}, "blank_text", "input[1] is blank"),
        ("/classify", {"inputs": ""}, "blank_text", "inputs is blank"),
        ("/classify", {"input": [TEXT] * 4}, "too_many_texts", "input has 4 entries > maximum 3"),
        ("/classify", {"text": "a" * 101}, "text_too_long", "text has 101 characters > maximum 100"),
        ("/v1/classify", {}, "invalid_request", "exactly one of input, text"),
        ("/v1/classify", {"input": [TEXT]}, "invalid_request", "input: Input should be a valid string"),
        ("/v1/classify", {"input": TEXT, "top_k": 0}, "invalid_request", "top_k"),
        ("/v1/classify", {"text": " "}, "blank_text", "text is blank"),
    ],
)
def test_a_gateway_is_refused_with_400_in_one_line_of_openai_s_shape(
    client: httpx.Client, path: str, body: dict[str, Any], code: str, line: str
) -> None:
    before = metric(client, "requests_total", route=path, status="400")
    response = client.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert line in error.pop("message")
    request_id = response.headers["x-request-id"]
    assert error == {"type": code, "param": None, "code": 400, "request_id": request_id}
    assert "\n" not in response.text
    assert metric(client, "requests_total", route=path, status="400") == before + 1


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_a_gateway_that_asks_for_another_model_is_told_which_is_served(client: httpx.Client, path: str) -> None:
    response = client.post(path, json={"model": "another", "input": TEXT})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "no model of this name; tiny is served"
    assert response.json()["error"]["code"] == 404


def test_other_refusals_of_a_gateway_have_the_same_shape_and_their_own_status(model_folder: Path) -> None:
    with serving(model_folder, api_key="open sesame") as client:
        bearer = {"Authorization": "Bearer open sesame"}
        assert client.post("/classify", json={"inputs": TEXT}, headers=bearer).status_code == 200
        refused = client.post("/classify", json={"inputs": TEXT})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, 401)
        assert refused.json()["error"]["type"] == "unauthorized"


def test_the_openapi_document_has_the_gateways_routes_and_their_errors(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for path in ("/classify", "/v1/classify"):
        responses = document["paths"][path]["post"]["responses"]
        assert {"200", "400", "404", "413", "503"} <= set(responses)
        assert "422" not in responses
        for status in set(responses) - {"200"}:
            schema = responses[status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/GatewayError"}


def test_a_text_sent_to_the_wrong_route_is_sent_to_the_gateways(client: httpx.Client) -> None:
    message = client.post("/predict", json={"input": TEXT}).json()["error"]["message"]
    assert message.endswith("such a body goes to /classify")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_every_request_of_the_guide_gets_an_answer(client: httpx.Client) -> None:
    commands = re.findall(r"^curl .*localhost:7860.*$", GUIDE, re.MULTILINE)
    answers = []
    for command in commands:
        command = command.replace("localhost:7860", f"127.0.0.1:{client.base_url.port}")
        run = subprocess.run(f"{command} --fail", shell=True, capture_output=True, text=True, timeout=30)
        assert run.returncode == 0, command
        answers.append(json.loads(run.stdout))
    vllm, router, ort_server, lemonade = answers
    assert [one["index"] for one in vllm["data"]] == [0, 1]
    assert [one["label"] for one in router] == LABELS
    assert lemonade["labels"] == ort_server["labels"]
    assert len(lemonade["labels"]) == 2


def test_the_script_of_the_guide_answers_lemonade_as_its_ort_server_would(model_folder: Path, tmp_path: Path) -> None:
    (script,) = re.findall(r"^```bash\n(#!/bin/sh\n.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    path, port, log = tmp_path / "ort-server", free_port(), tmp_path / "log"
    path.write_text(script.replace("/srv/news", str(model_folder)))
    path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with log.open("w") as output:
        # As lemonade starts it, which then asks /health until it gets 200.
        command = [str(path), "--model-path", str(tmp_path), "--port", str(port)]
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output, text=True)
    server = Server(process, port, log)
    try:
        wait_until(server.is_ready, 60)
        assert server.client.get("/health").status_code == 200
        answer = server.client.post("/classify", json={"text": TEXT, "top_k": 1}).json()
        assert answer["labels"].keys() <= set(LABELS)
        assert len(answer["labels"]) == 1
        assert server.stop() == 0
    finally:
        server.client.close()
        process.kill()
        process.wait()
