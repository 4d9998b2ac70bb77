"""Corrections from users: which label is right for a text."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from inference.batching.served_model import Served
from inference.errors import DeadlineExceededError, QueueFullError, RefusedTextError
from inference.http.error_responses import REFUSALS, RETRY_AFTER_SECONDS, error_response
from inference.http.request_context import RequestContext
from inference.http.routes.answers import refuse_long, require_named
from inference.http.routes.by_name import UNKNOWN_MODEL, ModelName, add_by_name
from inference.http.routes.json_route import JsonRoute
from inference.http.schemas import (
    ErrorResponse,
    FeedbackRequest,
    FeedbackResponse,
    takes_feedback,
)
from inference.http.server_parts import Parts, parts_of
from inference.observing.feedback import (
    Correction,
    FeedbackFullError,
    FeedbackWriter,
    Recorded,
    TextNeededError,
    storable,
)
from inference.observing.store import StoreError

_MAX_BYTES = 64 * 1024
_TEXT_NEEDED = "the text of this request is not kept (KEEP_TEXTS); send the text itself"

router = APIRouter(tags=["feedback"], responses=REFUSALS, route_class=JsonRoute)


class FeedbackRoute(JsonRoute):
    """A JSON route for one text and little else."""

    async def read(self, request: Request) -> bytes:
        body = await super().read(request)
        if len(body) > _MAX_BYTES:
            line = f"feedback has {len(body)} bytes > maximum {_MAX_BYTES}; send a shorter text"
            raise HTTPException(413, line)
        return body


async def give_feedback(
    request: Request, body: FeedbackRequest, name: ModelName = None
) -> dict[str, Any] | Response:
    """Record which label is right for a text. It is on the disk when the answer comes, and sending
    it again records nothing new.
    """
    parts = parts_of(request)
    if parts.feedback is None or parts.observer is None:
        line = "this server takes no feedback; start it with OBSERVE=1"
        return error_response(request.scope, 409, "feedback_off", line)
    served = require_named(parts, _model_asked(body, name))
    if not parts.observer.has_room:
        line = "corrections fill OBSERVE_MB, and none is ever deleted; set it higher"
        return error_response(request.scope, 503, "feedback_failed", line, RETRY_AFTER_SECONDS)
    correction = _correction(request, parts, served, body)
    try:
        async with asyncio.timeout(parts.settings.request_timeout_s):
            recorded = await _recorded(parts.feedback, correction)
    except TextNeededError:
        raise RefusedTextError("text_needed", _TEXT_NEEDED) from None
    except TimeoutError:
        raise DeadlineExceededError("not on the disk in time; send it again") from None
    except StoreError:
        parts.metrics.fed_back("failed")
        line = "feedback cannot be recorded now, the server's log says why; send it again later"
        return error_response(request.scope, 503, "feedback_failed", line, RETRY_AFTER_SECONDS)
    parts.metrics.fed_back("known" if recorded.known else "recorded")
    return {"id": recorded.id, "recorded": True, "known": recorded.known}


async def _recorded(writer: FeedbackWriter, correction: Correction) -> Recorded:
    try:
        future = writer.submit(correction)
    except FeedbackFullError:
        line = "too many corrections wait for the disk; send it again later"
        raise QueueFullError(line, RETRY_AFTER_SECONDS, "feedback_full") from None
    return await asyncio.wrap_future(future)


def _model_asked(body: FeedbackRequest, name: str | None) -> str | None:
    if name is not None and body.model not in (None, name):
        line = f"the path names the model {name}, and the body another one; name one of them"
        raise RefusedTextError("invalid_request", line)
    return name or body.model


def _correction(
    request: Request, parts: Parts, served: Served, body: FeedbackRequest
) -> Correction:
    """What the request says, checked.

    Raises:
        RefusedTextError: the model takes no such correction, or has no such label, or the text is
            blank or too long.
    """
    model = served.model
    if not takes_feedback(model):
        line = "only models that give one label to a single text take feedback"
        raise RefusedTextError("wrong_kind_of_model", line)
    model.answering.refuse_unknown(body.label)
    text = storable(body.text or "")
    refuse_long("text", text, parts.settings)
    if body.text is not None and not text.strip():
        raise RefusedTextError("blank_text", "text is blank: there is nothing to correct")
    caller = RequestContext.of(request.scope).allowance.caller
    return Correction(
        model=served.name,
        request_id=body.request_id or "",
        position=body.position,
        text=text,
        label=body.label,
        author=storable(body.by or "") or caller,
        caller=caller,
        revision=model.info["revision"],
    )


add_by_name(
    router,
    "/feedback",
    give_feedback,
    response_model=FeedbackResponse,
    responses=UNKNOWN_MODEL
    | {409: {"model": ErrorResponse, "description": "The server takes no feedback (OBSERVE)."}},
    route_class_override=FeedbackRoute,
)
