"""Prefixes of proxies, slashes at the end, and HEAD: the same answers and the same policies as for the plain path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from inference.http.paths import route_path
from tests.inference.servers import metric, serving

TEXT = {"text": "Oil prices rise"}
PROBES = ("/livez", "/readyz", "/health", "/v2/health/live", "/v2/health/ready")
PAGES = ("/metrics", "/model", "/v2", "/v2/models/tiny", "/v2/models/tiny/ready", "/docs", "/demo", "/openapi.json")


# uvicorn puts the prefix before the path that it gets, from a proxy that removes it or from one that leaves it there.
@pytest.fixture(scope="module", params=["", "/api"], ids=["removed", "left in place"])
def below(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[tuple[httpx.Client, str]]:
    """A limited server below /api, and what its proxy puts before each path."""
    with serving(model_folder, root_path="/api", rate_limit_per_s=0.5, api_key="key") as client:
        yield client, request.param


def test_below_a_prefix_probes_are_never_limited(below: tuple[httpx.Client, str]) -> None:
    client, prefix = below
    for path in PROBES:
        assert {client.get(prefix + path).status_code for _ in range(5)} == {200}


def test_below_a_prefix_each_request_is_counted_by_its_route(below: tuple[httpx.Client, str]) -> None:
    client, prefix = below
    before = metric_below(client, prefix, route="/predict", status="401")
    assert client.post(f"{prefix}/predict", json=TEXT).json()["error"]["code"] == "unauthorized"  # refused, not routed
    assert metric_below(client, prefix, route="/predict", status="401") == before + 1
    assert metric_below(client, prefix, route="unmatched") == 0


def metric_below(client: httpx.Client, prefix: str, **labels: str) -> float:
    with httpx.Client(base_url=f"{client.base_url}{prefix}") as inner:
        return metric(inner, "requests_total", **labels)


def test_below_a_prefix_errors_have_the_shape_of_their_protocol(below: tuple[httpx.Client, str]) -> None:
    client, prefix = below
    assert isinstance(client.get(f"{prefix}/v2/models/another").json()["error"], str)
    assert isinstance(client.get(f"{prefix}/v3").json()["error"], dict)


def test_below_a_prefix_a_reload_does_not_wait_behind_the_queue_and_texts_take_the_short_way(
    model_folder: Path,
) -> None:
    with serving(model_folder, root_path="/api", api_key="key") as client:
        headers = {"X-API-Key": "key"}
        for prefix in ("", "/api"):
            assert client.post(f"{prefix}/predict", json=TEXT, headers=headers).status_code == 200
            assert client.post(f"{prefix}/admin/reload", headers=headers).status_code == 200
        assert client.get("/openapi.json").json()["servers"] == [{"url": "/api"}]


@pytest.mark.parametrize("prefix", ["/predict", "/demo", "/v2"])
def test_a_prefix_that_is_a_route_s_name_hides_no_route(model_folder: Path, prefix: str) -> None:
    with serving(model_folder, root_path=prefix) as client:
        assert client.post("/predict", json=TEXT).status_code == 200
        assert client.post("/predict/batch", json={"texts": ["oil"]}).status_code == 200
        assert client.get("/demo/style.css").status_code == 200
        assert client.get("/v2/health/ready").status_code == 200


@pytest.mark.parametrize("prefix", ["/api", "/api/", "/a/b"])
def test_the_path_of_a_route_has_no_prefix(prefix: str) -> None:
    for path in ("/predict", "/", "/v2/models/api"):
        assert route_path({"path": prefix + path, "root_path": prefix}) == path
        assert route_path({"path": path, "root_path": ""}) == path
    assert route_path({"path": "/apiary", "root_path": "/api"}) == "/apiary"


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("/predict/", "../predict"),
        ("/demo/", "../demo"),
        ("/v2/health/ready/?a=b", "../ready?a=b"),
        ("/a%0d%0ax: y/", "../a%0D%0Ax%3A%20y"),
        ("//evil.example/", "../evil.example"),
    ],
)
def test_a_slash_too_many_is_redirected_within_whatever_prefix_and_scheme(
    model_folder: Path, path: str, location: str
) -> None:
    with serving(model_folder) as client:
        response = client.request("POST", f"{client.base_url}{path}", headers={"X-Forwarded-Proto": "https"})
        assert (response.status_code, response.headers["location"]) == (307, location)


def test_a_slash_too_many_keeps_the_body_and_an_unknown_path_stays_unknown(model_folder: Path) -> None:
    with serving(model_folder) as client:
        assert client.post("/predict/", json=TEXT, follow_redirects=True).status_code == 200
        assert client.get("/nothing/", follow_redirects=True).status_code == 404
        assert client.get("/v2/models/another/", follow_redirects=True).json()["error"].startswith("no model of this")


def test_head_is_answered_wherever_get_is(model_folder: Path) -> None:
    with serving(model_folder) as client:
        for path in (*PROBES, *PAGES):
            head, get = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (get.status_code, b"")
            assert head.headers["content-type"] == get.headers["content-type"]
        assert metric(client, "requests_total", route="/livez", method="HEAD", status="200") == 1
        refused = client.head("/predict")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        for path in ("/livez", "/demo"):
            assert client.post(path).headers["allow"] == "GET, HEAD"
        operations = client.get("/openapi.json").json()["paths"].values()
        assert {method for methods in operations for method in methods} == {"get", "post", "put", "delete"}
