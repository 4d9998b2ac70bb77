"""Gives every refusal the one error shape, `schemas.ErrorResponse`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from inference.errors import ModelUnavailableError, RefusedTextError
from inference.schemas import ErrorResponse

RETRY_AFTER_SECONDS = 5

_HTTP_CODES = {
    400: "unreadable_body",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
}

# What routes that need the model document beside their answer.
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The body cannot be read as text in UTF-8."},
    413: {"model": ErrorResponse, "description": "The body is larger than the limits on texts allow."},
    422: {
        "model": ErrorResponse,
        "description": "The request cannot be understood or a text cannot be classified.",
    },
    503: {
        "model": ErrorResponse,
        "description": "No model is loaded (yet); /health says why.",
        "headers": {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}},
    },
}


def add_error_handlers(app: FastAPI) -> None:
    """Install the handlers for every error that a request can end in."""
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(RefusedTextError, _refused_text)
    app.add_exception_handler(ModelUnavailableError, _model_unavailable)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)


def error_response(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Build the answer to a refused request."""
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status, headers=headers)


async def _invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
    # Never the offending input itself: it may be huge, or hold lone surrogates that no JSON can carry.
    lines = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
    return error_response(422, "invalid_request", "; ".join(lines[:3]))


async def _refused_text(request: Request, error: RefusedTextError) -> JSONResponse:
    return error_response(422, error.code, str(error))


async def _model_unavailable(request: Request, error: ModelUnavailableError) -> JSONResponse:
    return error_response(503, "model_unavailable", str(error), {"Retry-After": str(RETRY_AFTER_SECONDS)})


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    code = _HTTP_CODES.get(error.status_code, f"http_{error.status_code}")
    return error_response(error.status_code, code, str(error.detail), error.headers)


async def _internal_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(500, "internal_server_error", "The server failed on this request; see its log.")
