"""Several models: which there are, and how one is put in the place of another or removed while
requests run.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from common.errors import ModelLoadError
from inference.batching.served_model import ServedModel
from inference.http.error_responses import REFUSALS, error_response
from inference.http.routes.answers import model_named, require_named
from inference.http.routes.by_name import UNKNOWN_MODEL
from inference.http.routes.json_route import JsonRoute
from inference.http.schemas import ErrorResponse, ListedModel, ModelPath, ModelResponse
from inference.http.server_parts import Parts, PartsDep, parts_of

# What both routes that change something may answer.
_REFUSALS: dict[int | str, dict[str, Any]] = {
    **{status: REFUSALS[status] for status in (401, 429)},
    403: {
        "model": ErrorResponse,
        "description": "No key is set, or there is no folder of models, or it would remove the "
        "default model; or a page of another site asks.",
    },
    409: {"model": ErrorResponse, "description": "A model is being loaded already."},
}

router = APIRouter(prefix="/models", tags=["model"])


@router.get("", response_model_exclude_none=True)
async def list_models(parts: PartsDep) -> list[ListedModel]:
    """List the models by name, the default one first, and say which can answer."""
    return [_listed(parts, model) for model in parts.models.all.values()]


def _listed(parts: Parts, model: ServedModel) -> ListedModel:
    loaded = model.current and model.current.model
    error = parts.why_not_ready(model)
    return ListedModel(
        name=model.name,
        default=model is parts.served_model,
        ready=error is None,
        error=error,
        labels=loaded and loaded.labels,
        engine=loaded and loaded.info["engine"],
        revision=loaded and loaded.info["revision"],
    )


@router.get(
    "/{name}",
    responses=UNKNOWN_MODEL | {503: REFUSALS[503]},
    response_model_exclude_none=True,
)
async def get_model_by_name(name: str, parts: PartsDep) -> ModelResponse:
    """Describe the model of this name, as `/model` does the default one."""
    served = require_named(parts, name)
    return ModelResponse.of(served.model, parts.settings, await parts.observed(served))


async def put_model(request: Request, body: ModelPath, name: str) -> dict[str, Any] | Response:
    """Load a model of MODELS_FOLDER, check it, and serve it under this name; no request fails
    meanwhile.

    If there is a model of this name, it answers until the new one is loaded, and then what it has
    accepted. Needs a key, as a reload does.
    """
    if refusal := _change_refusal(request):
        return refusal
    try:
        model = await parts_of(request).models.put(name, body.path)
    except ModelLoadError as error:
        return error_response(request.scope, 422, "model_refused", str(error))
    return ModelResponse.of(model, parts_of(request).settings).model_dump(exclude_none=True)


router.add_api_route(
    "/{name}",
    put_model,
    methods=["PUT"],
    response_model=ModelResponse,
    responses=_REFUSALS
    | {status: REFUSALS[status] for status in (400, 408, 413, 415, 503)}
    | {
        422: {
            "model": ErrorResponse,
            "description": "The model does not load, or the path is not in MODELS_FOLDER; what "
            "was served before still is.",
        }
    },
    route_class_override=JsonRoute,
)


@router.delete(
    "/{name}", status_code=204, response_class=Response, responses=UNKNOWN_MODEL | _REFUSALS
)
async def delete_model(request: Request, name: str, parts: PartsDep) -> Response:
    """Answer what the model of this name has accepted, and serve it no more.

    Needs a key, as a reload does. The default model can only be replaced.
    """
    if refusal := _change_refusal(request):
        return refusal
    if model_named(parts, name) is parts.served_model:
        line = f"{name} is the default model, which can only be replaced; PUT another one there"
        return error_response(request.scope, 403, "forbidden", line)
    parts.models.remove(name)
    return Response(status_code=204)


def _change_refusal(request: Request) -> Response | None:
    parts = parts_of(request)
    if not parts.api_keys.is_set:
        line = "a change of models needs a key: set API_KEY and send it"
        return error_response(request.scope, 403, "forbidden", line)
    if parts.models.folder is None:
        line = "this server has no folder to take models from; start it with MODELS_FOLDER"
        return error_response(request.scope, 403, "forbidden", line)
    if parts.models.is_changing:
        line = "a model is being loaded already; ask /models later"
        return error_response(request.scope, 409, "reload_running", line)
    return None
