"""What a visitor with a browser meets."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import RedirectResponse

router = APIRouter(include_in_schema=False)


@router.get("/")
async def show_documentation() -> RedirectResponse:
    """Send a visitor to the interactive documentation."""
    return RedirectResponse("/docs")
