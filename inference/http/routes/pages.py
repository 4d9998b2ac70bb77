"""The pages for a browser: the front page, the demo and the documentation, which contact no server
but this one.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Response
from fastapi.responses import RedirectResponse
from starlette.exceptions import HTTPException

router = APIRouter(include_in_schema=False)

_TAKES_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))")
_WEB = Path(__file__).parents[2] / "web"
_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_PAGE = "index.html"
# How a key is sent, for the OpenAPI document.
_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


@dataclass(frozen=True, slots=True)
class _Asset:
    body: bytes
    gzipped: bytes
    headers: dict[str, str]


def _load_asset(path: Path) -> _Asset:
    body = path.read_bytes()
    headers = {
        "Content-Type": f"{_MEDIA_TYPES[path.suffix]}; charset=utf-8",
        # File names contain no version, so a browser asks each time, and mostly gets 304.
        "Cache-Control": "no-cache",
        "ETag": f'W/"{hashlib.sha256(body).hexdigest()[:16]}"',
        "Vary": "Accept-Encoding",
    }
    return _Asset(body, gzip.compress(body, mtime=0), headers)


# All in memory: a few dozen kilobytes, and no request names a path on disk.
_ASSETS = {
    path.name: _load_asset(path) for path in sorted(_WEB.iterdir()) if path.suffix in _MEDIA_TYPES
}

_OptionalHeader = Annotated[str, Header()]


# Redirects are relative, so that they work under any path that a proxy puts the server at.
@router.get("/")
async def show_front_door(accept: _OptionalHeader = "") -> RedirectResponse:
    """Send a visitor with a browser to the demo page, and any other client to the documentation."""
    return RedirectResponse("demo" if "text/html" in accept else "docs", headers={"Vary": "Accept"})


@router.get("/demo")
async def show_demo(
    accept_encoding: _OptionalHeader = "", if_none_match: _OptionalHeader = ""
) -> Response:
    return _answer(_PAGE, accept_encoding, if_none_match)


@router.get("/docs")
async def show_documentation(
    accept_encoding: _OptionalHeader = "", if_none_match: _OptionalHeader = ""
) -> Response:
    return _answer("docs.html", accept_encoding, if_none_match)


@router.get("/demo/{name}")
async def get_demo_file(
    name: str, accept_encoding: _OptionalHeader = "", if_none_match: _OptionalHeader = ""
) -> Response:
    return _answer(name, accept_encoding, if_none_match)


def _answer(name: str, accept_encoding: str, if_none_match: str) -> Response:
    asset = _ASSETS.get(name)
    if asset is None:
        raise HTTPException(404)
    if asset.headers["ETag"] in if_none_match:
        return Response(status_code=304, headers=asset.headers)
    if _TAKES_GZIP.search(accept_encoding):
        return Response(asset.gzipped, headers=asset.headers | {"Content-Encoding": "gzip"})
    return Response(asset.body, headers=asset.headers)


def document_api_key(app: FastAPI) -> None:
    """State in the OpenAPI document that all that changes or asks needs the key, and how to send
    it.
    """
    describe = app.openapi

    def describe_with_key() -> dict[str, Any]:
        document = describe()
        document["components"]["securitySchemes"] = _KEY_SCHEMES
        for methods in document["paths"].values():
            for method in {"post", "put", "delete"} & methods.keys():
                methods[method]["security"] = [{name: []} for name in _KEY_SCHEMES]
        return document

    app.openapi = describe_with_key
