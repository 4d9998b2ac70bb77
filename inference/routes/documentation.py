"""The interactive documentation, with a policy that lets its page load what it is made of."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.openapi.docs import get_swagger_ui_html

from inference.security import DOCS_POLICY

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def show_documentation() -> Response:
    """Answer with the interactive page of the API."""
    page = get_swagger_ui_html(openapi_url="openapi.json", title="DistriNews")
    page.headers["Content-Security-Policy"] = DOCS_POLICY
    return page
