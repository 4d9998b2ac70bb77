"""Routes for operators: whether this process can answer, what it serves, its metrics, and how to
reload the model.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from common.errors import ModelLoadError
from common.problem_types import REGRESSION
from inference.http.error_responses import REFUSALS, RETRY_AFTER_SECONDS, error_response
from inference.http.schemas import ErrorResponse, HealthResponse, ModelResponse, ProbeResponse
from inference.http.server_parts import PartsDep
from inference.http.worker_messages import Reloaded, ReloadRefused, ReloadRunning
from inference.metrics import render_merged

router = APIRouter()


@router.get(
    "/health",
    tags=["health"],
    response_model_exclude_none=True,
    responses={
        503: {
            "model": HealthResponse,
            "description": "Texts cannot be classified now; `error` says why.",
        }
    },
)
async def get_health(parts: PartsDep, response: Response) -> HealthResponse:
    """Say whether texts can be classified, and if not, why."""
    current = parts.served_model.current
    error = parts.unready
    if error is not None:
        response.status_code = 503
        response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return HealthResponse(
        status="healthy" if error is None else "unavailable",
        model_loaded=current is not None,
        model=parts.served_model.public_name,
        labels=current.model.labels
        if current and current.model.answering.problem_type is not REGRESSION
        else None,
        error=error,
    )


@router.get(
    "/livez",
    tags=["health"],
    response_model_exclude_none=True,
    responses={
        503: {"model": ProbeResponse, "description": "Start the process again; `reason` says why."}
    },
)
async def get_liveness(parts: PartsDep, response: Response) -> ProbeResponse:
    """Say that the process answers, and that no error holds it which only a restart ends; if this
    fails, restart it.
    """
    return _probe(response, "alive", "dead", parts.dead)


@router.get(
    "/readyz",
    tags=["health"],
    response_model_exclude_none=True,
    responses={
        503: {"model": ProbeResponse, "description": "Send requests elsewhere; `reason` says why."}
    },
)
async def get_readiness(parts: PartsDep, response: Response) -> ProbeResponse:
    """Say whether requests should come here: a model is loaded, its workers run, and the process is
    not leaving.
    """
    probe = _probe(response, "ready", "not_ready", parts.unready)
    if probe.reason is not None:  # unlike a dead process, this one may be ready again soon
        response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return probe


def _probe(response: Response, good: str, bad: str, reason: str | None) -> ProbeResponse:
    if reason is None:
        return ProbeResponse(status=good)
    response.status_code = 503
    return ProbeResponse(status=bad, reason=reason)


@router.get(
    "/model", tags=["model"], responses={503: REFUSALS[503]}, response_model_exclude_none=True
)
async def get_model(parts: PartsDep) -> ModelResponse:
    """Describe the default model: where it comes from, what it can say, how good it is,
    and what runs it.
    """
    served = parts.served_model.require()
    described = ModelResponse.of(served.model, parts.settings, await parts.observed(served))
    described.shadow = served.shadow.record if served.shadow else None
    return described


@router.get(
    "/metrics",
    tags=["operations"],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)
async def get_metrics(request: Request, parts: PartsDep) -> Response:
    """Give all metrics in Prometheus' text format, or in OpenMetrics where the Accept header asks
    for it.
    """
    accept = request.headers.get("accept", "")
    if parts.line is None:
        body, content_type = parts.metrics.render(accept)
    else:
        body, content_type = render_merged(await parts.line.metrics_of_all(), accept)
    return Response(body, headers={"Content-Type": content_type})


@router.post(
    "/admin/reload",
    tags=["operations"],
    response_model=ModelResponse,
    response_model_exclude_none=True,
    responses={
        401: REFUSALS[401],
        403: {
            "model": ErrorResponse,
            "description": "No key is set, so only SIGHUP reloads; or a page of another site asks.",
        },
        409: {"model": ErrorResponse, "description": "A model is being loaded already."},
        422: {
            "model": ErrorResponse,
            "description": "The model does not load; the one served before still is.",
        },
        429: REFUSALS[429],
    },
)
async def reload_model(request: Request, parts: PartsDep) -> ModelResponse | Response:
    """Load what MODEL_CHECKPOINT names now, check it, and serve it; no request fails meanwhile.

    Needs a key. Without one, a call could come from a proxy on this machine, or from a web page
    that a browser on this machine shows; SIGHUP cannot.
    """
    if not parts.api_keys.is_set:
        line = "a reload needs a key: set API_KEY and send it, "
        line += "or send the process SIGHUP (kill -HUP PID)"
        return error_response(request.scope, 403, "forbidden", line)
    if parts.line is not None:
        outcome = await parts.line.reload()
    elif parts.models.is_changing:
        outcome = ReloadRunning()
    else:
        try:
            await parts.models.load()
            return ModelResponse.of(parts.served_model.require().model, parts.settings)
        except ModelLoadError as error:
            outcome = ReloadRefused(str(error))
    match outcome:
        case ReloadRunning():
            line = "a model is being loaded already; ask /model later"
            return error_response(request.scope, 409, "reload_running", line)
        case ReloadRefused(reason):
            return error_response(request.scope, 422, "model_refused", reason)
        case Reloaded(model):
            return model
