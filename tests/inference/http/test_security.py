from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from inference.app import create_app
from inference.errors import RateLimitedError, SettingsError
from inference.http.admission import MAX_CLIENTS, Allowance, ApiKeys, RateLimiter, RequestLimits
from inference.http.request_log import JsonLines
from inference.settings import Settings
from tests.inference.servers import ThreadedServer, metric, serving
from tests.processes import wait_until

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


@pytest.mark.parametrize(
    "headers",
    [
        {},  # what nginx' plain proxy_pass on the same machine sends: no header of its own, and the upstream's name
        {
            "Host": "evil.example:7860",
            "Origin": "http://evil.example:7860",
        },  # a page whose name now leads to this server
        {"Host": "localhost:7860", "Origin": "http://localhost:7860"},
        {"X-Forwarded-For": "203.0.113.7"},
        {"Origin": "null"},
        {"X-API-Key": "any"},
    ],
)
def test_without_a_key_no_request_reloads_whatever_it_says_of_itself(
    model_folder: Path, headers: dict[str, str]
) -> None:
    with serving(model_folder) as client:
        refused = client.post("/admin/reload", headers=headers)
        assert (refused.status_code, _code(refused)) == (403, "forbidden")
        assert "SIGHUP" in refused.json()["error"]["message"]


def test_with_its_key_a_request_reloads(model_folder: Path) -> None:
    with serving(model_folder, api_key="open sesame") as client:
        assert client.post("/admin/reload", headers={"X-API-Key": "open"}).status_code == 401
        assert client.post("/admin/reload", headers={"X-API-Key": "open sesame"}).status_code == 200


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


def test_a_page_of_another_site_computes_nothing_here_unless_its_origin_is_listed(model_folder: Path) -> None:
    page = {"Sec-Fetch-Site": "cross-site", "Origin": "https://news.example", "Content-Type": "text/plain"}
    with serving(model_folder) as client:
        for path in ("/predict", "/predict/batch", "/hub", "/admin/reload"):
            refused = client.post(path, json=TEXT, headers=page)
            assert (refused.status_code, _code(refused)) == (403, "forbidden")
        for site in ("same-origin", "same-site", "none"):
            assert client.post("/predict", json=TEXT, headers=page | {"Sec-Fetch-Site": site}).status_code == 200
        assert client.get("/demo", headers=page).status_code == 200  # a link to it
    for listed in ("https://news.example", "*"):
        with serving(model_folder, cors_origins=listed) as client:
            assert client.post("/predict", json=TEXT, headers=page).status_code == 200


def test_what_everybody_may_read_names_no_folder_of_the_machine(model_folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret" / "model"
    secret.mkdir(parents=True)
    app = create_app(Settings(model_checkpoint=secret))
    with ThreadedServer(app).running() as client:
        answers = [client.get(path) for path in ("/health", "/readyz", "/model", "/v2/models/model")]
        answers.append(client.post("/predict", json=TEXT))
    for answer in answers:
        assert answer.status_code == 503
        assert "secret" not in answer.text
    assert answers[0].json()["error"].startswith("model: not a complete model folder")


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


@pytest.mark.parametrize(
    ("path", "body", "least_wait_s"),
    [
        ("/predict/batch", {"texts": ["oil"] * 64}, 25),  # of a bucket of 4, at 2 per second
        ("/hub", {"inputs": ["oil"] * 64}, 25),
        ("/classify", {"input": ["oil"] * 64}, 25),
        (
            "/v2/models/tiny/infer",
            {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [64], "data": ["oil"] * 64}]},
            25,
        ),
        ("/explain", {"text": "oil " * 63}, 8),  # the model reads 24 words
    ],
)
def test_the_rate_counts_texts_and_not_requests(model_folder: Path, path: str, body: dict, least_wait_s: int) -> None:
    with serving(model_folder, rate_limit_per_s=2) as client:
        assert client.post(path, json=body).status_code == 200  # more than a bucket holds goes through once
        refused = client.post("/predict", json=TEXT)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= least_wait_s


def test_a_stream_over_its_rate_waits_and_is_answered(model_folder: Path) -> None:
    lines = "".join(json.dumps({"text": f"oil {i}"}) + "\n" for i in range(80))
    with serving(model_folder, rate_limit_per_s=30) as client:
        answer = client.post("/predict/batch", content=lines, headers={"content-type": "application/x-ndjson"})
        assert [json.loads(line).get("error") for line in answer.text.splitlines()] == [None] * 80
        assert client.post("/predict", json=TEXT).status_code == 429


def _first_refusal(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """Ask until the rate is used up, which a slow machine needs some more requests for."""
    return next(answer for answer in (ask() for _ in range(1000)) if answer.status_code == 429)


def test_pages_and_metrics_are_limited_too_and_probes_never(model_folder: Path) -> None:
    with serving(model_folder, rate_limit_per_s=1) as client:
        assert client.get("/model").status_code == 200
        assert _first_refusal(lambda: client.get("/metrics")).headers["retry-after"] == "1"
        for path in ("/livez", "/readyz", "/health", "/v2/health/live", "/v2/health/ready"):
            assert {client.get(path).status_code for _ in range(30)} == {200}
        assert client.post("/predict", json=TEXT).status_code == 200  # texts have a bucket of their own


def test_wrong_keys_are_limited_before_a_key_is_looked_at(model_folder: Path) -> None:
    with serving(model_folder, api_key="open sesame", rate_limit_per_s=0.5) as client:
        right, wrong = {"X-API-Key": "open sesame"}, {"X-API-Key": "open"}
        assert client.post("/predict", json=TEXT, headers=wrong).status_code == 401
        # From here on the right one is refused as well: else the guess that is answered differently is the key.
        for headers in (wrong, right, {}):
            refused = client.post("/predict", json=TEXT, headers=headers)
            assert (refused.status_code, _code(refused)) == (429, "rate_limited")
            assert int(refused.headers["retry-after"]) >= 1


def test_wrong_keys_are_limited_without_a_rate_limit_too(model_folder: Path) -> None:
    with serving(model_folder, api_key="open sesame") as client:
        assert {client.post("/predict", json=TEXT).status_code for _ in range(50)} == {401}  # none is a guess
        refused = _first_refusal(lambda: client.post("/predict", json=TEXT, headers={"X-API-Key": "open"}))
        assert _code(refused) == "rate_limited"


def test_each_of_many_keys_in_one_request_is_a_guess_and_no_more_than_two_are_looked_at(model_folder: Path) -> None:
    right, wrong = ("X-API-Key", "open sesame"), ("Authorization", "Bearer open")
    with serving(model_folder, api_key="open sesame", rate_limit_per_s=5) as client:
        for headers in ([right, wrong], [wrong, right]):
            assert client.post("/predict", json=TEXT, headers=headers).status_code == 200
        assert client.post("/predict", json=TEXT, headers=[wrong, wrong, right]).status_code == 401
        assert client.post("/predict", json=TEXT, headers=[wrong] * 100).status_code == 401
        refused = client.post("/predict", json=TEXT, headers=[right])
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 15  # 103 guesses, of which 10 were free, at 5 per second


def test_each_key_has_a_rate_of_its_own(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufefffirst\n\n# one for each client\nsecond\nthird 1000\n")  # as Notepad writes it
    with serving(model_folder, api_keys_file=file, api_key="zeroth", rate_limit_per_s=0.5) as client:
        for key in ("zeroth", "first", "second"):
            statuses = [client.post("/predict", json=TEXT, headers={"X-API-Key": key}).status_code for _ in range(3)]
            assert statuses == [200, 429, 429]
        statuses = [client.post("/predict", json=TEXT, headers={"X-API-Key": "third"}).status_code for _ in range(20)]
        assert set(statuses) == {200}


def _admits(client: httpx.Client, key: str) -> bool:
    return client.post("/predict", json=TEXT, headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_keys_are_replaced_without_a_restart_and_a_lost_file_opens_nothing(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    with serving(model_folder, api_keys_file=file) as client:
        assert _admits(client, "old")
        assert not _admits(client, "new")
        (tmp_path / "next").write_text("old\nnew\n")
        (tmp_path / "next").rename(file)
        wait_until(lambda: _admits(client, "new"))
        assert _admits(client, "old")
        for broken in ("", "# none\n", "new one two\n", "new -1\n", None):
            file.write_text("new")
            wait_until(lambda: _admits(client, "new"))
            file.unlink() if broken is None else file.write_text(broken)
            wait_until(lambda: not _admits(client, "new"))
            assert client.post("/predict", json=TEXT).status_code == 401
            assert client.post("/admin/reload").status_code == 401


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "is not readable"),
        ("\n# none\n", "holds no key; write one key per line"),
        ("good\nsecret fast\n", "line 2: must be KEY, or KEY TEXTS_PER_SECOND above 0"),
        ("secret 0\n", "line 1: must be KEY"),
        ("secret nan\n", "line 1: must be KEY"),
    ],
)
def test_a_file_without_sound_keys_starts_no_server(tmp_path: Path, content: str | None, line: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=line) as caught:
        create_app(Settings(api_keys_file=file))
    assert "secret" not in str(caught.value)


def test_the_rate_is_counted_by_address_and_by_household(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("inference.http.admission.time.monotonic", lambda: now)
    limits = RequestLimits(ApiKeys(), per_second=2)

    def waits(host: str) -> float:
        judged = limits.judge({"type": "http", "method": "POST", "path": "/predict", "client": (host, 1)})
        return 0 if isinstance(judged, Allowance) else judged[3]

    assert [waits("192.0.2.1") for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert waits("192.0.2.2") == 0
    assert [waits(f"2001:db8::{i}") for i in range(5)] == [0, 0, 0, 0, 0.5]
    assert waits("2001:db8:0:1::1") == 0
    # An IPv4 address has one bucket, however it is written; its neighbours have their own.
    for written in ("::ffff:192.0.2.2", "::FFFF:c000:202", "64:ff9b::192.0.2.2"):
        assert waits(written) == 0
    assert waits("::ffff:192.0.2.2") == waits("192.0.2.2") == 0.5
    assert waits("::ffff:192.0.2.3") == 0
    now += 0.25
    assert waits("192.0.2.1") == 0.25
    now += 0.25
    assert [waits("192.0.2.1") for _ in range(2)] == [0, 0.5]


def test_a_debt_is_paid_off_before_more_is_taken() -> None:
    limiter = RateLimiter(per_second=0.001)
    allowance = Allowance(limiter, "client")
    limiter.take("client", 1)
    allowance.require()  # the request has paid for itself, and what it brings may go into debt
    allowance.take(63)
    with pytest.raises(RateLimitedError) as caught:
        allowance.require()
    assert caught.value.retry_after_s == pytest.approx(63_000, rel=0.01)


def test_the_rate_limiter_remembers_a_bounded_number_of_clients() -> None:
    limiter = RateLimiter(per_second=0.001)
    for i in range(MAX_CLIENTS + 5):
        assert limiter.wait_s(f"client {i}", 1) == 0
        limiter.take(f"client {i}", 1)
    assert limiter.wait_s(f"client {MAX_CLIENTS}", 1) > 0
    assert limiter.wait_s("client 0", 1) == 0


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
