"""Routes for operators."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from common.errors import ModelLoadError
from inference.http.error_responses import REFUSALS, error_response
from inference.http.routes.dependencies import PartsDep
from inference.http.routes.model import get_model
from inference.http.schemas import ErrorResponse, ModelResponse

router = APIRouter(prefix="/admin", tags=["operations"])


@router.post(
    "/reload",
    response_model=ModelResponse,
    response_model_exclude_none=True,
    responses={
        401: REFUSALS[401],
        403: {"model": ErrorResponse, "description": "No key is set, so only SIGHUP reloads."},
        409: {"model": ErrorResponse, "description": "A model is being loaded already."},
        422: {"model": ErrorResponse, "description": "The model does not load; the one served before still is."},
        429: REFUSALS[429],
    },
)
async def reload_model(request: Request, parts: PartsDep) -> ModelResponse | Response:
    """Load what MODEL_CHECKPOINT names now, check it, and serve it; no request fails meanwhile.

    Needs a key. Without one, a call could come from a proxy on this machine, or from a web page that a browser on this
    machine shows; SIGHUP cannot.
    """
    if not parts.api_keys.is_set:
        line = "a reload needs a key: set API_KEY and send it, or send the process SIGHUP (kill -HUP PID)"
        return error_response(request.scope, 403, "forbidden", line)
    if parts.served_model.is_loading:
        return error_response(request.scope, 409, "reload_running", "a model is being loaded already; ask /model later")
    try:
        await parts.served_model.load()
    except ModelLoadError as error:
        return error_response(request.scope, 422, "model_refused", str(error))
    return await get_model(parts)
