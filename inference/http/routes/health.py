"""Whether this process can answer, for people and for orchestrators and load balancers."""

from __future__ import annotations

from fastapi import APIRouter, Response

from inference.http.error_responses import RETRY_AFTER_SECONDS
from inference.http.routes.dependencies import PartsDep
from inference.http.schemas import HealthResponse, ProbeResponse

router = APIRouter(tags=["health"])


def _not_now(response: Response) -> None:
    response.status_code = 503
    response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)


@router.get(
    "/health",
    response_model_exclude_none=True,
    responses={503: {"model": HealthResponse, "description": "Texts cannot be classified now; `error` says why."}},
)
async def get_health(parts: PartsDep, response: Response) -> HealthResponse:
    """Say whether texts can be classified, and if not, why."""
    current = parts.served_model.current
    error = parts.unready
    if error is not None:
        _not_now(response)
    return HealthResponse(
        status="healthy" if error is None else "unavailable",
        model_loaded=current is not None,
        model=str(parts.served_model.path),
        labels=current.model.labels if current else None,
        error=error,
    )


@router.get(
    "/livez",
    response_model_exclude_none=True,
    responses={503: {"model": ProbeResponse, "description": "Start the process again; `reason` says why."}},
)
async def get_liveness(parts: PartsDep, response: Response) -> ProbeResponse:
    """Say that the process answers, and that no error holds it which only a restart ends; if this fails, restart it."""
    reason = parts.dead
    if reason is None:
        return ProbeResponse(status="alive")
    response.status_code = 503
    return ProbeResponse(status="dead", reason=reason)


@router.get(
    "/readyz",
    response_model_exclude_none=True,
    responses={503: {"model": ProbeResponse, "description": "Send requests elsewhere; `reason` says why."}},
)
async def get_readiness(parts: PartsDep, response: Response) -> ProbeResponse:
    """Say whether requests should come here: a model is loaded, its workers run, and the process is not leaving."""
    reason = parts.unready
    if reason is None:
        return ProbeResponse(status="ready")
    _not_now(response)
    return ProbeResponse(status="not_ready", reason=reason)
