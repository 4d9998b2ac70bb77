"""Requests and responses of the Open Inference Protocol, version 2, with its binary extension."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from inference.errors import RefusedTextError
from inference.http.schemas import AsksMore, Texts

# Triton's clients append tensors to the JSON; this header says where the JSON ends.
BINARY_HEADER = "inference-header-content-length"
INPUT_NAME, PAIR_NAME = "text", "text_pair"
_MAX_UTF8_BYTES = 4  # of one character


class TensorMetadata(BaseModel):
    """What a tensor looks like; -1 stands for any number."""

    name: str
    datatype: str
    shape: list[int]


class ServerMetadata(BaseModel):
    """The server."""

    name: str
    version: str
    extensions: list[str]


class Liveness(BaseModel):
    """Answer to the live probe."""

    live: bool


class Readiness(BaseModel):
    """Answer to the ready probe of the server."""

    ready: bool


class ModelReadiness(Readiness):
    """Answer to the ready probe of a model."""

    name: str


class ModelMetadata(BaseModel):
    """The model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class InputTensor(BaseModel):
    """Texts, in `data` or (binary_data_size: how many bytes) behind the JSON."""

    model_config = ConfigDict(strict=True)

    name: str
    shape: list[Annotated[int, Field(ge=0, le=2**31)]] = Field(
        min_length=1, max_length=2, description="[texts] or [texts, 1]."
    )
    datatype: Literal["BYTES"]
    parameters: dict[str, Any] = {}
    data: Texts | Annotated[list[Texts], Field(fail_fast=True)] | None = Field(
        default=None, description="The texts."
    )


class OutputParameters(BaseModel):
    """How a tensor is answered; unknown fields are ignored, except those of
    extensions that are not served.
    """

    model_config = ConfigDict(strict=True)

    binary_data: bool | None = Field(
        default=None,
        description="Send the tensor behind the JSON; null is as binary_data_output of the "
        "request.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_extensions(cls, given: Any) -> Any:
        for name in ("classification", "shared_memory_region"):
            if isinstance(given, dict) and given.get(name) is not None:
                line = (
                    f"{name} is an extension that is not served; the best labels are those of the "
                    "highest probabilities"
                )
                raise PydanticCustomError("extension", line)
        return given


class RequestParameters(AsksMore):
    """What applies to all outputs; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    binary_data_output: bool = Field(default=False, description="Send all tensors behind the JSON.")


class RequestedOutput(BaseModel):
    """A tensor to answer with."""

    name: Literal[
        "label",
        "labels",
        "confidence",
        "probabilities",
        "value",
        "set",
        "interval",
        "abstained",
        "familiarity",
    ]
    parameters: OutputParameters = OutputParameters()


class InferRequest(BaseModel):
    """Texts to classify; unknown fields are ignored, as the protocol asks."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "inputs": [
                        {
                            "name": INPUT_NAME,
                            "shape": [1],
                            "datatype": "BYTES",
                            "data": ["Shares fall"],
                        }
                    ]
                }
            ]
        },
    )

    id: str | None = None
    parameters: RequestParameters = RequestParameters()
    inputs: list[InputTensor] = Field(
        min_length=1,
        max_length=2,
        description="The tensor of the texts; for a model that reads pairs, also another of the "
        "same shape, named text_pair.",
    )
    outputs: list[RequestedOutput] = Field(
        default=[],
        max_length=6,
        fail_fast=True,
        description="Default: all that the model has, and what the parameters ask for.",
    )


class OutputTensor(TensorMetadata):
    """A tensor of answers, in row-major order, in `data` or (binary_data_size: how many bytes)
    behind the JSON.
    """

    data: list[str] | list[float] | None = None
    parameters: dict[str, Any] | None = None


class InferResponse(BaseModel):
    """The answers."""

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, float] | None = Field(
        default=None, description="The `coverage` that the sets or intervals have, if any."
    )
    outputs: list[OutputTensor]


class ProtocolError(BaseModel):
    """The protocol's own error shape: one line."""

    error: str


def binary_tensor(datatype: str, data: Sequence[str] | Sequence[float]) -> bytes:
    """The elements of a tensor of answers; each text behind its length in 4 little-endian bytes."""
    if datatype == "FP32":
        return np.array(data, dtype="<f4").tobytes()
    texts = [text.encode("utf-8", "replace") for text in data]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def read_binary_texts(data: bytes, max_texts: int, max_text_chars: int) -> list[str]:
    """Read the elements of a BYTES tensor, each its length in 4 little-endian bytes followed by
    UTF-8.

    Raises:
        UnicodeDecodeError: an element is not UTF-8.
        RefusedTextError: the lengths do not add up, or there are too many texts or too long ones.
    """
    texts: list[str] = []
    offset = 0
    while offset < len(data):
        if len(texts) == max_texts:
            raise RefusedTextError(
                "too_many_texts",
                f"data has more entries than the maximum of {max_texts}; send more batches",
            )
        if offset + 4 > len(data):
            raise RefusedTextError(
                "invalid_request", "the tensor ends within the length of an element"
            )
        (length,) = struct.unpack_from("<I", data, offset)
        offset += 4 + length
        if offset > len(data):
            raise RefusedTextError("invalid_request", "the tensor ends within an element")
        if length > max_text_chars * _MAX_UTF8_BYTES:
            line = (
                f"data[{len(texts)}] has {length} bytes, more than {max_text_chars} characters "
                "can have; shorten it"
            )
            raise RefusedTextError("text_too_long", line)
        texts.append(data[offset - length : offset].decode("utf-8"))
    return texts
