"""Requests and responses of the HTTP interface."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

_EXAMPLE_TEXT = "Oil prices rise as stocks fall on Wall Street."
_EXAMPLE_ANSWER = {
    "label": "Business",
    "confidence": 0.97,
    "probabilities": {"World": 0.01, "Sports": 0.005, "Business": 0.97, "Sci/Tech": 0.015},
}


class PredictRequest(BaseModel):
    """One text to classify."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": _EXAMPLE_TEXT}]})

    text: str = Field(description="Plain text of any length up to MAX_TEXT_CHARS; not blank.")


class BatchRequest(BaseModel):
    """Texts to classify in one go."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"texts": [_EXAMPLE_TEXT]}]})

    texts: list[str] = Field(min_length=1, description="One to MAX_BATCH_TEXTS texts, none of them blank.")


class PredictionResponse(BaseModel):
    """The answer to one text."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE_ANSWER]})

    label: str = Field(description="The most likely label.")
    confidence: float = Field(description="The probability of that label, 0 to 1.")
    probabilities: dict[str, float] = Field(description="The probability of every label; they sum to 1.")


class HealthResponse(BaseModel):
    """Whether this process can answer."""

    status: Literal["healthy", "unavailable"]
    model_loaded: bool
    model: str = Field(description="The model folder or .pt file that MODEL_CHECKPOINT names.")
    labels: list[str] | None = Field(default=None, description="The labels that answers choose from.")
    error: str | None = Field(default=None, description="Why no model is loaded.")


class ErrorDetail(BaseModel):
    """What went wrong."""

    code: str = Field(description="A short name for programs, such as blank_text or model_unavailable.")
    message: str = Field(description="One line for people.")


class ErrorResponse(BaseModel):
    """Every refusal has this shape."""

    error: ErrorDetail
