"""Prometheus' page."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from inference.http.routes.dependencies import PartsDep

router = APIRouter(tags=["operations"])


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def get_metrics(request: Request, parts: PartsDep) -> Response:
    """Give all metrics in Prometheus' text format, or in OpenMetrics where the Accept header asks for it."""
    body, content_type = parts.metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})
