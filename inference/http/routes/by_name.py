"""Routes that answer with the default model, and below `/models/{name}` with the model of this
name.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request

from inference.http.routes.json_route import Endpoint
from inference.http.schemas import ErrorResponse

UNKNOWN_MODEL: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorResponse, "description": "No model of this name is served."}
}
_Name = Annotated[str, Path(description="The name of a served model, as in GET /models.")]


async def name_in_path(request: Request) -> str | None:
    return request.path_params.get("name")


async def _document(name: _Name) -> None: ...


# The name in the path, None without one. A plain `str | None` would be documented as a parameter of
# the query; a `JsonRoute` passes the name itself, and solves no dependency.
ModelName = Annotated[str | None, Depends(name_in_path)]


def add_by_name(router: APIRouter, path: str, endpoint: Endpoint, **options: Any) -> None:
    """Add a POST route for the default model, and the same below `/models/{name}`."""
    router.add_api_route(path, endpoint, methods=["POST"], **options)
    options["responses"] = UNKNOWN_MODEL | options.get("responses", {})
    router.add_api_route(
        f"/models/{{name}}{path}",
        endpoint,
        methods=["POST"],
        dependencies=[Depends(_document)],
        **options,
    )
