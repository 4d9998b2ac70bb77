"""Gives every refusal the same shape, `schemas.ErrorResponse`."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from inference.errors import (
    DeadlineExceededError,
    ForwardError,
    ModelUnavailableError,
    QueueFullError,
    RateLimitedError,
    RefusedTextError,
    WorkerDownError,
)
from inference.http.paths import route_path
from inference.http.request_context import RequestContext
from inference.http.schemas import ErrorResponse

# Retry-After if nothing was measured: while a model loads or a worker restarts.
RETRY_AFTER_SECONDS = 5
# The Open Inference Protocol prescribes {"error": "message"} on its paths.
_PROTOCOL_PREFIX = "/v2"
# Clients of vLLM and lemonade read OpenAI's error there, whose code is the status, and expect 400
# of every body that cannot be answered.
_GATEWAY_PATHS = frozenset(("/classify", "/v1/classify"))
_MAX_PLACE_CHARS = 80

# What classifying may raise.
FAILURES = (
    RefusedTextError,
    QueueFullError,
    RateLimitedError,
    ModelUnavailableError,
    WorkerDownError,
    DeadlineExceededError,
    ForwardError,
)

_HTTP_CODES = {
    400: "unreadable_body",
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "body_too_large",
    415: "unsupported_encoding",
    503: "server_busy",
}
_RETRY_AFTER_HEADER = {
    "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}
}


def _documented(description: str, **more: Any) -> dict[str, Any]:
    return {"model": ErrorResponse, "description": description, **more}


# The responses that classifying routes document besides their answer.
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: _documented("The body cannot be read: not UTF-8, or nested too deep."),
    401: _documented("Keys are set (API_KEY, API_KEYS_FILE) and the request carries none of them."),
    403: _documented(
        "A browser sent it for a page of another site, which CORS_ORIGINS does not list."
    ),
    408: _documented("The body did not arrive within REQUEST_TIMEOUT_S."),
    413: _documented("The body is larger than MAX_BODY_MB or the limits on texts allow."),
    415: _documented("The body is compressed (Content-Encoding)."),
    422: _documented("The request cannot be understood or a text cannot be classified."),
    429: _documented(
        "More than RATE_LIMIT_PER_S with this key or from this address.",
        headers=_RETRY_AFTER_HEADER,
    ),
    500: _documented("The server or the model failed; its log has the request id."),
    503: _documented(
        "The queue is full, or no model is loaded; /health says why.", headers=_RETRY_AFTER_HEADER
    ),
    504: _documented("Not answered within REQUEST_TIMEOUT_S."),
}


def error_response(
    scope: MutableMapping[str, Any],
    status: int,
    code: str,
    message: str,
    retry_after_s: float | None = None,
) -> Response:
    """Build the response to a refused request: HTTP status, a code for programs, one line for
    people, when to retry.
    """
    headers = {} if retry_after_s is None else {"Retry-After": retry_after(retry_after_s)}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    status, body = error_body(scope, status, code, message)
    return Response(body, status, headers, media_type="application/json")


def retry_after(seconds: float) -> str:
    """The value of Retry-After, which is in whole seconds."""
    return str(max(1, math.ceil(seconds)))


def error_body(
    scope: MutableMapping[str, Any], status: int, code: str, message: str
) -> tuple[int, bytes]:
    """The status and the JSON of a refusal in the form of its path; notes its code."""
    context = RequestContext.of(scope)
    context.error_code = code
    detail: Any = error_detail(code, message, context.request_id)
    path = route_path(scope)
    if path.startswith(_PROTOCOL_PREFIX):
        detail = detail["message"]
    elif path in _GATEWAY_PATHS:
        status = 400 if status == 422 else status
        detail |= {"type": code, "param": None, "code": status}
    return status, to_json({"error": detail})


def error_detail(code: str, message: str, request_id: str) -> dict[str, str]:
    """The fields of `schemas.ErrorDetail`; characters that UTF-8 cannot carry are replaced."""
    message = message.encode("utf-8", errors="replace").decode()
    return {"code": code, "message": message, "request_id": request_id}


def http_code(status: int) -> str:
    return _HTTP_CODES.get(status, f"http_{status}")


def describe(error: Exception) -> tuple[int, str, str, float | None]:
    """Translate an error of classifying into status, code, message and seconds to wait."""
    match error:
        case RefusedTextError():
            return 422, error.code, str(error), None
        case QueueFullError():
            return 503, error.code, str(error), error.retry_after_s
        case RateLimitedError():
            return 429, "rate_limited", str(error), error.retry_after_s
        case ModelUnavailableError():
            return 503, "model_unavailable", str(error), RETRY_AFTER_SECONDS
        case WorkerDownError():
            return 503, "worker_down", str(error), RETRY_AFTER_SECONDS
        case DeadlineExceededError():
            return 504, "deadline_exceeded", str(error), None
        case ForwardError():
            return (
                500,
                "inference_failed",
                "the model failed on this request; the server's log has its id",
                None,
            )
        case _:
            return (
                500,
                "internal_error",
                "the server failed on this request; its log has the request id",
                None,
            )


def describe_invalid(error: ValidationError | RequestValidationError) -> str:
    """Say what does not match the schema, without the input, which may be huge or private."""
    if isinstance(error, ValidationError):
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    else:
        problems = error.errors()
    lines = [_place(problem["loc"]) + problem["msg"] for problem in problems[:3]]
    return "; ".join(lines) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")


def _place(location: tuple[int | str, ...]) -> str:
    field = ".".join(map(str, location))
    if len(field) > _MAX_PLACE_CHARS:
        field = field[:_MAX_PLACE_CHARS] + "…"
    return f"{field}: " if field else ""


def add_error_handlers(app: FastAPI) -> None:
    """Install handlers for every error that a route can raise; the gate answers unexpected ones."""
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    for kind in FAILURES:
        app.add_exception_handler(kind, _refused)


async def _invalid_request(request: Request, error: RequestValidationError) -> Response:
    return error_response(request.scope, 422, "invalid_request", describe_invalid(error))


async def _refused(request: Request, error: Exception) -> Response:
    return error_response(request.scope, *describe(error))


async def _http_error(request: Request, error: HTTPException) -> Response:
    path, line, headers = route_path(request.scope), str(error.detail), dict(error.headers or {})
    if error.status_code == 404 and path.endswith("/") and line == "Not Found":
        # Relative, so that it stays below any prefix and keeps https, neither of which a proxy has
        # to tell.
        query = request.url.query and f"?{request.url.query}"
        return Response(
            status_code=307, headers={"Location": f"../{quote(path.split('/')[-2])}{query}"}
        )
    if error.status_code == 405:
        allowed = headers["Allow"] = "GET, HEAD" if "GET" in headers["Allow"] else headers["Allow"]
        line = f"this path does not accept {request.method}; use {allowed}{_example(request, path)}"
    response = error_response(request.scope, error.status_code, http_code(error.status_code), line)
    response.headers.update(headers)
    return response


def _example(request: Request, path: str) -> str:
    if path == "/":
        return (
            "; texts go to /predict, and clients of Hugging Face's hub take /hub as their base_url"
        )
    example = getattr(request.scope.get("route"), "example", None)  # of a route that takes JSON
    return f" with JSON such as {example}" if example else ""
