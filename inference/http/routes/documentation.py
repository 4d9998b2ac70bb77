"""The interactive documentation, with a content policy that lets its page load what it needs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.openapi.docs import get_swagger_ui_html

from inference.http.security import DOCS_POLICY

router = APIRouter(include_in_schema=False)

_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


@router.get("/docs")
async def show_documentation() -> Response:
    """Answer with the interactive page of the API."""
    page = get_swagger_ui_html(openapi_url="openapi.json", title="DistriNews")
    page.headers["Content-Security-Policy"] = DOCS_POLICY
    return page


def document_api_key(app: FastAPI) -> None:
    """State in the OpenAPI document that every POST needs the key, and how to send it."""
    describe = app.openapi

    def describe_with_key() -> dict[str, Any]:
        document = describe()
        document["components"]["securitySchemes"] = _KEY_SCHEMES
        for path in document["paths"].values():
            if "post" in path:
                path["post"]["security"] = [{name: []} for name in _KEY_SCHEMES]
        return document

    app.openapi = describe_with_key
