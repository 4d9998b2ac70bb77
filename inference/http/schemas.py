"""Requests and responses of our own HTTP interface; the compatible ones have their own files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from common.errors import share_or_name
from common.model_folder import METRICS_KEYS
from common.problem_types import MULTI_LABEL, SINGLE_LABEL
from inference.engines.model_loader import ModelLoader
from inference.settings import Settings

_EXAMPLE_TEXT = "The text to classify."
_EXAMPLE_ANSWER = {
    "label": "second label",
    "confidence": 0.97,
    "probabilities": {"first label": 0.02, "second label": 0.97, "third label": 0.01},
    "truncated": False,
    "num_tokens": 7,
}
_EXAMPLE_LABELS = {
    "labels": ["second label", "first label"],
    "probabilities": {"first label": 0.62, "second label": 0.97, "third label": 0.01},
    "truncated": False,
    "num_tokens": 7,
}
_EXAMPLE_VALUE = {"value": 3.21, "truncated": False, "num_tokens": 7}

Text = Annotated[
    str, Field(description="Plain text of up to MAX_TEXT_CHARS characters; not blank.")
]
# Validation stops at the first invalid entry: an error per entry would take far more memory than
# the entries.
Texts = Annotated[list[str], Field(fail_fast=True)]
Pair = Annotated[
    str | None,
    Field(
        default=None,
        description="The second text, for a model that reads pairs (`reads_pairs` of GET /model).",
    ),
]
TopK = Annotated[
    int | None,
    Field(
        default=None,
        ge=1,
        description="Return only this many probabilities, the highest first; null returns all.",
    ),
]


class RequestModel(BaseModel):
    """What requests have in common: types are not guessed, and a misspelled field is an error."""

    model_config = ConfigDict(strict=True, extra="forbid")


_LONGEST_NAME = 100  # characters, of an operating point
_SHARE_OR_NAME = (
    "must be a share greater than 0 and at most 1, such as 0.02, or the name of an operating point"
)


def _share_or_name(given: object) -> object:
    # Before the types are looked at: a union would report one error for each of them.
    reason = _SHARE_OR_NAME
    if isinstance(given, str) and len(given) <= _LONGEST_NAME:
        try:
            return share_or_name(given)
        except ValueError as error:
            reason = str(error)
    elif given is None or (type(given) in (int, float) and 0 < given <= 1):
        return given
    raise PydanticCustomError("max_error", "{reason}", {"reason": reason})


class AsksMore(RequestModel):
    """What a request may ask for beside the plain answer, of a calibrated model."""

    coverage: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Add the `set` of labels that holds the right one this often, such as 0.95; "
        "for a regression model the `interval` that holds the right number. null: as COVERAGE says.",
    )
    max_error: Annotated[float | str | None, BeforeValidator(_share_or_name)] = Field(
        default=None,
        description="Answer only where at most this share of answers is wrong, such as 0.02, or "
        "as the operating point of this name says (GET /model names them). A text that gets no "
        "answer has `label` null, and `abstained` says why. null: as MAX_ERROR says.",
    )
    familiarity: bool = Field(
        default=False,
        description="Add `familiarity`: the share of held-out texts that are no more like the "
        "training texts than this one.",
    )


def refuse_asking_for_more(given: Any) -> Any:
    """Refuse the fields of `AsksMore` in answers that list labels with scores and nothing else.

    A request may be in another server's format, whose unknown fields are ignored; a promise that is
    asked for must not be.
    """
    for name in AsksMore.model_fields if isinstance(given, dict) else ():
        asked = given.get(name)
        if asked is not None and asked is not False:
            line = "this format has no place for it: it lists all labels; use /predict"
            raise PydanticCustomError("no_place", "{name}: {line}", {"name": name, "line": line})
    return given


class PredictRequest(AsksMore):
    """One text to classify."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": _EXAMPLE_TEXT}]})

    text: Text
    text_pair: Pair = None
    top_k: TopK = None


class BatchRequest(AsksMore):
    """Texts to classify in one go."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"texts": [_EXAMPLE_TEXT]}]})

    texts: Texts = Field(
        min_length=1, description="One to MAX_BATCH_TEXTS texts, none of them blank."
    )
    text_pairs: Texts | None = Field(
        default=None,
        description="For a model that reads pairs: the second text of each, in the same order.",
    )
    top_k: TopK = None


class ExplainRequest(RequestModel):
    """One text to explain."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": _EXAMPLE_TEXT}]})

    text: Text
    text_pair: Pair = None
    label: str | None = Field(
        default=None, description="The label to explain; null is the most probable one."
    )


class FeedbackRequest(RequestModel):
    """Which label is right for a text."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": _EXAMPLE_TEXT, "label": "first label"}]}
    )

    label: str = Field(description="The right label, one of the model's.")
    text: str | None = Field(
        default=None,
        description="The text, as it was sent. null: the server is to look it up by `request_id`, "
        "which it can only if it keeps texts.",
    )
    request_id: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._:/+=@-]{1,128}$",
        description="The X-Request-ID of the answer that is corrected.",
    )
    position: int = Field(
        default=0, ge=0, lt=2**31, description="Which text of that request, from 0 on."
    )
    by: str | None = Field(
        default=None,
        max_length=100,
        description="Who says so, a name that the client gives; null is the name of its API key.",
    )
    model: str | None = Field(
        default=None, description="The name of the model; null is the one in the path, or default."
    )

    @model_validator(mode="after")
    def _says_which_text(self) -> FeedbackRequest:
        if self.text is None and self.request_id is None:
            raise PydanticCustomError("which_text", "text or request_id must be given")
        return self


class FeedbackResponse(BaseModel):
    """What was recorded."""

    id: str = Field(description="The same for the same correction.")
    recorded: Literal[True] = Field(description="It is on the disk.")
    known: bool = Field(description="Whether the same correction had been recorded before.")


class Passage(BaseModel):
    """A part of the text."""

    start: int = Field(description="Where it begins in the text, in Unicode characters.")
    end: int = Field(description="Where it ends, exclusive.")


class AskedFor(BaseModel):
    """What an answer to one text has only if it was asked for, by the request or the settings."""

    set: list[str] | None = Field(
        default=None,
        description="Labels that hold the right one as often as `coverage` says, the most probable "
        "first; of a multi-label model, labels of which on average no more than the rest to 1 is "
        "missed. Absent if no coverage is asked for.",
    )
    interval: list[float] | None = Field(
        default=None,
        description="For a regression model in place of a set: the lowest and the highest number.",
    )
    coverage: float | None = Field(
        default=None,
        description="The coverage that the set or interval has: the least one that the model was "
        "calibrated for and is at least what was asked for.",
    )
    abstained: Literal["uncertain", "unfamiliar"] | None = Field(
        default=None,
        description="Why there is no label: the model is not sure enough, or the text is too "
        "unlike the texts that it was trained on. null: it answers. Absent if no max_error is "
        "asked for.",
    )
    familiarity: float | None = Field(
        default=None,
        description="The share of held-out texts that are no more like the training texts than "
        "this one. Absent if it is not asked for.",
    )


class AnyResponse(AskedFor):
    """What every answer to one text has."""

    truncated: bool = Field(
        description="Whether the text is longer than what the model reads of it."
    )
    num_tokens: int = Field(description="Tokens of the whole text, including the two special ones.")
    passage: Passage | None = Field(
        default=None,
        description="For a model that reads long texts in windows: the window that decided the "
        "answer, or the first of several labels. Absent if the text has one window.",
    )


class PredictionResponse(AnyResponse):
    """The answer to one text, of a model that chooses one label."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE_ANSWER]})

    label: str | None = Field(description="The most likely label; null if the model abstained.")
    confidence: float = Field(description="The probability of that label, 0 to 1.")
    probabilities: dict[str, float] = Field(
        description="The probability of every label, or of the top_k."
    )


class LabelsResponse(AnyResponse):
    """The answer to one text, of a multi-label model."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE_LABELS]})

    labels: list[str] = Field(
        description="The labels whose probability reaches their threshold (GET /model has them), "
        "the best first."
    )
    probabilities: dict[str, float] = Field(
        description="The probability of every label, or of the top_k; each is independent of the "
        "others."
    )


class ValueResponse(AnyResponse):
    """The answer to one text, of a regression model."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE_VALUE]})

    value: float = Field(description="The number, in the unit of the training data.")


# Which of them it is depends on the model that is served; `problem_type` of GET /model says it.
Prediction = PredictionResponse | LabelsResponse | ValueResponse


class WordWeight(BaseModel):
    """What one word does for the label, or for the number."""

    word: str
    start: int = Field(description="Where the word begins in the text, in Unicode characters.")
    end: int = Field(description="Where it ends, exclusive.")
    weight: float = Field(
        description="How far the label's probability, or the number, falls without the word; "
        "negative: it rises."
    )


class Explained(BaseModel):
    """What an explanation adds to an answer."""

    words: list[WordWeight] = Field(description="Every word of the text, in order.")
    pair_words: list[WordWeight] | None = Field(
        default=None, description="For a pair: every word of the second text, in order."
    )


class ExplainResponse(Explained, PredictionResponse):
    """The answer to one text, and what each of its words does for the label."""

    explained: str | None = Field(
        default=None, description="The label whose probability it is, if one was asked for."
    )


class ExplainLabelsResponse(Explained, LabelsResponse):
    """The answer of a multi-label model to one text, and what each of its words
    does for one label.
    """

    explained: str = Field(description="The label whose probability it is.")


class ExplainValueResponse(Explained, ValueResponse):
    """The answer of a regression model to one text, and what each of its words
    adds to the number.
    """


Explanation = ExplainResponse | ExplainLabelsResponse | ExplainValueResponse


class HealthResponse(BaseModel):
    """Whether this process can answer."""

    status: Literal["healthy", "unavailable"]
    model_loaded: bool
    model: str = Field(description="The name of the folder or file that MODEL_CHECKPOINT names.")
    labels: list[str] | None = Field(
        default=None,
        description="The labels that answers choose from; absent if the model answers with a "
        "number.",
    )
    error: str | None = Field(default=None, description="Why no text can be classified now.")


class ProbeResponse(BaseModel):
    """What a probe asks."""

    status: Literal["alive", "ready", "not_ready", "dead"]
    reason: str | None = Field(default=None, description="Why it is not ready, or why it is dead.")


class ObservedWindow(BaseModel):
    """The texts of the last hour, day or week."""

    texts: int
    distinct: int | None = Field(
        default=None, description="Texts that no process had among its last 65,536."
    )
    accuracy: float | None = Field(
        default=None, description="The estimated share of right answers, without labels."
    )
    low: float | None = Field(default=None, description="Its 90% interval begins here.")
    high: float | None = Field(default=None, description="And ends here.")
    reviewed: int | None = Field(
        default=None, description="Texts drawn uniformly whose review corrected the estimate."
    )
    reason: str | None = Field(default=None, description="Why there is no estimate.")
    labels: dict[str, float] | None = Field(
        default=None, description="The share of texts that was answered with each label."
    )
    label_shares: dict[str, float] | None = Field(
        default=None, description="The share that each label probably has among the texts."
    )
    unfamiliar: float | None = Field(
        default=None,
        description="The share of texts with a familiarity below 0.01; 0.01 is usual.",
    )
    abstained: float | None = Field(
        default=None, description="The share of texts that MAX_ERROR leaves without an answer."
    )


class DriftAlarm(BaseModel):
    """Whether the texts are unlike the rows that the model was calibrated on."""

    active: bool = Field(description="Whether the last alarm was raised less than a day ago.")
    evidence: float = Field(description="An alarm is raised at 1,000,000.")
    by_score: dict[str, float] = Field(description="Its parts, which add up to it.")
    texts: int = Field(description="Distinct texts that it has looked at.")
    raised: float | None = Field(
        default=None, description="When the last alarm was raised, in seconds since 1970."
    )
    what: str | None = Field(default=None, description="What had moved then, in one line.")


class ObservedResponse(BaseModel):
    """What the store has of a model, also from other processes and servers."""

    reference_accuracy: float | None = Field(
        default=None, description="Share of right answers on the rows kept for comparison."
    )
    hour: ObservedWindow | None = None
    day: ObservedWindow | None = None
    week: ObservedWindow | None = None
    alarm: DriftAlarm | None = None
    error: str | None = Field(default=None, description="Why the store cannot be read now.")


class ModelResponse(BaseModel):
    """The served model."""

    name: str
    revision: str = Field(
        description="The first 12 hexadecimal digits of the SHA-256 of the trained weights."
    )
    version: str | None = Field(
        default=None, description="The version that its trainer gave it (--model_version)."
    )
    problem_type: str = Field(
        description="single_label_classification, multi_label_classification or regression: what "
        "/predict answers."
    )
    labels: list[str] = Field(
        description="The labels; for a regression model, the name of its number."
    )
    thresholds: dict[str, float] | None = Field(
        default=None,
        description="For a multi-label model: the lowest probability at which each label is given.",
    )
    reads_pairs: bool = Field(
        description="Whether requests have a second text, text_pair, that is read with the text."
    )
    max_length: int = Field(
        description="Tokens that the model reads of a text, or of both texts of a pair together."
    )
    calibrated: bool = Field(
        description="Whether its probabilities were calibrated on held-out rows. If not, they are "
        "as the model gives them, and requests cannot ask for coverage or max_error."
    )
    calibration: dict[str, Any] | None = Field(
        default=None,
        description="What it was calibrated on, the calibration error before and after, the "
        "coverages, and the operating points with the share of texts that each answers.",
    )
    cascade: dict[str, Any] | None = Field(
        default=None,
        description="Of a cascade: the small model that answers what it is sure of, from which "
        "probability on, the largest share of texts that the model itself would answer otherwise, "
        "and on how many texts that was certified.",
    )
    feedback: bool = Field(description="Whether it takes corrections (POST /feedback).")
    texts_kept_s: float | None = Field(
        default=None, description="How many seconds texts may be kept for review (KEEP_TEXTS)."
    )
    shadow: dict[str, Any] | None = Field(
        default=None,
        description="In GET /model: the candidate in SHADOW, how many texts this process has "
        "compared since both were loaded, and how often it gave the same label, also by the label "
        "of the served model.",
    )
    engine: dict[str, Any] = Field(
        description="What runs it, in which precision, and why that was picked."
    )
    training_data: str | None = None
    test_accuracy: float | None = Field(
        default=None, description="Share of correct answers on the test rows, 0 to 1."
    )
    metrics: dict[str, Any] = Field(description="All that training measured (metrics.json).")

    observed: ObservedResponse | None = Field(
        default=None, description="What the server has seen (OBSERVE); absent if it does not look."
    )

    @classmethod
    def of(
        cls, model: ModelLoader, settings: Settings, observed: Mapping[str, Any] | None = None
    ) -> ModelResponse:
        # metrics.json is whatever lies beside the weights.
        kind, thresholds = model.answering.problem_type, None
        known = model.answering.calibration
        if kind is MULTI_LABEL:
            thresholds = dict(zip(model.labels, model.answering.thresholds, strict=True))
        dataset, test = model.metadata.get("dataset"), model.metadata.get("test")
        accuracy = test.get("accuracy") if isinstance(test, dict) else None
        return cls(
            name=model.info["name"],
            revision=model.info["revision"],
            version=version if isinstance(version := model.metadata.get("version"), str) else None,
            problem_type=kind.name,
            labels=model.labels,
            thresholds=thresholds,
            reads_pairs=model.reads_pairs,
            max_length=model.max_length,
            calibrated=known is not None,
            calibration=None if known is None else dict(known.record),
            cascade=None if model.cascade is None else dict(model.cascade.record),
            feedback=bool(settings.observe) and takes_feedback(model),
            texts_kept_s=None if model.reads_pairs else settings.keep_texts_s or None,
            engine={
                name: value
                for name, value in model.info.items()
                if name not in ("name", "path", "revision")
            },
            training_data=dataset if isinstance(dataset, str) else None,
            test_accuracy=accuracy if isinstance(accuracy, int | float) else None,
            # What else lies in the file was not measured, and may be nobody's business.
            metrics={name: value for name, value in model.metadata.items() if name in METRICS_KEYS},
            observed=None if observed is None else ObservedResponse(**observed),
        )


def takes_feedback(model: ModelLoader) -> bool:
    """Whether one label says what is right, and one text what it is about."""
    return model.answering.problem_type is SINGLE_LABEL and not model.reads_pairs


class ListedModel(BaseModel):
    """One of the served models."""

    name: str = Field(description="What /models/NAME, and the field `model`, call it.")
    default: bool = Field(description="Whether it answers requests that name no model.")
    ready: bool
    error: str | None = Field(default=None, description="Why it cannot answer now.")
    labels: list[str] | None = Field(
        default=None, description="Absent, like what follows, while it is not loaded."
    )
    engine: str | None = None
    revision: str | None = None


class ModelPath(BaseModel):
    """Where the model lies that is to be served under a name."""

    model_config = ConfigDict(
        strict=True, extra="forbid", json_schema_extra={"examples": [{"path": "spam-2"}]}
    )

    path: str = Field(
        min_length=1,
        max_length=4096,
        description="A model folder in MODELS_FOLDER, from there on.",
    )


class ErrorDetail(BaseModel):
    """What went wrong."""

    code: str = Field(description="A short name for programs, such as blank_text or queue_full.")
    message: str = Field(description="One line for people.")
    request_id: str = Field(
        description="The request's name in the server's log, as in X-Request-ID."
    )


class ErrorResponse(BaseModel):
    """Every refusal has this shape."""

    error: ErrorDetail
