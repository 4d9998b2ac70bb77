"""Classifying texts: one, many, or a stream of them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from inference.http.error_responses import REFUSALS
from inference.http.request_gate import is_stream
from inference.http.routes import streams
from inference.http.routes.answers import (
    classify,
    refuse_many,
    render,
    require_named,
    text_of,
    wanted_by,
    with_pairs,
)
from inference.http.routes.by_name import ModelName, add_by_name
from inference.http.routes.json_route import Endpoint, JsonRoute, json_list
from inference.http.schemas import BatchRequest, Prediction, PredictRequest
from inference.http.server_parts import parts_of

router = APIRouter(tags=["predict"], responses=REFUSALS, route_class=JsonRoute)


async def predict(request: Request, body: PredictRequest, name: ModelName = None) -> dict[str, Any]:
    """Classify one text: with one label, several labels or a number, depending on
    the model that is served.
    """
    parts = parts_of(request)
    text = text_of(body, parts.settings)
    served = require_named(parts, name)
    wanted = wanted_by(served, body)
    (answer,) = await classify(request, parts, served, [text], "text")
    return render(parts, served, answer, body.top_k, wanted)


class BatchRoute(JsonRoute):
    """A JSON route whose body may also be a stream of lines."""

    async def respond(
        self, request: Request, model: type[BaseModel], endpoint: Endpoint
    ) -> Response:
        """Read and check the body, and answer with what the endpoint makes of it."""
        if is_stream(request.scope["headers"]):
            return streams.StreamResponse(request)
        return await super().respond(request, model, endpoint)


_STREAM_BODY = {
    "schema": {"type": "string"},
    "example": '{"text": "Shares fall"}\n{"text": "Cup final goes to penalties", "top_k": 1}\n',
}
_STREAM_ANSWER = {
    "schema": {"type": "string"},
    "example": '{"index": 0, "label": "Business", "confidence": 0.97, "probabilities": {}, '
    '"truncated": false, "num_tokens": 4}\n{"index": 1, "error": {"code": "blank_text", '
    '"message": "text is blank", "request_id": "1"}}\n',
}


async def predict_batch(request: Request, body: BatchRequest, name: ModelName = None) -> Response:
    """Classify texts; the answers come in the order of the texts.

    With `Content-Type: application/x-ndjson` the body is any number of lines, each as for /predict.
    Each is answered by a line in the same order, with its `index`, while the rest still arrives; a
    line that cannot be answered has an `error` instead of an answer, and the others go on.
    """
    parts = parts_of(request)
    refuse_many("texts[{}]", body.texts, parts.settings)
    texts = with_pairs(body.texts, body.text_pairs, parts.settings)
    served = require_named(parts, name)
    wanted = wanted_by(served, body)
    answers = await classify(request, parts, served, texts)
    return await json_list(render(parts, served, answer, body.top_k, wanted) for answer in answers)


add_by_name(router, "/predict", predict, response_model=Prediction)
add_by_name(
    router,
    "/predict/batch",
    predict_batch,
    response_model=list[Prediction],
    responses={200: {"content": {streams.MEDIA_TYPE: _STREAM_ANSWER}}},
    openapi_extra={"requestBody": {"content": {streams.MEDIA_TYPE: _STREAM_BODY}}},
    route_class_override=BatchRoute,
)
