"""Routes whose JSON body is read, checked and answered by hand: FastAPI documents them, and costs them a third."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from inference.error_responses import describe_invalid, error_response

Model = TypeVar("Model", bound=BaseModel)
Handlers = Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]
Endpoint = Callable[..., Awaitable[Mapping[str, Any] | list[Any] | Response]]


class JsonRoute(APIRoute):
    """A route `async def endpoint(request: Request, body: SomeModel, ...)`, with path parameters as text.

    The endpoint returns what becomes JSON, in the shape that its response model documents, or a response.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        endpoint: Endpoint = self.endpoint
        assert self.body_field is not None, f"{self.path}: a JsonRoute needs a body"
        model: type[BaseModel] = self.body_field.field_info.annotation

        async def answer(request: Request) -> Response:
            try:
                body = self.parse(model, await read_body(request), request)
            except ValidationError as error:
                return error_response(request.scope, 422, "invalid_request", f"body: {describe_invalid(error)}")
            content = await endpoint(request=request, body=body, **request.path_params)
            if isinstance(content, Response):
                return content
            return Response(to_json(content), media_type="application/json")

        self.answer = answer
        return answer

    def parse(self, model: type[Model], body: bytes, request: Request) -> Model:
        """Check a body against its model; as `parse_json`."""
        return parse_json(model, body)


async def read_body(request: Request) -> bytes:
    """Read the whole body, nearly always one piece; the gate counts it and gives it its time."""
    message = await request.receive()
    body = message.get("body", b"")
    while message.get("more_body", False):
        message = await request.receive()
        body += message.get("body", b"")
    return body


class ShortCut:
    """Takes requests straight to the JSON routes of fixed paths: what FastAPI does around a route costs as much as one.

    It knows the same routes and the same error handlers, so that nothing but the way is another.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[JsonRoute], handlers: Handlers) -> None:
        self.app = app
        self._routes = {route.path: route for route in routes if not route.param_convertors}
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive, send)
        try:
            response = await route.answer(request)
        except Exception as error:
            handler = self._handlers.get(type(error))
            if handler is None:
                raise
            response = await handler(request, error)
        await response(scope, receive, send)


def parse_json(model: type[Model], body: bytes) -> Model:
    """Check a JSON body against its model.

    Raises:
        ValidationError: It is no JSON or does not fit.
        HTTPException: 400, it is not UTF-8 or nested too deep to be read.
    """
    try:
        return model.__pydantic_validator__.validate_json(body)
    except ValidationError as error:
        if error.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid":
            raise
        refusal = error
    # The fast parser refuses lone surrogates ("\ud83d"), which Python's reads; texts with them are cleaned like others.
    try:
        content = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise HTTPException(400, "the body is not UTF-8") from None
    except RecursionError:
        raise HTTPException(400, "the body is nested too deep to be read") from None
    except ValueError:
        raise refusal from None
    return model.__pydantic_validator__.validate_python(content)
