"""Which words decide: leave out each one in turn, and compare the probability or the number."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, cast

from fastapi import APIRouter, Request

from common.problem_types import REGRESSION
from common.text import Text, texts_in
from inference.batching.classifier import Answer
from inference.errors import WorkerDownError
from inference.http.error_responses import REFUSALS
from inference.http.routes.answers import (
    classify_some,
    model_named,
    render,
    require_named,
    text_of,
)
from inference.http.routes.by_name import ModelName, add_by_name
from inference.http.routes.json_route import JsonRoute
from inference.http.schemas import ExplainRequest, Explanation
from inference.http.server_parts import parts_of

router = APIRouter(tags=["explain"], responses=REFUSALS, route_class=JsonRoute)

_WORD = re.compile(r"\S+")
Span = tuple[int, int]


async def explain(request: Request, body: ExplainRequest, name: ModelName = None) -> dict[str, Any]:
    """Classify a text, and tell how far the label's probability falls without each word; of a
    regression model, how far the number falls.

    A text of more than EXPLAIN_MAX_PASSES words is explained in groups of neighbouring words, which
    share their weight, and so is one that the server could not read once for each word in three
    quarters of MAX_WAIT_SECONDS. Words beyond what the model reads weigh 0.
    """
    parts = parts_of(request)
    text = text_of(body, parts.settings)
    served = require_named(parts, name)
    answering = served.model.answering
    if body.label is not None:
        answering.refuse_unknown(body.label)  # before the work
    spans = [[match.span() for match in _WORD.finditer(part)] for part in texts_in(text)]
    most_passes = max(2, min(parts.settings.explain_max_passes, served.classifier.most_texts(text)))
    texts: list[Text] = [text]
    reading, stage, first = served.model, None, 0
    if reading.cascade is not None:
        # The model of a cascade that answers has to be asked about the shorter texts too.
        (answer,) = await classify_some(request, parts, served, texts, "text", num_required=1)
        whole = cast("Answer", answer)
        stage, first = whole.stage, 1
        reading = reading if stage else reading.cascade.small
        most_passes = min(most_passes, served.classifier.most_texts(text, stage))
    shortened = _without_each(text, spans, reading.tokenizer.most_ids, most_passes - 1)
    texts += [remaining for _, _, remaining in shortened]
    # Only the tokenizer's thread cleans texts; texts that consist of nothing but markup take
    # milliseconds each.
    try:
        answers = await classify_some(
            request, parts, served, texts[first:], "text", num_required=1 - first, only_stage=stage
        )
    except WorkerDownError:
        if model_named(parts, name).current is served:
            raise
        # Another model took over between the two, so it explains its own answer.
        return await explain(request, body, name)
    if not first:
        whole = cast("Answer", answers.pop(0))
    explanation = render(parts, served, whole, wanted=served.wanted)
    # The label that the answer has; where the model abstains, the one that it would have had.
    answered = explanation.get("label")
    index = answering.place_of(whole.values, answered if body.label is None else body.label)
    value = whole.values[index]
    # One list per part of a pair, with a weight per word: those of a group share what it weighs.
    weights: list[list[float]] = [[] for _ in spans]
    for (part, num_words, _), answer in zip(shortened, answers, strict=True):
        # If nothing is left to read, nothing speaks for any label.
        without = answering.without_words(value) if answer is None else answer.values[index]
        weights[part] += [(value - without) / num_words] * num_words
    is_named = body.label is None and answered is not None
    if not is_named and answering.problem_type is not REGRESSION:
        explanation["explained"] = answering.labels[index]
    words = [_words(*one) for one in zip(texts_in(text), spans, weights, strict=True)]
    return explanation | dict(zip(("words", "pair_words"), words, strict=False))


add_by_name(router, "/explain", explain, response_model=Explanation)


def _without_each(
    text: Text, spans: Sequence[Sequence[Span]], max_length: int, max_passes: int
) -> list[tuple[int, int, Text]]:
    """Leave out each word or group of words, of a pair first those of the first text.

    Args:
        text: a text, or a pair.
        spans: of the words of each of its parts.
        max_length: tokens that the model reads.
        max_passes: how many texts may remain.

    Returns:
        Which part is shorter by how many words, and the text that remains.
    """
    # A word has at least one token, so words beyond the model's token limit are never read.
    nums_read = [min(len(words), max_length) for words in spans]
    parts, shortened = texts_in(text), []
    # A group never spans two texts, so a pair may take one more pass than the groups of all its
    # words together.
    size = max(1, math.ceil(sum(nums_read) / max(1, max_passes - len(parts) + 1)))
    for index, (part, words, num_read) in enumerate(zip(parts, spans, nums_read, strict=True)):
        for first in range(0, num_read, size):
            after = min(first + size, num_read)
            # What follows moves up into the model's limit, so a little more is needed than was
            # read; all of a very long text would cost the tokenizer as much again for each word.
            end = words[min(after + max_length, len(words)) - 1][1]
            remaining = part[: words[first][0]] + part[words[after - 1][1] : end]
            whole: Text = remaining
            if len(parts) == 2:
                whole = (remaining, parts[1]) if index == 0 else (parts[0], remaining)
            shortened.append((index, after - first, whole))
    return shortened


def _words(text: str, spans: Sequence[Span], weights: Sequence[float]) -> list[dict[str, Any]]:
    return [
        # Half of a surrogate pair ("\\ud83d") is not a character that an answer could carry.
        {
            "word": text[start:end].encode("utf-8", "replace").decode(),
            "start": start,
            "end": end,
            "weight": weight,
        }
        for (start, end), weight in zip_longest(spans, weights[: len(spans)], fillvalue=0.0)
    ]
