"""For who runs the server."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from inference.error_responses import REFUSALS, error_response
from inference.errors import ModelLoadError
from inference.routes.dependencies import PartsDep
from inference.routes.model import get_model
from inference.schemas import ErrorResponse, ModelResponse
from inference.security import is_own_machine

router = APIRouter(prefix="/admin", tags=["operations"])


@router.post(
    "/reload",
    response_model=ModelResponse,
    response_model_exclude_none=True,
    responses={
        401: REFUSALS[401],
        403: {"model": ErrorResponse, "description": "No API_KEY is set, and the request is not from this machine."},
        409: {"model": ErrorResponse, "description": "A model is being loaded already."},
        422: {"model": ErrorResponse, "description": "The model does not load; the one served before still is."},
        429: REFUSALS[429],
    },
)
async def reload_model(request: Request, parts: PartsDep) -> ModelResponse | Response:
    """Load what MODEL_CHECKPOINT names now, check it, and serve it; no request fails meanwhile.

    With API_KEY set it needs the key; without, it must be sent on this machine (no proxy, no foreign web page).
    """
    if not parts.api_key.is_set and not is_own_machine(request.scope):
        line = "set API_KEY and send it, or ask on the server's own machine"
        return error_response(request.scope, 403, "forbidden", line)
    if parts.served_model.is_loading:
        return error_response(request.scope, 409, "reload_running", "a model is being loaded already; ask /model later")
    try:
        await parts.served_model.load()
    except ModelLoadError as error:
        return error_response(request.scope, 422, "model_refused", str(error))
    return await get_model(parts)
