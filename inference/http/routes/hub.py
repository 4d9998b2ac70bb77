"""The Hugging Face interface, for `InferenceClient(base_url=".../hub").text_classification`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from common.problem_types import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from common.text import Text
from inference.batching.cache import Values
from inference.engines.answering import Answering
from inference.http.error_responses import REFUSALS
from inference.http.routes.answers import classify, decide, refuse_many, require_named
from inference.http.routes.by_name import ModelName, add_by_name
from inference.http.routes.json_route import JsonRoute, json_list
from inference.http.schemas import Texts, refuse_asking_for_more
from inference.http.server_parts import parts_of

router = APIRouter(tags=["compatible"], responses=REFUSALS, route_class=JsonRoute)


# What clients send for tasks whose answers would look alike, but mean something else.
_OTHER_TASKS = {
    "candidate_labels": "zero-shot classification",
    "hypothesis_template": "zero-shot classification",
    "aggregation_strategy": "token classification",
    "targets": "filling masks",
    "max_new_tokens": "text generation",
}


class HubParameters(BaseModel):
    """What the hub's clients may set; their other fields are ignored, except
    those of other tasks.
    """

    model_config = ConfigDict(strict=True)

    top_k: int | None = Field(
        default=None, ge=1, description="Return only this many labels; null returns all."
    )
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = Field(
        default=None,
        description="How scores become answers; null is softmax, for a multi-label model sigmoid, "
        "for regression none.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_tasks(cls, given: Any) -> Any:
        name = next(
            (
                name
                for name in _OTHER_TASKS
                if isinstance(given, dict) and given.get(name) is not None
            ),
            None,
        )
        if name is not None:
            line = (
                f"{name} belongs to {_OTHER_TASKS[name]}; this model answers with the labels that "
                "it was trained on"
            )
            raise PydanticCustomError("other_task", line)
        return refuse_asking_for_more(given)


class HubPair(BaseModel):
    """Two texts, for a model that reads pairs."""

    model_config = ConfigDict(strict=True, extra="forbid")

    text: str
    text_pair: str


HubPairs = Annotated[list[HubPair], Field(fail_fast=True)]


class HubRequest(BaseModel):
    """What the hub's clients send; their other fields (such as options) are ignored."""

    model_config = ConfigDict(
        strict=True, json_schema_extra={"examples": [{"inputs": "Shares fall on Wall Street."}]}
    )

    inputs: (
        str
        | HubPair
        | Annotated[Texts, Field(min_length=1)]
        | Annotated[HubPairs, Field(min_length=1)]
    ) = Field(
        description="One text, or 1 to MAX_BATCH_TEXTS texts; for a model that reads pairs, one "
        "pair or that many pairs."
    )
    parameters: HubParameters | None = None
    model: str | None = Field(
        default=None,
        description="Of several models, the one to ask. A server of one model ignores it.",
    )


class HubScore(BaseModel):
    label: str
    score: float


async def classify_as_the_hub(
    request: Request, body: HubRequest, name: ModelName = None
) -> Response:
    """Classify as Hugging Face's text-classification task does: for each text its labels, the best
    first.

    All labels of a multi-label model are given, also below their threshold; a number has the name
    of its column. The format has no place for an abstention, so MAX_ERROR changes nothing here.
    """
    parts = parts_of(request)
    # Clients of one model send names that other servers know it by.
    served = require_named(parts, name or (body.model if parts.models.are_several else None))
    is_single = not isinstance(body.inputs, list)
    place = "inputs" if is_single else "inputs[{}]"
    texts = [_text(one) for one in ([body.inputs] if is_single else body.inputs)]
    refuse_many(place, texts, parts.settings)
    answers = await classify(request, parts, served, texts, place)
    parameters = body.parameters or HubParameters()
    function = _function(served.model.answering, parameters.function_to_apply)
    labels = served.model.labels
    for answer in answers:
        decide(parts, served, answer)
    return await json_list(
        _best(labels, function(answer.values), parameters.top_k) for answer in answers
    )


add_by_name(router, "/hub", classify_as_the_hub, response_model=list[list[HubScore]])


def _text(given: str | HubPair) -> Text:
    return given if isinstance(given, str) else (given.text, given.text_pair)


def _best(
    labels: Sequence[str], scores: Sequence[float], top_k: int | None
) -> list[dict[str, Any]]:
    ordered = sorted(zip(labels, scores, strict=True), key=lambda one: -one[1])
    return [{"label": label, "score": score} for label, score in ordered[:top_k]]


def _function(answering: Answering, asked_for: str | None) -> Callable[[Values], Sequence[float]]:
    own = _OWN_FUNCTIONS[answering.problem_type.name]
    return _FUNCTIONS[asked_for] if asked_for not in (None, own) else lambda values: values


# What the answers of each kind of model are computed with.
_OWN_FUNCTIONS = {
    SINGLE_LABEL.name: "softmax",
    MULTI_LABEL.name: "sigmoid",
    REGRESSION.name: "none",
}
_FUNCTIONS: dict[str, Callable[[Values], Sequence[float]]] = {
    "softmax": lambda values: SINGLE_LABEL.answers(np.array([values.scores()]))[0].tolist(),
    "none": lambda values: values.scores(),
    # 1 / (1 + exp(-score)) would overflow.
    "sigmoid": lambda values: [(1 + math.tanh(score / 2)) / 2 for score in values.scores()],
}
