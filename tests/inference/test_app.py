from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers

from common.text import clean_text
from inference.engines.model_loader import ModelLoader

REPOSITORY = Path(__file__).resolve().parents[2]
StartServer = Callable[..., AbstractContextManager[httpx.Client]]


def _assert_refused(response: httpx.Response, status: int, code: str, message: str = "") -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code
    assert message in error["message"]
    assert len(error["message"].splitlines()) == 1


def test_the_front_door_leads_to_the_documentation(server: httpx.Client) -> None:
    response = server.get("/")
    assert response.is_redirect
    assert response.headers["location"] == "docs"
    assert server.get("/docs").status_code == 200


def test_health_tells_that_the_model_is_loaded(server: httpx.Client, model_folder: Path, labels: list[str]) -> None:
    response = server.get("/health")
    assert response.status_code == 200
    assert response.json() == {
        "status": "healthy",
        "model_loaded": True,
        "model": model_folder.name,  # no path of this machine
        "labels": labels,
    }


def test_predict_answers_as_the_model_does_in_python(
    server: httpx.Client, model_folder: Path, texts: list[str]
) -> None:
    model = ModelLoader(model_folder)
    for text in texts:
        response = server.post("/predict", json={"text": text})
        expected = model.predict(text)
        assert response.status_code == 200
        assert response.json()["label"] == expected["label"]
        assert response.json()["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-5)


def test_answers_over_http_are_those_of_a_transformers_pipeline(
    server: httpx.Client, model_folder: Path, texts: list[str]
) -> None:
    # The pipeline gets cleaned texts: cleaning is part of the model here, and no part of a tokenizer's files.
    pipeline = transformers.pipeline("text-classification", model=str(model_folder), top_k=None, device="cpu")
    expected = pipeline([clean_text(text) for text in texts], truncation=True)
    for text, scores in zip(texts, expected, strict=True):
        answer = server.post("/predict", json={"text": text}).json()
        assert answer["label"] == scores[0]["label"]
        assert answer["probabilities"] == pytest.approx({one["label"]: one["score"] for one in scores}, abs=1e-5)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "none"])
def test_scores_of_the_hub_face_are_those_of_a_transformers_pipeline(
    server: httpx.Client, model_folder: Path, texts: list[str], function: str
) -> None:
    pipeline = transformers.pipeline("text-classification", model=str(model_folder), top_k=None, device="cpu")
    expected = pipeline([clean_text(text) for text in texts], truncation=True, function_to_apply=function)
    body = {"inputs": texts, "parameters": {"function_to_apply": function}}
    for found, scores in zip(server.post("/hub", json=body).json(), expected, strict=True):
        assert [one["label"] for one in found] == [one["label"] for one in scores]
        assert [one["score"] for one in found] == pytest.approx([one["score"] for one in scores], abs=1e-5)


def test_an_answer_tells_its_confidence_its_tokens_and_whether_the_text_was_cut(server: httpx.Client) -> None:
    answer = server.post("/predict", json={"text": "Goal!"}).json()
    assert list(answer) == ["label", "confidence", "probabilities", "truncated", "num_tokens"]
    assert answer["confidence"] == answer["probabilities"][answer["label"]] == max(answer["probabilities"].values())
    assert sum(answer["probabilities"].values()) == pytest.approx(1)
    assert (answer["truncated"], answer["num_tokens"]) == (False, 4)
    answer = server.post("/predict", json={"text": "Goal! " * 30}).json()
    assert (answer["truncated"], answer["num_tokens"]) == (True, 62)


def test_top_k_gives_the_best_labels_the_highest_first(server: httpx.Client) -> None:
    full = server.post("/predict", json={"text": "Goal!"}).json()
    ordered = sorted(full["probabilities"].items(), key=lambda one: -one[1])
    for top_k in (1, 3, 4, 99):
        answer = server.post("/predict", json={"text": "Goal!", "top_k": top_k}).json()
        assert list(answer["probabilities"].items()) == ordered[:top_k]
        assert {**answer, "probabilities": full["probabilities"]} == full
        assert server.post("/predict/batch", json={"texts": ["Goal!"], "top_k": top_k}).json() == [answer]


@pytest.mark.parametrize(
    "text",
    [
        "Goal!\x00\x01\x1f\x7f",
        "\u202eright to left\u202c \u05d0\u05d1 \u0627\u0644",
        "👩\u200d👩\u200d👧\u200d👦 🇩🇪 e\u0301",
        "a" * 2000,
        "\n" * 1999 + "a",
        "<" * 2000,
        "&amp;" * 399 + "x",
        "\ufeff\ufffe\uffff x",
        "\U0010ffff x",
    ],
)
def test_any_text_that_can_be_read_is_answered(server: httpx.Client, text: str) -> None:
    for path in ("/predict", "/explain"):
        assert server.post(path, json={"text": text}).status_code == 200


def test_a_batch_is_answered_with_a_list_in_order(server: httpx.Client, texts: list[str]) -> None:
    answers = server.post("/predict/batch", json={"texts": texts}).json()
    singles = [server.post("/predict", json={"text": text}).json() for text in texts]
    assert [one["label"] for one in answers] == [one["label"] for one in singles]
    confidences = [one["confidence"] for one in answers]
    assert confidences == pytest.approx([one["confidence"] for one in singles], abs=1e-5)


@pytest.mark.parametrize("text", ["", "   ", "\\", "&lt;p&gt;", "\x00", "\u200b\u200d\ufeff"])
def test_a_blank_text_is_refused_with_422(server: httpx.Client, text: str) -> None:
    _assert_refused(server.post("/predict", json={"text": text}), 422, "blank_text", "text is blank")
    batch = server.post("/predict/batch", json={"texts": ["News", text]})
    _assert_refused(batch, 422, "blank_text", "texts[1] is blank")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predict", {}),
        ("/predict", {"text": 5}),
        ("/predict", {"text": None}),
        ("/predict", ["News"]),
        ("/predict/batch", {"texts": []}),
        ("/predict/batch", {"texts": "News"}),
        ("/predict/batch", {"texts": ["News", 5]}),
        ("/predict", {"text": "News", "top_k": 0}),
        ("/predict", {"text": "News", "top_k": "2"}),
        ("/predict", {"text": "News", "topk": 2}),
        ("/predict", {"text": "News", "x" * 300: 1}),
    ],
)
def test_a_body_of_the_wrong_shape_is_refused_with_422(server: httpx.Client, path: str, body: Any) -> None:
    _assert_refused(server.post(path, json=body), 422, "invalid_request", "body")


def _post_raw(server: httpx.Client, body: bytes, path: str = "/predict") -> httpx.Response:
    return server.post(path, content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize("body", [b"", b"{", b'{"text": NaN}', b'"\\ud83d"', b'{"text": 1, "\\ud83d": "\\ud83d"}'])
def test_a_body_that_is_no_request_is_refused_with_422(server: httpx.Client, body: bytes) -> None:
    _assert_refused(_post_raw(server, body), 422, "invalid_request")


@pytest.mark.parametrize("body", [b'{"text": "\xff"}', b'\xff\xfe{\x00"\x00', b"[" * 1000])
def test_a_body_that_cannot_be_read_is_refused_with_400(server: httpx.Client, body: bytes) -> None:
    _assert_refused(_post_raw(server, body), 400, "unreadable_body")


def test_a_lone_surrogate_is_never_an_error_of_the_server(server: httpx.Client) -> None:
    _assert_refused(_post_raw(server, b'{"text": "\\ud83d"}'), 422, "blank_text")
    batch = _post_raw(server, b'{"texts": ["News", "\\udc00"]}', "/predict/batch")
    _assert_refused(batch, 422, "blank_text", "texts[1]")
    within_words = _post_raw(server, b'{"text": "oil \\ud83d prices"}')
    assert within_words.status_code == 200
    assert within_words.json() == server.post("/predict", json={"text": "oil prices"}).json()


def test_a_text_over_the_limit_is_refused_with_both_numbers(server: httpx.Client) -> None:
    assert server.post("/predict", json={"text": "a" * 2000}).status_code == 200
    response = server.post("/predict", json={"text": "a" * 2001})
    _assert_refused(response, 422, "text_too_long", "text has 2001 characters > maximum 2000")
    response = server.post("/predict/batch", json={"texts": ["News", "a" * 2001]})
    _assert_refused(response, 422, "text_too_long", "texts[1] has 2001 characters > maximum 2000")


def test_a_batch_over_the_limit_is_refused_with_both_numbers(server: httpx.Client) -> None:
    assert server.post("/predict/batch", json={"texts": ["News"] * 8}).status_code == 200
    response = server.post("/predict/batch", json={"texts": ["News"] * 9})
    _assert_refused(response, 422, "too_many_texts", "texts has 9 entries > maximum 8")


def test_the_largest_request_within_the_limits_is_answered(server: httpx.Client) -> None:
    body = '{"texts": [' + ", ".join(['"' + "\\ud83d\\ude00" * 2000 + '"'] * 8) + "]}"
    assert _post_raw(server, body.encode(), "/predict/batch").status_code == 200


def test_a_body_too_large_for_the_limits_is_refused_with_413(server: httpx.Client) -> None:
    _assert_refused(_post_raw(server, b"x" * 500_000), 413, "body_too_large", "more than 449536 bytes")
    unannounced = server.post("/predict", content=iter([b'"' + b"x" * 20_000 + b'",'] * 30))
    _assert_refused(unannounced, 413, "body_too_large", "more than 449536 bytes")


def test_unknown_paths_and_methods_are_refused_in_the_same_shape(server: httpx.Client) -> None:
    _assert_refused(server.get("/nothing"), 404, "not_found")
    _assert_refused(server.get("/predict"), 405, "method_not_allowed")


def test_what_is_sent_to_the_wrong_place_is_told_the_right_one(server: httpx.Client) -> None:
    _assert_refused(server.get("/predict"), 405, "method_not_allowed", 'use POST with JSON such as {"text": "')
    _assert_refused(server.get("/predict/batch"), 405, "method_not_allowed", 'use POST with JSON such as {"texts": ["')
    _assert_refused(server.post("/livez"), 405, "method_not_allowed", "this path does not accept POST; use GET")
    form = server.post("/predict", data={"text": "News"})
    _assert_refused(form, 422, "invalid_request", 'send JSON such as {"text": "')
    for path in ("/predict", "/explain"):
        response = server.post(path, json={"texts": ["News"]})
        _assert_refused(response, 422, "invalid_request", "such a body goes to /predict/batch")
    _assert_refused(server.post("/predict/batch", json={"text": "News"}), 422, "invalid_request", "goes to /predict")


def test_health_answers_while_the_model_works(server: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(server.post, "/predict/batch", json={"texts": ["oil " * 400] * 8}) for _ in range(80)]
        answered = 0
        while not all(one.done() for one in work):
            assert server.get("/health").status_code == 200
            answered += 1
    assert answered > 3, "so it does not wait until the model is idle"
    assert {one.result().status_code for one in work} <= {200, 503}, "on a busy machine a full queue refuses some"
    assert work[0].result().status_code == 200


def test_the_documentation_shows_the_error_shape(server: httpx.Client) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    for path in ("/predict", "/predict/batch", "/explain", "/hub"):
        responses = paths[path]["post"]["responses"]
        assert set(responses) == {"200", "400", "401", "403", "408", "413", "415", "422", "429", "500", "503", "504"}
        for status in set(responses) - {"200"}:
            schema = responses[status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorResponse"}
        for status in ("429", "503"):
            assert "Retry-After" in responses[status]["headers"]


def test_without_a_model_the_server_stays_up_and_says_why(start_server: StartServer, folder_copy: Path) -> None:
    (folder_copy / "model.safetensors").unlink()
    with start_server(folder_copy) as client:
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "unavailable"
        assert health.json()["model_loaded"] is False
        assert "lacks model.safetensors" in health.json()["error"]
        for path, body in (("/predict", {"text": "News"}), ("/predict/batch", {"texts": ["News"]})):
            response = client.post(path, json=body)
            _assert_refused(response, 503, "model_unavailable", "lacks model.safetensors")
            assert int(response.headers["retry-after"]) > 0


def test_importing_the_server_loads_neither_torch_nor_the_trainer() -> None:
    code = "import sys, inference.app; print({'torch', 'transformers', 'training'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_no_file_of_inference_imports_training() -> None:
    for path in (REPOSITORY / "inference").rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if line.strip().startswith(("import training", "from training"))], path
