from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.inference.servers import serving

http = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http], of the dev extra")


@pytest.fixture(scope="module")
def client(model_folder: Path) -> Iterator[httpx.Client]:
    with serving(model_folder, max_batch_texts=8) as client:
        yield client


@pytest.fixture(scope="module")
def hub(client: httpx.Client) -> InferenceClient:
    return InferenceClient(base_url=f"{client.base_url}/hub", token="any")


@pytest.fixture(scope="module")
def triton(client: httpx.Client) -> Any:
    return http.InferenceServerClient(f"127.0.0.1:{client.base_url.port}")


def _predict(client: httpx.Client, text: str) -> dict[str, float]:
    return client.post("/predict", json={"text": text}).json()["probabilities"]


def test_the_hub_client_gets_all_labels_the_best_first(client: httpx.Client, hub: InferenceClient) -> None:
    expected = sorted(_predict(client, "Oil prices rise").items(), key=lambda one: -one[1])
    found = hub.text_classification("Oil prices rise")
    assert [(one.label, one.score) for one in found] == expected


def test_the_hub_client_may_ask_for_fewer_labels_and_other_scores(client: httpx.Client, hub: InferenceClient) -> None:
    softmax = {one.label: one.score for one in hub.text_classification("Oil prices rise")}
    best = hub.text_classification("Oil prices rise", top_k=1)
    assert [one.score for one in best] == [max(softmax.values())]
    none = {one.label: one.score for one in hub.text_classification("Oil prices rise", function_to_apply="none")}
    total = sum(math.exp(one) for one in none.values())
    assert {label: math.exp(one) / total for label, one in none.items()} == pytest.approx(softmax)
    sigmoid = {one.label: one.score for one in hub.text_classification("Oil prices rise", function_to_apply="sigmoid")}
    assert sigmoid == pytest.approx({label: 1 / (1 + math.exp(-one)) for label, one in none.items()})


def test_the_hub_face_takes_lists_and_ignores_options_of_other_servers(client: httpx.Client) -> None:
    body = {"inputs": ["Oil prices", "Goal!"], "options": {"wait_for_model": True}, "parameters": {"top_k": 2, "x": 1}}
    answer = client.post("/hub", json=body).json()
    assert [len(scores) for scores in answer] == [2, 2]
    for refused in ({"inputs": []}, {"inputs": ["a"] * 9}, {"inputs": ["a", " "]}, {"inputs": 5}, {}):
        assert client.post("/hub", json=refused).status_code == 422


def test_the_hub_client_is_refused_what_only_models_of_other_tasks_can_answer(
    client: httpx.Client, hub: InferenceClient
) -> None:
    with pytest.raises(HfHubHTTPError, match="candidate_labels belongs to zero-shot classification"):
        hub.zero_shot_classification("Oil prices rise", ["good", "bad"])
    with pytest.raises(HfHubHTTPError, match="aggregation_strategy belongs to token classification"):
        hub.token_classification("Oil prices rise", aggregation_strategy="simple")
    for parameters in (None, {}, {"candidate_labels": None, "top_k": None}):
        assert client.post("/hub", json={"inputs": "Goal!", "parameters": parameters}).status_code == 200


@pytest.mark.parametrize("end", ["hub", "hub/"])
def test_the_hub_client_is_told_its_address_and_may_end_it_with_a_slash(client: httpx.Client, end: str) -> None:
    assert InferenceClient(base_url=f"{client.base_url}/{end}").text_classification("Goal!")
    with pytest.raises(HfHubHTTPError, match="take /hub as their base_url"):
        InferenceClient(base_url=str(client.base_url)).text_classification("Goal!")


def test_the_hub_client_shows_why_it_was_refused(hub: InferenceClient) -> None:
    for blank in ("   ", "\u200b\u200d\ufeff"):
        with pytest.raises(HfHubHTTPError, match="inputs is blank"):
            hub.text_classification(blank)


def test_triton_s_client_finds_server_and_model_ready_and_described(triton: Any, model_folder: Path) -> None:
    name = model_folder.name
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready(name)
    assert not triton.is_model_ready("another")
    assert triton.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    metadata = triton.get_model_metadata(name)
    assert metadata["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    assert metadata["outputs"][2] == {"name": "probabilities", "datatype": "FP32", "shape": [-1, 4]}


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("shape", [[2], [2, 1]])
def test_triton_s_client_classifies(
    client: httpx.Client, triton: Any, model_folder: Path, binary: bool, shape: list[int]
) -> None:
    texts = ["Oil prices rise", "Köln gewinnt 😀"]
    tensor = http.InferInput("text", shape, "BYTES")
    tensor.set_data_from_numpy(np.array(texts, dtype=object).reshape(shape), binary_data=binary)
    result = triton.infer(model_folder.name, [tensor], request_id="mine")
    expected = [_predict(client, text) for text in texts]
    assert result.get_response()["id"] == "mine"
    probabilities = np.array([list(one.values()) for one in expected])
    assert result.as_numpy("probabilities") == pytest.approx(probabilities, abs=1e-6)
    labels = result.as_numpy("label")
    assert list(labels.shape) == shape
    assert [label.decode() for label in labels.ravel()] == [max(one, key=one.get) for one in expected]
    assert "data" not in result.get_output("label")  # it came behind the JSON, as the client asks by default


def test_triton_s_client_gets_only_the_outputs_it_asks_for(triton: Any, model_folder: Path) -> None:
    tensor = http.InferInput("text", [1], "BYTES")
    tensor.set_data_from_numpy(np.array(["Goal!"], dtype=object))
    result = triton.infer(model_folder.name, [tensor], outputs=[http.InferRequestedOutput("label")])
    assert [output["name"] for output in result.get_response()["outputs"]] == ["label"]


@pytest.mark.parametrize("asked", [(True, False), (False, True), (False, False), (True, True)])
def test_triton_s_client_gets_each_output_as_it_asks_for_it(triton: Any, model_folder: Path, asked: Any) -> None:
    tensor = http.InferInput("text", [1], "BYTES")
    tensor.set_data_from_numpy(np.array(["Goal!"], dtype=object))
    names = ("probabilities", "label")
    outputs = [http.InferRequestedOutput(name, binary_data=one) for name, one in zip(names, asked, strict=True)]
    result = triton.infer(model_folder.name, [tensor], outputs=outputs)
    assert tuple("data" not in result.get_output(name) for name in names) == asked
    label, probabilities = result.as_numpy("label")[0], result.as_numpy("probabilities")
    assert (probabilities.shape, probabilities.dtype) == ((1, 4), np.float32)
    assert (label.decode() if asked[1] else label) in ("World", "Sports", "Business", "Sci/Tech")


def test_triton_s_client_is_told_which_extensions_are_not_served(triton: Any, model_folder: Path) -> None:
    tensor = http.InferInput("text", [1], "BYTES")
    tensor.set_data_from_numpy(np.array(["Goal!"], dtype=object))
    shared = http.InferRequestedOutput("label")
    shared.set_shared_memory("region", 8)
    for output in (http.InferRequestedOutput("probabilities", class_count=2), shared):
        with pytest.raises(Exception, match="an extension that is not served"):
            triton.infer(model_folder.name, [tensor], outputs=[output])


def test_triton_s_client_shows_why_it_was_refused(triton: Any, model_folder: Path) -> None:
    tensor = http.InferInput("text", [1], "BYTES")
    for blank in (" ", "\u200b\u200d\ufeff"):
        tensor.set_data_from_numpy(np.array([blank], dtype=object))
        with pytest.raises(Exception, match=r"data\[0\] is blank"):
            triton.infer(model_folder.name, [tensor])
    with pytest.raises(Exception, match="no model of this name; tiny is served"):
        triton.infer("another", [tensor])


def test_triton_s_client_may_name_the_version_that_is_served(triton: Any, model_folder: Path) -> None:
    name = model_folder.name
    (version,) = triton.get_model_metadata(name)["versions"]
    assert triton.is_model_ready(name, version)
    assert triton.get_model_metadata(name, version)["versions"] == [version]
    tensor = http.InferInput("text", [1], "BYTES")
    tensor.set_data_from_numpy(np.array(["Goal!"], dtype=object))
    assert triton.infer(name, [tensor], model_version=version).get_response()["model_version"] == version
    assert not triton.is_model_ready(name, "another")
    with pytest.raises(Exception, match=f"no such version of the model; {version} is served"):
        triton.infer(name, [tensor], model_version="another")


def _infer(client: httpx.Client, tail: bytes, headers: dict[str, str], **tensor: Any) -> httpx.Response:
    body = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", **tensor}]}
    content = httpx.Request("POST", "http://x", json=body).read() + tail
    return client.post("/v2/models/tiny/infer", content=content, headers=headers)


@pytest.mark.parametrize(
    ("tensor", "status"),
    [
        ({"data": ["Goal!"]}, 200),
        ({"data": [["Goal!"]]}, 200),
        ({"data": []}, 422),
        ({}, 422),
        ({"data": ["a", "b"]}, 422),
        ({"data": [5]}, 422),
        ({"data": ["a"], "shape": [-1]}, 422),
        ({"data": ["a"], "shape": [-1, -1]}, 422),
        ({"data": [[]], "shape": [0]}, 422),
        ({"data": ["a"], "shape": []}, 422),
        ({"data": ["a"], "datatype": "FP32"}, 422),
        ({"data": ["a"] * 9, "shape": [9]}, 422),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_refused_in_the_protocol_s_own_words(
    client: httpx.Client, tensor: dict[str, Any], status: int
) -> None:
    response = _infer(client, b"", {}, **tensor)
    assert response.status_code == status
    assert status == 200 or isinstance(response.json()["error"], str)


@pytest.mark.parametrize(
    ("tail", "status"),
    [
        (b"\x05\x00\x00\x00Goal!", 200),
        (b"\x05\x00\x00\x00Goal", 422),
        (b"\x05\x00", 422),
        (b"\xff\xff\xff\xff", 422),
        (b"", 422),
        (b"\x01\x00\x00\x00\xff", 400),
    ],
)
def test_a_binary_tensor_that_does_not_add_up_is_refused(client: httpx.Client, tail: bytes, status: int) -> None:
    parameters = {"binary_data_size": len(tail)}
    body = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "parameters": parameters}]}
    head = httpx.Request("POST", "http://x", json=body).read()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    assert client.post("/v2/models/tiny/infer", content=head + tail, headers=headers).status_code == status
    for wrong in ("9999", "-1", "x", "9" * 5000):
        headers = {"Inference-Header-Content-Length": wrong}
        assert client.post("/v2/models/tiny/infer", content=head + tail, headers=headers).status_code == 422


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ('"shape":[%s]' % ("9" * 5000), 422),
        ('"shape":[%s,2]' % ("9" * 4000), 422),
        ('"shape":[1e400]', 422),
        ('"shape":[1],"parameters":{"a":%s,"b":"\\ud83d"}' % ("9" * 4000), 422),
        ('"shape":[1],"parameters":{"b":"\\ud83d"}', 200),
    ],
)
def test_numbers_of_thousands_of_digits_are_refused_in_one_short_line(
    client: httpx.Client, fields: str, status: int
) -> None:
    body = f'{{"id":"\\ud83d","inputs":[{{"name":"text","datatype":"BYTES","data":["Goal!"],{fields}}}]}}'
    response = client.post("/v2/models/tiny/infer", content=body.encode())
    assert response.status_code == status
    assert len(response.text) < 500


def test_the_model_answers_under_the_name_that_the_server_is_given(model_folder: Path) -> None:
    question = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["Goal!"]}]}
    with serving(model_folder, model_name="news-canary") as client:
        assert client.post("/v2/models/news-canary/infer", json=question).json()["model_name"] == "news-canary"
        assert client.post("/v2/models/tiny/infer", json=question).status_code == 404
        assert 'distrinews_model_info{engine="' in client.get("/metrics").text
        assert 'name="news-canary"' in client.get("/metrics").text


def test_a_mark_before_the_body_is_left_out(client: httpx.Client) -> None:
    mark = b"\xef\xbb\xbf"
    tensor = b'{"inputs":[{"name":"text","shape":[1],"datatype":"BYTES","data":["Goal!"]}]}'
    for path, body in (
        ("/predict", b'{"text":"Goal!"}'),
        ("/predict", b'{"text":"Goal\\ud83d"}'),
        ("/predict/batch", b'{"texts":["Goal!"]}' + b" " * 2000),
        ("/hub", b'{"inputs":"Goal!"}'),
        ("/v2/models/tiny/infer", tensor),
    ):
        assert client.post(path, content=mark + body).json() == client.post(path, content=body).json()
    lines = b'{"text":"Goal!"}\n' * 2
    answers = [
        client.post("/predict/batch", content=body, headers={"content-type": "application/x-ndjson"}).text
        for body in (lines, mark + lines)
    ]
    assert answers[0] == answers[1]
    assert client.post("/predict", content="{}".encode("utf-16")).status_code == 400


@pytest.mark.parametrize("name", ["ndjson", "jsonl", "x-jsonl", "jsonlines", "X-JSONLines; charset=utf-8", "x-ndjson"])
def test_a_stream_may_be_called_by_each_of_its_usual_names(client: httpx.Client, name: str) -> None:
    headers = {"content-type": f"application/{name}"}
    answer = client.post("/predict/batch", content=b'{"text":"Goal!"}\n' * 2, headers=headers)
    assert [json.loads(line)["index"] for line in answer.text.splitlines()] == [0, 1]


def test_a_compressed_body_is_refused_with_a_line_that_says_so(client: httpx.Client) -> None:
    for path in ("/predict", "/predict/batch", "/hub", "/v2/models/tiny/infer"):
        for kind in ("application/json", "application/x-ndjson"):
            headers = {"content-encoding": "gzip", "content-type": kind}
            response = client.post(path, content=b"\x1f\x8b\x08", headers=headers)
            assert response.status_code == 415
            assert "send it without Content-Encoding" in response.text
    assert client.post("/hub", json={"inputs": "Goal!"}, headers={"content-encoding": "identity"}).status_code == 200
