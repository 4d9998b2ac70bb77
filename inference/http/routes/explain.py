"""Which words decide: leave out each one in turn, and compare the label's probability, or the number."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, cast

from fastapi import APIRouter, Request

from common.problem_types import MULTI_LABEL
from inference.batching.classifier import Answer
from inference.http.error_responses import REFUSALS
from inference.http.routes.answers import classify_some, refuse_long, render
from inference.http.routes.json_route import JsonRoute
from inference.http.schemas import ExplainRequest, Explanation
from inference.http.server_parts import parts_of

router = APIRouter(tags=["explain"], responses=REFUSALS, route_class=JsonRoute)

_WORD = re.compile(r"\S+")


@router.post("/explain", response_model=Explanation)
async def explain(request: Request, body: ExplainRequest) -> dict[str, Any]:
    """Classify a text, and tell how far the label's probability falls without each word; of a regression model, how far
    the number falls.

    A text of more than EXPLAIN_MAX_PASSES words is explained in groups of neighbouring words, which share their weight.
    Words beyond what the model reads weigh 0.
    """
    parts = parts_of(request)
    refuse_long("text", body.text, parts.settings)
    served = parts.served_model.require()
    answering = served.model.answering
    if body.label is not None:
        answering.refuse_unknown(body.label)  # before the work
    spans = [match.span() for match in _WORD.finditer(body.text)]
    shortened = _without_each(body.text, spans, served.model.tokenizer.most_ids, parts.settings.explain_max_passes - 1)
    texts = [body.text, *(text for _, text in shortened)]
    # Only the tokenizer's thread cleans texts; texts that consist of nothing but markup take milliseconds each.
    answers = await classify_some(request, parts, served, texts, "text", num_required=1)
    whole = cast("Answer", answers[0])
    place = answering.place_of(whole.values, body.label)
    value = whole.values[place]
    weights: list[float] = []
    for (num_words, _), answer in zip(shortened, answers[1:], strict=True):
        # If nothing is left to read, nothing speaks for any label.
        without = answering.without_words(value) if answer is None else answer.values[place]
        weights += [(value - without) / num_words] * num_words
    weights += [0.0] * (len(spans) - len(weights))
    explanation = render(parts, served, whole)
    if body.label is not None or answering.problem_type is MULTI_LABEL:
        explanation["explained"] = answering.labels[place]
    explanation["words"] = _words(body.text, spans, weights)
    return explanation


def _without_each(
    text: str, spans: Sequence[tuple[int, int]], max_length: int, max_passes: int
) -> list[tuple[int, str]]:
    """Leave out each word or group of words; returns how many words are missing, and the texts that remain."""
    # A word has at least one token, so words beyond the model's token limit are never read.
    num_read = min(len(spans), max_length)
    size = max(1, math.ceil(num_read / max(1, max_passes)))
    shortened = []
    for first in range(0, num_read, size):
        after = min(first + size, num_read)
        end = spans[min(after + max_length, len(spans)) - 1][1]
        shortened.append((after - first, text[: spans[first][0]] + text[spans[after - 1][1] : end]))
    return shortened


def _words(text: str, spans: Sequence[tuple[int, int]], weights: Sequence[float]) -> list[dict[str, Any]]:
    return [
        # Half of a surrogate pair ("\\ud83d") is not a character that an answer could carry.
        {"word": text[start:end].encode("utf-8", "replace").decode(), "start": start, "end": end, "weight": weight}
        for (start, end), weight in zip(spans, weights, strict=True)
    ]
