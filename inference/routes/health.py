"""Whether this process can answer."""

from __future__ import annotations

from fastapi import APIRouter, Response

from inference.error_responses import RETRY_AFTER_SECONDS
from inference.routes.dependencies import ServedModelDep
from inference.schemas import HealthResponse

router = APIRouter(tags=["health"])


@router.get(
    "/health",
    response_model_exclude_none=True,
    responses={503: {"model": HealthResponse, "description": "No model is loaded; `error` says why."}},
)
async def get_health(served_model: ServedModelDep, response: Response) -> HealthResponse:
    """Say whether a model is loaded, and if not, why."""
    model = served_model.model
    if model is None:
        response.status_code = 503
        response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return HealthResponse(
        status="healthy" if model else "unavailable",
        model_loaded=model is not None,
        model=str(served_model.path),
        labels=model.labels if model else None,
        error=served_model.error,
    )
