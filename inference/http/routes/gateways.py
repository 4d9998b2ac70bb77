"""What gateways ask a classifier for: vLLM's `/classify` with the two contracts that share its path,
and lemonade's `/v1/classify`. docs/gateways.md says where each shape comes from.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError, to_json

from common.problem_types import MULTI_LABEL, SINGLE_LABEL, ProblemType
from inference.batching.served_model import Served
from inference.errors import RefusedTextError
from inference.http.error_responses import REFUSALS
from inference.http.request_context import RequestContext
from inference.http.routes.answers import (
    classify,
    refuse_many,
    render,
    require_named,
    wanted_by,
)
from inference.http.routes.hub import HubScore
from inference.http.routes.json_route import JsonRoute, json_list
from inference.http.schemas import AskedFor, AsksMore, Text, Texts, refuse_asking_for_more
from inference.http.server_parts import parts_of

# The label of an answer that gives none, by llm-d-sc's word for it (there it is a status).
ABSTAIN = "ABSTAIN"


class GatewayErrorDetail(BaseModel):
    """What went wrong, as clients of OpenAI's interface read it."""

    message: str = Field(description="One line for people.")
    type: str = Field(description="A short name for programs, such as blank_text or queue_full.")
    param: None = None
    code: int = Field(description="The HTTP status.")
    request_id: str = Field(
        description="The request's name in the server's log, as in X-Request-ID."
    )


class GatewayError(BaseModel):
    """Every refusal on these paths has this shape."""

    error: GatewayErrorDetail


# vLLM and lemonade answer 400 where other routes answer 422. FastAPI adds a 422 to the document,
# unless there is a "4XX".
_REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX" if status == 422 else status: {**documented, "model": GatewayError}
    for status, documented in REFUSALS.items()
} | {404: {"model": GatewayError, "description": "No model of this name is served."}}

router = APIRouter(tags=["compatible"], responses=_REFUSALS, route_class=JsonRoute)


class _GatewayRequest(BaseModel):
    """Texts under exactly one of several names; other fields are ignored, as these servers do."""

    model_config = ConfigDict(strict=True)
    names: ClassVar[Sequence[str]]  # of the fields that a text may come in

    model: str | None = Field(
        default=None, description="The name of the served model; null asks for no other."
    )

    @property
    def given(self) -> dict[str, str | list[str]]:
        """The texts by the name that they came under."""
        values = {name: getattr(self, name) for name in self.names}
        return {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _require_one(self) -> _GatewayRequest:
        if len(self.given) != 1:
            line = f"send a text in exactly one of {', '.join(self.names)}"
            raise PydanticCustomError("one_text", line)
        return self


class ClassifyRequest(AsksMore, _GatewayRequest):
    """One text, or for vLLM's clients several; the field that it comes in decides the answer.

    What asks for more than labels and scores goes with `input`.
    """

    model_config = ConfigDict(
        extra="ignore",
        json_schema_extra={"examples": [{"input": "Shares fall on Wall Street."}]},
    )
    names: ClassVar[Sequence[str]] = ("input", "inputs", "text")

    input: Text | Annotated[Texts, Field(min_length=1)] | None = Field(
        default=None, description="As vLLM's clients send it: one text, or 1 to MAX_BATCH_TEXTS."
    )
    inputs: Text | None = Field(default=None, description="As vLLM Semantic Router sends it.")
    text: Text | None = Field(default=None, description="As lemonade sends it to its ort-server.")
    top_k: int | None = Field(
        default=None, ge=0, description="With text: only this many labels; 0 or null is all."
    )
    # Of what vLLM's clients may set, values that would change the answer are refused, not ignored.
    use_activation: Literal[True] | None = None
    add_special_tokens: Literal[True] = True
    truncate_prompt_tokens: Literal[-1] | None = Field(
        default=None, description="-1 and null: the model reads as many tokens as it can."
    )
    truncation_side: Literal["right"] | None = None

    @model_validator(mode="after")
    def _refuse_what_has_no_place(self) -> ClassifyRequest:
        if self.top_k is not None and self.text is None:
            raise PydanticCustomError(
                "top_k", "top_k goes with text; other answers name every label"
            )
        if self.input is None:
            refuse_asking_for_more({name: getattr(self, name) for name in AsksMore.model_fields})
        return self


class LemonadeRequest(_GatewayRequest):
    """One text, as lemonade's clients send it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"input": "Shares fall on Wall Street."}]}
    )
    names: ClassVar[Sequence[str]] = ("input", "text")

    input: Text | None = None
    text: Text | None = Field(default=None, description="Another name for input.")
    top_k: int | None = Field(
        default=None, ge=1, description="Only this many labels, the highest scores."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_has_no_place(cls, given: Any) -> Any:
        return refuse_asking_for_more(given)


class ClassifiedText(AskedFor):
    index: int
    label: str = Field(description=f"The label, or {ABSTAIN} if the answer gives none.")
    probs: list[float] = Field(
        description="The probability of every label, in the order of GET /model."
    )
    num_classes: int


class Usage(BaseModel):
    prompt_tokens: int = Field(description="Tokens of the whole texts.")
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class ClassifyResponse(BaseModel):
    """vLLM's answer, to `input`."""

    id: str
    object: Literal["list"]
    created: int = Field(description="Seconds since 1970.")
    model: str
    data: list[ClassifiedText]
    usage: Usage


class LabelScores(BaseModel):
    """ort-server's answer, to `text`."""

    labels: dict[str, float]


class LemonadeResponse(LabelScores):
    """lemonade's own answer."""

    object: Literal["classification"]
    model: str


@router.post("/classify", response_model=ClassifyResponse | list[HubScore] | LabelScores)
async def classify_for_gateways(
    request: Request, body: ClassifyRequest
) -> dict[str, Any] | Response:
    """Classify as the servers do that share this path; the name of the text's field says which.

    `input` is answered as vLLM does, `inputs` with every label and its score, as vLLM Semantic
    Router reads them (`http_classify`), and `text` with `labels`, as lemonade's ort-server does.
    Several labels for a text have a place only in the last, a number in none. Only the first has a
    place for an abstention; the others list all labels, whatever MAX_ERROR says.
    """
    parts = parts_of(request)
    if body.text is not None:
        served, texts, name = _require(request, body, (SINGLE_LABEL, MULTI_LABEL))
        (answer,) = await classify(request, parts, served, texts, name)
        return {"labels": render(parts, served, answer, body.top_k or None)["probabilities"]}
    served, texts, name = _require(request, body, (SINGLE_LABEL,))
    wanted = wanted_by(served, body)
    answers = await classify(request, parts, served, texts, name)
    if body.inputs is not None:
        # The router finds labels by name and refuses an answer that lacks one, so all are here.
        named = render(parts, served, answers[0])["probabilities"]
        return await json_list({"label": label, "score": one} for label, one in named.items())
    rendered = (render(parts, served, answer, wanted=wanted) for answer in answers)
    data = await json_list(classified_text(i, fields) for i, fields in enumerate(rendered))
    num_tokens = sum(answer.num_tokens for answer in answers)
    rest = {
        "id": f"classify-{RequestContext.of(request.scope).request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": served.name,
        "usage": Usage(prompt_tokens=num_tokens, total_tokens=num_tokens),
    }
    # The list is JSON already, so it is put into the object as text.
    content = to_json(rest)[:-1] + b',"data":' + data.body + b"}"
    return Response(content, media_type="application/json")


@router.post("/v1/classify", response_model=LemonadeResponse)
async def classify_for_lemonade(request: Request, body: LemonadeRequest) -> dict[str, Any]:
    """Classify one text as lemonade does: every label, or the `top_k` best, with its score.

    For a multi-label model each score is the label's own probability. A number has no place here.
    """
    parts = parts_of(request)
    served, texts, name = _require(request, body, (SINGLE_LABEL, MULTI_LABEL))
    (answer,) = await classify(request, parts, served, texts, name)
    fields = render(parts, served, answer, body.top_k)
    return {
        "object": "classification",
        "model": served.name,
        "labels": fields["probabilities"],
    }


def classified_text(index: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A text of vLLM's answer; ``fields`` is what `answers.render` returned, with all labels."""
    probabilities = list(fields["probabilities"].values())
    return {
        "index": index,
        "label": ABSTAIN if fields["label"] is None else fields["label"],
        "probs": probabilities,
        "num_classes": len(probabilities),
        **{name: fields[name] for name in AskedFor.model_fields if name in fields},
    }


def _require(
    request: Request, body: _GatewayRequest, kinds: Sequence[ProblemType]
) -> tuple[Served, Sequence[str], str]:
    """What is served, if it is of one of these kinds; the texts, and what the client calls them."""
    ((name, given),) = body.given.items()
    parts, texts = parts_of(request), [given] if isinstance(given, str) else given
    place = name if isinstance(given, str) else f"{name}[{{}}]"
    refuse_many(place, texts, parts.settings)
    served = require_named(parts, body.model)
    if (kind := served.model.answering.problem_type) not in kinds:
        line = f"answers of a {kind.name} model do not fit the format of {name}; use /predict"
        raise RefusedTextError("wrong_kind_of_model", line)
    return served, texts, place
