"""Routes whose JSON bodies are read, validated and answered by hand; through FastAPI they would
cost a third more.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from inference.errors import RefusedTextError
from inference.http.error_responses import describe_invalid, error_response
from inference.http.paths import route_path
from inference.http.server_parts import parts_of
from inference.settings import Settings

# Whatever the settings, a body this small holds neither too many values nor too long a string.
SMALL_BODY_BYTES = 1024
# Bytes besides its strings; enough for indented JSON.
_BYTES_PER_VALUE = 64
# Python's parser takes up to nine times a body's size in memory, so it reads no larger body.
_LARGEST_SECOND_PARSE_BYTES = 4 * 2**20
# No integer of a request has this many digits, and parsing one takes time with the square of them.
_MOST_DIGITS = 300
# Where a field belongs that was sent to the wrong route.
_PATHS = {
    "texts": "/predict/batch",
    "text": "/predict",
    "inputs": "/hub",
    "input": "/classify",
}
# Items between two chances for other tasks on the event loop.
_LONGEST_HOLD_S = 0.005

Model = TypeVar("Model", bound=BaseModel)
Handlers = Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]
Endpoint = Callable[..., Awaitable[Mapping[str, Any] | Response]]


class JsonRoute(APIRoute):
    """A route `async def endpoint(request: Request, body: SomeModel, ...)`, with path parameters as
    text.

    The endpoint returns what becomes JSON, in the shape that its response model documents, or a
    response.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Endpoint = self.endpoint
        assert self.body_field is not None, f"{self.path}: a JsonRoute needs a body"
        model: type[BaseModel] = self.body_field.field_info.annotation

        async def answer(request: Request) -> Response:
            refuse_encoded(request)
            return await self.respond(request, model, endpoint)

        self.answer = answer
        return answer

    async def respond(
        self, request: Request, model: type[BaseModel], endpoint: Endpoint
    ) -> Response:
        """Read and check the body, and answer with what the endpoint returns."""
        try:
            body = self.parse(model, await self.read(request), request)
        except ValidationError as error:
            line = f"body: {describe_invalid(error)}{self._remedy(error)}"
            return error_response(request.scope, 422, "invalid_request", line)
        content = await endpoint(request=request, body=body, **request.path_params)
        if isinstance(content, Response):
            return content
        return Response(to_json(content), media_type="application/json")

    @property
    def example(self) -> str:
        assert self.body_field is not None
        return json.dumps(
            self.body_field.field_info.annotation.model_config["json_schema_extra"]["examples"][0]
        )

    def _remedy(self, error: ValidationError) -> str:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        if problems[0]["type"] == "json_invalid":
            return f"; send JSON such as {self.example}"
        strange = {
            problem["loc"][0] for problem in problems if problem["type"] == "extra_forbidden"
        }
        path = next((path for field, path in _PATHS.items() if field in strange), None)
        return f"; such a body goes to {path}" if path else ""

    async def read(self, request: Request) -> bytes:
        return await read_body(request)

    def parse(self, model: type[Model], body: bytes, request: Request) -> Model:
        return parse_json(model, body)


def refuse_encoded(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HTTPException(415, "compressed bodies are not read; send it without Content-Encoding")


class JsonBounds:
    """Counts the values of one body and measures its strings without creating any, piece by piece
    while it arrives: as Python objects, JSON can take a hundred times its bytes.

    It finds strings as a parser does: they begin and end at quotes that are not escaped. Text that
    is not JSON may be misread, but only after the first error, where a parser stops.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._num_values = 0.0
        self._string_bytes = 0  # of the string that the pieces so far end in
        self._is_in_string = False
        self._half_escape = b""

    def feed(self, piece: bytes) -> None:
        """Look at the next piece.

        Raises:
            RefusedTextError: there are more values than any request needs, or a string is longer
                than any text.
        """
        most = 2 * self._settings.max_body_values
        # Remove escapes first, pair by pair from the left; then every quote that is left begins or
        # ends a string.
        piece = (self._half_escape + piece).replace(b"\\\\", b"__")
        self._half_escape = b"\\" if piece.endswith(b"\\") else b""
        piece = piece.removesuffix(b"\\").replace(b'\\"', b"__")
        parts = piece.split(b'"', most)
        strings = parts[0 if self._is_in_string else 1 :: 2]
        between = b"".join(parts[1 if self._is_in_string else 0 :: 2])
        # Outside of strings, a value is the first one inside a bracket, or follows a comma or a
        # colon. Long numbers and white space cost time too.
        self._num_values += (
            len(between) - len(between.translate(None, b",:[{")) + len(between) / _BYTES_PER_VALUE
        )
        if self._num_values > self._settings.max_body_values or len(parts) > most:
            raise RefusedTextError(
                "too_many_values",
                "the body has more JSON values than the maximum of "
                f"{self._settings.max_body_values}; send fewer texts in one request",
            )
        self._measure(strings, ends_in_string=self._is_in_string ^ (len(parts) % 2 == 0))

    def _measure(self, strings: list[bytes], *, ends_in_string: bool) -> None:
        lengths = [len(string) for string in strings]
        if self._is_in_string:
            lengths[0] += self._string_bytes
        if max(lengths, default=0) > self._settings.max_line_bytes:
            raise RefusedTextError(
                "text_too_long",
                f"the body has a string of more than {self._settings.max_line_bytes} bytes, longer "
                f"than any text of {self._settings.max_text_chars} characters; shorten it",
            )
        self._string_bytes = lengths[-1] if ends_in_string else 0
        self._is_in_string = ends_in_string


async def read_body(request: Request, num_json_bytes: int | None = None) -> bytes:
    """Read the whole body, of which ``num_json_bytes`` (None: all) are JSON; the gate counts it and
    limits its time.

    Raises:
        RefusedTextError: the JSON exceeds `JsonBounds`; the rest is not read.
    """
    # Nearly every body arrives in one small piece, which needs no counting.
    message = await request.receive()
    if not message.get("more_body", False) and len(message.get("body", b"")) <= SMALL_BODY_BYTES:
        return message.get("body", b"")
    bounds = JsonBounds(parts_of(request).settings)
    pieces: list[bytes] = []
    num_bytes = 0
    while True:
        piece = message.get("body", b"")
        is_json = piece if num_json_bytes is None else piece[: max(0, num_json_bytes - num_bytes)]
        bounds.feed(is_json)
        pieces.append(piece)
        num_bytes += len(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)
        message = await request.receive()


async def json_list(items: Iterable[Any]) -> Response:
    """Answer with a list rendered item by item: many at once would block the event loop."""
    written: list[bytes] = []
    paused = time.monotonic()
    for item in items:
        written.append(to_json(item))
        if time.monotonic() - paused > _LONGEST_HOLD_S:
            await asyncio.sleep(0)
            paused = time.monotonic()
    return Response(b"[" + b",".join(written) + b"]", media_type="application/json")


class ShortCut:
    """Takes requests directly to the JSON routes with fixed paths: FastAPI's work around a route
    costs as much as the route.

    It uses the same routes and error handlers, so only the path through the code differs.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[JsonRoute], handlers: Handlers) -> None:
        self.app = app
        self._routes = {route.path: route for route in routes if not route.param_convertors}
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        route = self._routes.get(route_path(scope)) if is_post else None
        # Anything else, such as /docs, a wrong path or a path with parameters, is left to FastAPI.
        if route is None:
            await self.app(scope, receive, send)
            return
        # As FastAPI's router would set it; the gate counts the request under the route's path.
        scope["route"] = route
        request = Request(scope, receive, send)
        try:
            response = await route.answer(request)
        except Exception as error:
            # FastAPI catches exceptions around its own routing, which this request never reaches.
            # The gate, which is around both, answers what has no handler with 500.
            handler = self._handlers.get(type(error))
            if handler is None:
                raise
            response = await handler(request, error)
        await response(scope, receive, send)


def parse_json(model: type[Model], body: bytes) -> Model:
    """Check a JSON body against its model.

    Raises:
        ValidationError: it is not JSON, or does not match.
        HTTPException: 400, it is not UTF-8, or nested too deeply.
    """
    try:
        return model.__pydantic_validator__.validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        if problem["type"] != "json_invalid":
            raise
        refusal, reason = error, problem["ctx"]["error"]
    # As some clients on Windows begin a body, and editors a file.
    if body.startswith(codecs.BOM_UTF8):
        return parse_json(model, body.removeprefix(codecs.BOM_UTF8))
    if reason.startswith("recursion limit"):
        raise HTTPException(400, "the body is nested too deep to be read")
    if reason.startswith("invalid unicode") or not _begins_as_utf8(body):
        raise HTTPException(400, "the body is not UTF-8")
    # The fast parser refuses lone surrogates ("\ud83d"), which Python's reads; texts with them are
    # cleaned like others.
    is_surrogate = "surrogate" in reason or "hex escape" in reason
    if not is_surrogate or len(body) > _LARGEST_SECOND_PARSE_BYTES:
        raise refusal
    try:
        content = json.loads(body.decode("utf-8"), parse_int=_short_int)
    except (RecursionError, ValueError):
        raise refusal from None
    return model.__pydantic_validator__.validate_python(content)


def _begins_as_utf8(body: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(body[:SMALL_BODY_BYTES])
    except UnicodeDecodeError:
        return False
    return True


def _short_int(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError  # the refusal is the fast parser's
    return int(digits)
