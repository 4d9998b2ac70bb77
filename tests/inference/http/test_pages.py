from __future__ import annotations

import gzip

import httpx
import pytest

from inference.http.routes.pages import router

BROWSER_ACCEPT = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def test_the_front_door_leads_browsers_to_the_page_and_programs_to_the_documentation(server: httpx.Client) -> None:
    for accept, place in ((BROWSER_ACCEPT, "demo"), ("*/*", "docs"), ("application/json", "docs")):
        response = server.get("/", headers={"Accept": accept})
        assert response.is_redirect
        assert response.headers["location"] == place  # relative: right behind any proxy's path, too
        assert response.headers["vary"] == "Accept"
        assert server.get(f"/{place}").status_code == 200


def test_page_files_are_small_and_asked_for_only_once(server: httpx.Client) -> None:
    total = 0
    for path, media_type in (
        ("/demo", "text/html"),
        ("/demo/style.css", "text/css"),
        ("/demo/app.js", "text/javascript"),
        ("/demo/icon.svg", "image/svg+xml"),
    ):
        plain = server.get(path, headers={"Accept-Encoding": "identity"})
        assert plain.headers["content-type"] == f"{media_type}; charset=utf-8"
        assert "content-encoding" not in plain.headers
        with server.stream("GET", path, headers={"Accept-Encoding": "gzip"}) as packed:
            body = b"".join(packed.iter_raw())
        assert gzip.decompress(body) == plain.content
        refusing = server.get(path, headers={"Accept-Encoding": "gzip;q=0, identity"})
        assert "content-encoding" not in refusing.headers
        total += len(body)
        again = server.get(path, headers={"If-None-Match": plain.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert server.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
        head = server.head(path)
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", plain.headers["etag"])
    assert total < 20_000


@pytest.mark.parametrize("name", ["nothing.js", "..%2Froutes%2Fpages.py", "..%2F..%2FREADME.md", "%00", "a/b.js", "."])
def test_no_other_file_is_ever_answered(server: httpx.Client, name: str) -> None:
    response = server.get(f"/demo/{name}", headers={"Accept": "*/*"}, follow_redirects=True)
    assert "import" not in response.text
    assert response.status_code == 404 or response.url.path in ("/demo", "/docs")


def test_pages_stay_out_of_the_interface_description() -> None:
    assert not [route for route in router.routes if route.include_in_schema]
