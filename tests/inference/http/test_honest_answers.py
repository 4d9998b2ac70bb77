"""Sets with coverage, abstentions under a bound on errors and familiarity, on every route that classifies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from common.calibration import Calibration, fit
from common.problem_types import MULTI_LABEL, REGRESSION
from inference.app import create_app
from inference.engines.model_loader import ModelLoader
from inference.settings import Settings
from tests.docs.pages import REPOSITORY
from tests.inference.conftest import LABELS, TEXTS
from tests.inference.servers import ThreadedServer, metric, serving
from tests.inference.stand_in_model import CALIBRATION

NEWS = REPOSITORY / "checkpoints" / "news"
SURE = "The striker scored twice as the home side won the cup final"
# Business with 95%: enough for 3% of errors, but not for 1%.
UNSURE = "Oil prices climb to a record as refiners report falling stocks and traders fear a winter shortage"
FOREIGN = "def f(x): return [y for y in x if y]"
STREAM = {"content-type": "application/x-ndjson"}
ALL = {"coverage": 0.95, "max_error": 0.01, "familiarity": True}
ROUTES = ["/predict", "/predict/batch", "stream", "/v2", "/classify"]


def _serving(folder: Path = NEWS, **settings: object) -> AbstractContextManager[httpx.Client]:
    app = create_app(Settings(model_checkpoint=folder, log_level="error", **settings))
    return ThreadedServer(app).running()


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with _serving(cache_entries=100) as client:
        yield client


@pytest.fixture
def calibrated(model_folder: Path, tmp_path: Path) -> Path:
    """A folder for a stand-in that is calibrated."""
    folder = tmp_path / "calibrated"
    folder.mkdir()
    shutil.copy(model_folder / "tokenizer.json", folder)
    (folder / "calibration.json").write_text(json.dumps(CALIBRATION))
    return folder


def _predict(client: httpx.Client, text: str, **more: Any) -> dict[str, Any]:
    response = client.post("/predict", json={"text": text, **more})
    assert response.status_code == 200, response.text
    return response.json()


def _stream(client: httpx.Client, *lines: dict[str, Any]) -> list[dict[str, Any]]:
    body = "".join(json.dumps(line) + "\n" for line in lines)
    return [json.loads(line) for line in client.post("/predict/batch", content=body, headers=STREAM).text.splitlines()]


def _infer(client: httpx.Client, texts: list[str], parameters: dict[str, Any], *outputs: str) -> httpx.Response:
    tensor = {"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": texts}
    body: dict[str, Any] = {"inputs": [tensor], "parameters": parameters}
    if outputs:
        body["outputs"] = [{"name": name} for name in outputs]
    name = client.get("/model").json()["name"]
    return client.post(f"/v2/models/{name}/infer", json=body)


def _tensors(response: httpx.Response) -> dict[str, list[Any]]:
    assert response.status_code == 200, response.text
    return {one["name"]: one["data"] for one in response.json()["outputs"]}


def _refusal(client: httpx.Client, route: str, asked: dict[str, Any]) -> tuple[str, str]:
    """The code and the line with which a request that asks for this is refused; "/v2" has no codes."""
    if route == "stream":
        (answer,) = _stream(client, {"text": UNSURE, **asked})
        return answer["error"]["code"], answer["error"]["message"]
    if route == "/v2":
        response = _infer(client, [UNSURE], asked)
        assert response.status_code == 422
        return "", response.json()["error"]
    text = {"/predict": {"text": UNSURE}, "/predict/batch": {"texts": [UNSURE]}, "/classify": {"input": UNSURE}}
    response = client.post(route, json=text[route] | asked)
    assert response.status_code == (400 if route == "/classify" else 422)
    error = response.json()["error"]
    return error["type" if route == "/classify" else "code"], error["message"]


def _counted(client: httpx.Client) -> dict[str, float]:
    reasons = ("uncertain", "unfamiliar")
    counted = {reason: metric(client, "abstained_texts_total", reason=reason) for reason in reasons}
    return counted | {"answered": metric(client, "predictions_total")}


# What an answer has


def test_a_request_that_asks_for_nothing_gets_the_fields_that_it_always_got(client: httpx.Client) -> None:
    fields = {"label", "confidence", "probabilities", "truncated", "num_tokens"}
    assert set(_predict(client, UNSURE)) == fields
    assert set(_predict(client, UNSURE, coverage=None, max_error=None, familiarity=False)) == fields
    names = [one["name"] for one in _infer(client, [UNSURE], {}).json()["outputs"]]
    assert names == ["label", "confidence", "probabilities"]
    (data,) = client.post("/classify", json={"input": UNSURE}).json()["data"]
    assert set(data) == {"index", "label", "probs", "num_classes"}


def test_a_set_has_the_coverage_that_was_asked_for_or_the_next_one_that_was_fitted(client: httpx.Client) -> None:
    few, next_one, many = (_predict(client, FOREIGN, coverage=level) for level in (0.9, 0.91, 0.999))
    assert [one["coverage"] for one in (few, next_one, many)] == [0.9, 0.925, 0.999]
    assert few["set"] == [few["label"]]
    assert many["set"] == sorted(many["probabilities"], key=lambda label: -many["probabilities"][label])
    assert "abstained" not in few
    assert "familiarity" not in few


def test_a_text_that_the_model_is_not_sure_of_or_that_is_foreign_gets_no_label(client: httpx.Client) -> None:
    before = _counted(client)
    sure, unsure, foreign = (_predict(client, text, **ALL) for text in (SURE, UNSURE, FOREIGN))
    assert (sure["label"], sure["abstained"]) == ("Sports", None)
    assert (unsure["label"], unsure["abstained"]) == (None, "uncertain")
    assert (foreign["label"], foreign["abstained"]) == (None, "unfamiliar")
    # What the model would have said is still there.
    assert unsure["confidence"] == unsure["probabilities"]["Business"] == max(unsure["probabilities"].values())
    assert foreign["familiarity"] < 0.01 < unsure["familiarity"] <= 1
    assert {name: value - before[name] for name, value in _counted(client).items()} == {
        "uncertain": 1,
        "unfamiliar": 1,
        "answered": 1,
    }


def test_a_bound_may_be_a_share_a_percentage_or_a_name(client: httpx.Client) -> None:
    answers = [_predict(client, UNSURE, max_error=bound) for bound in (0.01, "0.01", "1%", "1.0 %")]
    assert [one["abstained"] for one in answers] == ["uncertain"] * 4
    assert [_predict(client, UNSURE, max_error=bound)["abstained"] for bound in (0.03, 1)] == [None, None]


def test_the_model_says_what_it_can_promise(client: httpx.Client, model_folder: Path) -> None:
    model = client.get("/model").json()
    assert model["calibrated"] is True
    assert model["calibration"]["operating_points"]["0.02"]["answered"] > 0.5
    with serving(model_folder) as plain:
        assert plain.get("/model").json()["calibrated"] is False
        assert "calibration" not in plain.get("/model").json()


@pytest.mark.parametrize("asked", [{}, ALL, {"coverage": 0.99}, {"max_error": "2%"}])
def test_an_answer_is_the_same_alone_in_a_batch_in_a_stream_and_from_the_cache(
    client: httpx.Client, asked: dict[str, Any]
) -> None:
    texts = [SURE, UNSURE, FOREIGN]
    alone = [_predict(client, text, **asked) for text in texts]
    hits = metric(client, "cache_lookups_total", result="hit")
    assert [_predict(client, text, **asked) for text in texts] == alone
    assert metric(client, "cache_lookups_total", result="hit") == hits + 3
    with _serving() as other:
        assert other.post("/predict/batch", json={"texts": texts, **asked}).json() == alone
        answers = _stream(other, *({"text": text, **asked} for text in texts))
        assert answers == [{"index": i, **one} for i, one in enumerate(alone)]


def test_each_line_of_a_stream_asks_for_itself(client: httpx.Client) -> None:
    plain, unkept, asking, bad = _stream(
        client,
        {"text": UNSURE},
        {"text": UNSURE, "coverage": 0.99999},
        {"text": UNSURE, "max_error": 0.01},
        {"text": UNSURE, "max_error": 0},
    )
    assert "abstained" not in plain
    assert unkept["error"]["code"] == "no_guarantee"
    assert asking["abstained"] == "uncertain"
    assert bad["error"]["code"] == "invalid_request"


# What is refused


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"coverage": 0.9999}, "coverage 0.9999 cannot be promised: the model was calibrated on 7,600 rows"),
        ({"max_error": 0.001}, "max_error 0.001 cannot be promised with 95% confidence"),
        ({"max_error": "careful"}, "there is no operating point 'careful'; this model has 0.01"),
    ],
)
def test_what_the_model_cannot_promise_is_refused_in_one_line(
    client: httpx.Client, route: str, asked: dict[str, Any], line: str
) -> None:
    tokenized = metric(client, "tokenized_texts_total")
    code, message = _refusal(client, route, asked)
    assert code in ("no_guarantee", "")
    assert message.startswith(line)
    assert "\n" not in message
    assert metric(client, "tokenized_texts_total") == tokenized


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("coverage", value) for value in (0, 1, 2, -0.5, "0.9", [0.9], True)),
        *(("max_error", value) for value in (0, -1, 2, "", " ", "0%", "nan", "1e999", "9" * 5000, [0.1], {}, True)),
        *(("familiarity", value) for value in (1, "yes")),
    ],
)
def test_a_field_out_of_its_bounds_is_named_in_one_short_line(
    client: httpx.Client, route: str, name: str, value: Any
) -> None:
    code, message = _refusal(client, route, {name: value})
    assert code in ("invalid_request", "")
    assert message.count(f"{name}: ") == 1
    assert len(message) < 200
    assert "\n" not in message


def test_a_number_that_is_none_is_refused(client: httpx.Client) -> None:
    for body in (b'{"text": "Oil", "coverage": NaN}', b'{"text": "Oil", "max_error": NaN}'):
        assert client.post("/predict", content=body).json()["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("route", ROUTES)
def test_a_model_without_calibration_answers_as_before_and_promises_nothing(model_folder: Path, route: str) -> None:
    with serving(model_folder) as client:
        assert _predict(client, UNSURE)["label"] in LABELS
        for asked in ({"coverage": 0.9}, {"max_error": 0.1}, {"familiarity": True}):
            code, message = _refusal(client, route, asked)
            assert code in ("no_guarantee", "")
            assert message.startswith("this model is not calibrated")


# The settings


def test_the_settings_apply_where_a_request_asks_for_nothing_else() -> None:
    with _serving(coverage=0.9, max_error="1%") as client:
        answer = _predict(client, UNSURE)
        assert (answer["label"], answer["abstained"], answer["coverage"]) == (None, "uncertain", 0.9)
        other = _predict(client, UNSURE, max_error=0.03)
        assert (other["label"], other["abstained"], other["coverage"]) == ("Business", None, 0.9)
        assert _predict(client, UNSURE, coverage=0.99)["coverage"] == 0.99
        assert _stream(client, {"text": UNSURE})[0] == {"index": 0, **answer}
        outputs = [one["name"] for one in client.get("/v2/models/news").json()["outputs"]]
        assert outputs == ["label", "confidence", "probabilities", "set", "abstained"]
        assert list(_tensors(_infer(client, [UNSURE], {}))) == outputs


def test_an_explanation_is_that_of_the_label_which_the_model_would_have_answered() -> None:
    with _serving(max_error="0.01") as client, _serving() as plain:
        withheld, given = (one.post("/explain", json={"text": UNSURE}).json() for one in (client, plain))
        assert (withheld["label"], withheld["abstained"], withheld["explained"]) == (None, "uncertain", "Business")
        assert withheld["words"] == given["words"]
        assert "explained" not in given
        assert "explained" not in client.post("/explain", json={"text": SURE}).json()


def test_what_is_counted_and_explained_is_the_label_that_costs_decide(calibrated: Path) -> None:
    with serving(calibrated, max_error="cheap") as client:
        answers = [_predict(client, text) for text in TEXTS]
        assert {one["label"] for one in answers} == {"World"}
        assert any(max(one["probabilities"], key=one["probabilities"].get) != "World" for one in answers)
        assert metric(client, "predictions_total", label="World") == len(TEXTS)
        explained = [client.post("/explain", json={"text": text}).json() for text in TEXTS[:4]]
        asked = [client.post("/explain", json={"text": text, "label": "World"}).json() for text in TEXTS[:4]]
        assert [one["words"] for one in explained] == [one["words"] for one in asked]


def test_a_server_whose_model_cannot_keep_the_settings_runs_without_it_and_says_why(model_folder: Path) -> None:
    with serving(model_folder, max_error="2%") as client:
        health = client.get("/health")
        assert health.status_code == 503
        assert "this model is not calibrated" in health.json()["error"]
        assert "\n" not in health.json()["error"]
        assert client.post("/predict", json={"text": "Oil"}).json()["error"]["code"] == "model_unavailable"


def test_a_model_that_cannot_keep_the_settings_takes_no_other_s_place(calibrated: Path) -> None:
    with serving(calibrated, max_error="0.05", coverage=0.9, api_key="open sesame") as client:
        client.headers["X-API-Key"] = "open sesame"
        before = _predict(client, "oil prices")
        (calibrated / "calibration.json").unlink()
        refused = client.post("/admin/reload")
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "model_refused")
        assert "this model is not calibrated" in refused.json()["error"]["message"]
        assert _predict(client, "oil prices") == before


def test_a_line_is_judged_by_the_model_that_answers_it(calibrated: Path) -> None:
    with serving(calibrated, api_key="open sesame") as client:
        client.headers["X-API-Key"] = "open sesame"

        def lines() -> Iterator[bytes]:
            yield b'{"text": "oil prices", "coverage": 0.9}\n'
            (calibrated / "calibration.json").unlink()
            assert client.post("/admin/reload").status_code == 200
            yield b'{"text": "oil prices", "coverage": 0.9}\n{"text": "oil prices"}\n'

        answered = client.post("/predict/batch", content=lines(), headers=STREAM).text.splitlines()
        _, refused, plain = map(json.loads, answered)
        assert refused["error"]["code"] == "no_guarantee"
        assert plain["label"] in LABELS


def test_both_reasons_are_counted_from_the_start(model_folder: Path) -> None:
    with serving(model_folder) as client:
        page = client.get("/metrics").text
    for reason in ("uncertain", "unfamiliar"):
        assert f'distrinews_abstained_texts_total{{reason="{reason}"}} 0.0' in page


# Other servers' formats


def test_the_open_inference_protocol_has_a_tensor_for_each_thing_that_is_asked_for(client: httpx.Client) -> None:
    texts = [SURE, UNSURE, FOREIGN]
    response = _infer(client, texts, {**ALL, "coverage": 0.999, "x": 1})
    expected = [_predict(client, text, **{**ALL, "coverage": 0.999}) for text in texts]
    assert response.json()["parameters"] == {"coverage": 0.999}
    tensors = _tensors(response)
    assert list(tensors) == ["label", "confidence", "probabilities", "set", "abstained", "familiarity"]
    assert tensors["label"] == ["Sports", "", ""]
    assert tensors["abstained"] == ["", "uncertain", "unfamiliar"]
    assert tensors["set"] == ["|".join(one["set"]) for one in expected]
    assert tensors["confidence"] == [one["confidence"] for one in expected]
    assert tensors["familiarity"] == [one["familiarity"] for one in expected]
    assert list(_tensors(_infer(client, texts, ALL, "abstained", "label"))) == ["abstained", "label"]


def test_a_tensor_that_no_parameter_asks_for_is_refused(client: httpx.Client) -> None:
    listed = [one["name"] for one in client.get("/v2/models/news").json()["outputs"]]
    assert listed == ["label", "confidence", "probabilities"]
    for name, parameter in (("set", "coverage"), ("abstained", "max_error"), ("familiarity", "familiarity")):
        response = _infer(client, [UNSURE], {}, name)
        assert response.status_code == 422
        assert response.json()["error"].endswith(f"{name} needs {parameter} among the parameters of the request")


def test_triton_s_client_reads_the_tensors_that_it_asks_for(client: httpx.Client) -> None:
    http = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http], of the dev extra")
    tensor = http.InferInput("text", [2], "BYTES")
    tensor.set_data_from_numpy(np.array([UNSURE, FOREIGN], dtype=object))
    triton = http.InferenceServerClient(f"127.0.0.1:{client.base_url.port}")
    found = triton.infer("news", [tensor], parameters=ALL)
    assert found.as_numpy("label").tolist() == [b"", b""]
    assert found.as_numpy("abstained").tolist() == [b"uncertain", b"unfamiliar"]
    assert found.as_numpy("familiarity").dtype == np.float32
    assert found.get_response()["parameters"] == {"coverage": 0.95}


def test_the_hub_format_has_no_place_for_a_promise(client: httpx.Client) -> None:
    for name, value in ALL.items():
        response = client.post("/hub", json={"inputs": UNSURE, "parameters": {name: value}})
        assert response.status_code == 422
        assert f"{name}: this format has no place for it" in response.json()["error"]["message"]
    parameters = {"coverage": None, "max_error": None, "familiarity": False}
    assert client.post("/hub", json={"inputs": UNSURE, "parameters": parameters}).status_code == 200


def test_vllm_s_format_abstains_and_keeps_every_probability_in_order(client: httpx.Client) -> None:
    texts = [SURE, UNSURE, FOREIGN]
    data = client.post("/classify", json={"input": texts, **ALL}).json()["data"]
    expected = [_predict(client, text, **ALL) for text in texts]
    assert [one["label"] for one in data] == ["Sports", "ABSTAIN", "ABSTAIN"]
    assert [one["probs"] for one in data] == [list(one["probabilities"].values()) for one in expected]
    for name in ("abstained", "set", "coverage", "familiarity"):
        assert [one[name] for one in data] == [one[name] for one in expected]


@pytest.mark.parametrize(("path", "field"), [("/classify", "inputs"), ("/classify", "text"), ("/v1/classify", "input")])
@pytest.mark.parametrize("name", list(ALL))
def test_a_gateway_s_format_that_only_lists_scores_refuses_a_promise(
    client: httpx.Client, path: str, field: str, name: str
) -> None:
    response = client.post(path, json={field: UNSURE, name: ALL[name]})
    assert response.status_code == 400
    assert f"{name}: this format has no place for it" in response.json()["error"]["message"]


def test_formats_that_only_list_scores_stay_complete_whatever_the_operator_allows(client: httpx.Client) -> None:
    requests = [
        ("/hub", {"inputs": FOREIGN}),
        ("/classify", {"inputs": FOREIGN}),
        ("/classify", {"text": FOREIGN}),
        ("/v1/classify", {"input": FOREIGN}),
    ]
    with _serving(coverage=0.9, max_error="0.01") as strict:
        for path, body in requests:
            before = _counted(strict)["answered"]
            answers = [one.post(path, json=body).json() for one in (strict, client)]
            assert answers[0] == answers[1]
            assert _counted(strict) == {"uncertain": 0, "unfamiliar": 0, "answered": before + 1}
        (data,) = strict.post("/classify", json={"input": FOREIGN}).json()["data"]
        assert (data["label"], data["abstained"]) == ("ABSTAIN", "unfamiliar")
        assert _counted(strict)["unfamiliar"] == 1


# Several labels, and numbers


def _serving_fitted(folder: Path, record: dict[str, Any]) -> AbstractContextManager[httpx.Client]:
    """Serve a model of any kind with PyTorch as if it had been exported with this calibration."""

    def load(path: Path, engine: str) -> ModelLoader:
        model = ModelLoader(path, "torch")
        model.answering.calibration = Calibration(record, model.labels)
        return model

    app = create_app(Settings(model_checkpoint=folder, log_level="error"), load)
    return ThreadedServer(app).running()


def test_a_number_comes_with_an_interval(regression_folder: Path) -> None:
    generator = np.random.default_rng(0)
    scores = generator.normal(1200, 50, (400, 1)).astype(np.float32)
    record = fit(REGRESSION, scores, (scores[:, 0] + generator.normal(0, 10, 400)).tolist(), ["price"])
    with _serving_fitted(regression_folder, record) as client:
        answer = _predict(client, UNSURE, coverage=0.9)
        low, high = answer["interval"]
        assert low < answer["value"] < high
        assert answer["coverage"] == 0.9
        assert 20 < high - low < 50
        tensors = _tensors(_infer(client, [UNSURE, "Goal!"], {"coverage": 0.9}))
        assert tensors["interval"][:2] == pytest.approx([low, high])
        assert len(tensors["interval"]) == 4
        _, line = _refusal(client, "/predict", {"max_error": 0.1})
        assert "max_error cannot be promised" in line


def test_of_several_labels_only_those_are_given_that_are_precise_enough(multi_label_folder: Path) -> None:
    generator = np.random.default_rng(0)
    scores = generator.normal(0, 2, (400, len(LABELS))).astype(np.float32)
    applies = generator.random(scores.shape) < 1 / (1 + np.exp(-scores))
    record = fit(MULTI_LABEL, scores, [np.flatnonzero(row).tolist() for row in applies], LABELS)
    bounds = {**dict.fromkeys(LABELS, 0.8), "Sci/Tech": 0.4}  # the model gives a label from 0.5 on
    record["operating_points"] = {"precision": {"thresholds": bounds}}
    with _serving_fitted(multi_label_folder, record) as client:
        answers = [_predict(client, text, coverage=0.9, max_error="precision") for text in TEXTS]
        plain = [_predict(client, text) for text in TEXTS]
        tensors = _tensors(_infer(client, TEXTS, {"coverage": 0.9, "max_error": "precision"}))
    for answer, before in zip(answers, plain, strict=True):
        found = {label: value for label, value in before["probabilities"].items() if value >= bounds[label]}
        assert answer["labels"] == sorted(found, key=lambda label: -found[label])
        assert (answer["abstained"] == "uncertain") == bool(before["labels"] and not answer["labels"])
        assert answer["set"] == sorted(answer["set"], key=lambda label: -answer["probabilities"][label])
    assert {one["abstained"] for one in answers} == {None, "uncertain"}
    assert tensors["labels"] == ["|".join(one["labels"]) for one in answers]
    assert tensors["set"] == ["|".join(one["set"]) for one in answers]
    assert tensors["abstained"] == [one["abstained"] or "" for one in answers]
