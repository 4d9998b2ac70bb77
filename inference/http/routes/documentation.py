"""What the OpenAPI document says beyond the routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


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
