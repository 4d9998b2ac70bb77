from __future__ import annotations

import json
import logging
from pathlib import Path

import httpx
import pytest

from inference.request_log import JsonLines
from inference.security import MAX_CLIENTS, RateLimiter
from tests.inference.servers import metric, serving

TEXT = {"text": "Oil prices rise"}


def _code(response: httpx.Response) -> str:
    return response.json()["error"]["code"]


def test_with_an_api_key_every_post_needs_it_and_probes_stay_open(model_folder: Path) -> None:
    with serving(model_folder, api_key="open sesame") as client:
        for headers in ({}, {"X-API-Key": "open"}, {"Authorization": "Basic open sesame"}, {"Authorization": "Bearer"}):
            for path in ("/predict", "/predict/batch", "/explain", "/hub", "/admin/reload"):
                response = client.post(path, json=TEXT, headers=headers)
                assert (response.status_code, _code(response)) == (401, "unauthorized")
                assert response.headers["www-authenticate"] == "Bearer"
        for headers in ({"X-API-Key": "open sesame"}, {"Authorization": "Bearer open sesame"}):
            assert client.post("/predict", json=TEXT, headers=headers).status_code == 200
        for path in (
            "/health",
            "/livez",
            "/readyz",
            "/metrics",
            "/model",
            "/docs",
            "/openapi.json",
            "/v2/health/ready",
        ):
            assert client.get(path).status_code == 200
        assert metric(client, "refusals_total", code="unauthorized") == 20


def test_with_an_api_key_the_documentation_tells_so(model_folder: Path) -> None:
    with serving(model_folder, api_key="open sesame") as client:
        document = client.get("/openapi.json").json()
    assert set(document["components"]["securitySchemes"]) == {"bearer", "header"}
    assert document["paths"]["/predict"]["post"]["security"]
    assert "security" not in document["paths"]["/health"]["get"]


def test_without_a_key_reload_is_for_the_own_machine_alone(model_folder: Path) -> None:
    with serving(model_folder) as client:
        assert client.post("/admin/reload").status_code == 200
        for headers in (
            {"X-Forwarded-For": "203.0.113.7"},
            {"Forwarded": "for=203.0.113.7"},
            {"Origin": "https://example.org"},
            {"Origin": "null"},
        ):
            response = client.post("/admin/reload", headers=headers)
            assert (response.status_code, _code(response)) == (403, "forbidden")


def test_no_foreign_page_may_call_the_server_unless_its_origin_is_listed(model_folder: Path) -> None:
    asks = {"Origin": "https://news.example", "Access-Control-Request-Method": "POST"}
    with serving(model_folder) as client:
        assert "access-control-allow-origin" not in client.options("/predict", headers=asks).headers
        answer = client.post("/predict", json=TEXT, headers={"Origin": "https://news.example"})
        assert "access-control-allow-origin" not in answer.headers
    with serving(model_folder, cors_origins="https://other.example, https://news.example/", api_key="key") as client:
        preflight = client.options("/predict", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://news.example"
        refusal = client.post("/predict", json=TEXT, headers={"Origin": "https://news.example"})
        assert refusal.status_code == 401
        assert refusal.headers["access-control-allow-origin"] == "https://news.example"
        stranger = client.post("/predict", json=TEXT, headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers


def test_every_answer_carries_the_security_headers(model_folder: Path) -> None:
    with serving(model_folder) as client:
        answers = [client.get(path) for path in ("/", "/docs", "/demo", "/health", "/nothing", "/openapi.json")]
        answers += [client.post("/predict", json=TEXT), client.post("/predict", json={})]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "x-frame-options" not in answer.headers
        policies = answer.headers.get_list("content-security-policy")
        assert len(policies) == 1
        assert "frame-ancestors 'self' https://huggingface.co" in policies[0]
        assert answer.headers["x-request-id"]
        assert "total;dur=" in answer.headers["server-timing"]


def test_a_client_over_its_rate_is_refused_until_its_bucket_fills_again(model_folder: Path) -> None:
    with serving(model_folder, rate_limit_per_s=0.5) as client:
        assert client.post("/predict", json=TEXT).status_code == 200
        refused = client.post("/predict", json=TEXT)
        assert (refused.status_code, _code(refused)) == (429, "rate_limited")
        assert metric(client, "requests_total", route="/predict", status="429") == 1
        assert 1 <= int(refused.headers["retry-after"]) <= 2
        assert client.get("/health").status_code == 200


def test_the_rate_is_counted_by_address_and_by_household(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("inference.security.time.monotonic", lambda: now)
    limiter = RateLimiter(per_second=2)

    def waits(host: str) -> float:
        return limiter.wait_s({"type": "http", "client": (host, 1)})

    assert [waits("192.0.2.1") for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert waits("192.0.2.2") == 0
    assert [waits(f"2001:db8::{i}") for i in range(5)] == [0, 0, 0, 0, 0.5]
    assert waits("2001:db8:0:1::1") == 0
    now += 0.25
    assert waits("192.0.2.1") == 0.25
    now += 0.25
    assert [waits("192.0.2.1") for _ in range(2)] == [0, 0.5]


def test_the_rate_limiter_remembers_a_bounded_number_of_clients() -> None:
    limiter = RateLimiter(per_second=0.001)
    for i in range(MAX_CLIENTS + 5):
        assert limiter.wait_s({"type": "http", "client": (f"client {i}", 1)}) == 0
    assert limiter.wait_s({"type": "http", "client": (f"client {MAX_CLIENTS}", 1)}) > 0
    assert limiter.wait_s({"type": "http", "client": ("client 0", 1)}) == 0


def test_a_caller_may_name_its_request_but_not_write_into_the_log(model_folder: Path) -> None:
    with serving(model_folder) as client:
        named = client.post("/predict", json=TEXT, headers={"X-Request-ID": "order-66"})
        assert named.headers["x-request-id"] == "order-66"
        for bad in ("a b", 'x"}', "a" * 200, ""):
            assert client.post("/predict", json=TEXT, headers={"X-Request-ID": bad}).headers["x-request-id"] != bad
        refused = client.post("/predict", json={}, headers={"X-Request-ID": "order-67"})
        assert refused.json()["error"]["request_id"] == "order-67"


def test_the_log_has_one_line_a_request_and_never_a_text(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = "zebra quagga okapi"
    with caplog.at_level(logging.DEBUG), serving(model_folder, max_text_chars=200) as client:
        client.post("/predict", json={"text": secret})
        client.post("/predict", json={"text": f"{secret} penalties penalties"})  # the model fails on it
        client.post("/predict", json={"text": secret * 100})
        client.post("/predict", json={"txet": secret})
        client.post("/predict", content=secret)
        client.post("/predict/batch", json={"texts": [secret, ""]})
        client.post(f"/{secret}", json={"text": secret})
        client.post("/explain", json={"text": secret})
        client.post(
            "/predict/batch", content=json.dumps({"text": secret}), headers={"content-type": "application/x-ndjson"}
        )
    lines = [
        JsonLines().format(record) for record in caplog.records if record.name.startswith(("inference", "uvicorn"))
    ]
    requests = [json.loads(line) for line in lines if '"inference.requests"' in line]
    assert [line["status"] for line in requests] == [200, 500, 422, 422, 422, 422, 404, 200, 200]
    assert requests[0]["route"] == "/predict"
    assert requests[0]["texts"] == 1
    assert requests[6]["route"] == "unmatched"
    assert not [line for line in lines if any(word in line for word in secret.split())]
