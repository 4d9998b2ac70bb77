"""The Open Inference Protocol, version 2, over HTTP: KServe's and Triton's clients work unchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

import inference
from inference.error_responses import REFUSALS
from inference.errors import RefusedTextError
from inference.routes.answers import classify, refuse_many, render
from inference.routes.dependencies import PartsDep, parts_of
from inference.routes.json_route import JsonRoute, parse_json
from inference.routes.open_inference_schemas import (
    BINARY_HEADER,
    INPUT_NAME,
    InferRequest,
    InferResponse,
    Liveness,
    ModelMetadata,
    ModelReadiness,
    ProtocolError,
    Readiness,
    ServerMetadata,
    TensorMetadata,
    read_binary_texts,
)
from inference.served_model import Served
from inference.server_parts import Parts

_UNKNOWN = {404: {"model": ProtocolError, "description": "No model of this name is served."}}
_NOT_READY = {503: {**REFUSALS[503], "model": ProtocolError}}
_REFUSALS = {status: {**documented, "model": ProtocolError} for status, documented in REFUSALS.items()} | _UNKNOWN

router = APIRouter(prefix="/v2", tags=["compatible"])


@router.get("")
async def get_server_metadata() -> ServerMetadata:
    """Describe the server."""
    return ServerMetadata(name="distrinews", version=inference.__version__, extensions=["binary_tensor_data"])


@router.get("/health/live", responses={503: {"model": Liveness, "description": "Start the process again."}})
async def get_server_liveness(parts: PartsDep, response: Response) -> Liveness:
    """Say that the process answers, as `/livez` does."""
    response.status_code = 200 if parts.dead is None else 503
    return Liveness(live=parts.dead is None)


@router.get("/health/ready", responses={503: {"model": Readiness, "description": "Send requests elsewhere."}})
async def get_server_readiness(parts: PartsDep, response: Response) -> Readiness:
    """Say whether requests should come here."""
    response.status_code = 200 if parts.unready is None else 503
    return Readiness(ready=parts.unready is None)


@router.get("/models/{name}", responses=_UNKNOWN | _NOT_READY)
async def get_model_metadata(name: str, parts: PartsDep) -> ModelMetadata:
    """Describe the model."""
    served = _served(parts, name)
    num_labels = len(served.model.labels)
    return ModelMetadata(
        name=served.name,
        versions=[served.model.info["revision"]],
        platform=served.model.info["engine"].replace(" ", "_"),
        inputs=[TensorMetadata(name=INPUT_NAME, datatype="BYTES", shape=[-1])],
        outputs=[
            TensorMetadata(name="label", datatype="BYTES", shape=[-1]),
            TensorMetadata(name="confidence", datatype="FP32", shape=[-1]),
            TensorMetadata(name="probabilities", datatype="FP32", shape=[-1, num_labels]),
        ],
    )


@router.get(
    "/models/{name}/ready",
    responses=_UNKNOWN | {503: {"model": ModelReadiness, "description": "Texts cannot be classified now."}},
)
async def get_model_readiness(name: str, parts: PartsDep, response: Response) -> ModelReadiness:
    """Say whether the model can classify."""
    if parts.served_model.current is not None:
        _served(parts, name)
    response.status_code = 200 if parts.unready is None else 503
    return ModelReadiness(name=name, ready=parts.unready is None)


class InferRoute(JsonRoute):
    """A JSON route whose tensor may stand behind the JSON."""

    def parse(self, model: type[InferRequest], body: bytes, request: Request) -> InferRequest:
        """Check a body against its model, and bring the tensor into it."""
        announced = request.headers.get(BINARY_HEADER)
        if announced is None:
            return parse_json(model, body)
        if not announced.isdecimal() or int(announced) > len(body):
            raise RefusedTextError("invalid_request", f"{BINARY_HEADER} must be a number of bytes within the body")
        infer_request = parse_json(model, body[: int(announced)])
        tensor = infer_request.inputs[0]
        if "binary_data_size" in tensor.parameters:
            tensor.data = _binary_texts(body[int(announced) :])
        return infer_request


def _binary_texts(data: bytes) -> list[str]:
    try:
        return read_binary_texts(data)
    except UnicodeDecodeError:
        raise HTTPException(400, "the tensor is not UTF-8") from None
    except ValueError as error:
        raise RefusedTextError("invalid_request", str(error)) from None


async def infer(request: Request, body: InferRequest, name: str) -> dict[str, Any]:
    """Classify texts: one BYTES tensor in, the tensors `label`, `confidence` and `probabilities` out."""
    parts = parts_of(request)
    served = _served(parts, name)
    texts = _texts(body)
    refuse_many("data", texts, parts.settings)
    answers = await classify(request, parts, served, texts, "data[{}]")
    rendered = [render(parts, served, answer) for answer in answers]
    wanted = [output.name for output in body.outputs] or ["label", "confidence", "probabilities"]
    response: dict[str, Any] = {
        "model_name": served.name,
        "model_version": served.model.info["revision"],
        "outputs": [_tensor(one, rendered, body.inputs[0].shape) for one in wanted],
    }
    return response if body.id is None else {**response, "id": body.id}


def _served(parts: Parts, name: str) -> Served:
    served = parts.served_model.require()
    if name != served.name:
        raise HTTPException(404, f"no model of this name; {served.name} is served")
    return served


def _texts(body: InferRequest) -> list[str]:
    tensor = body.inputs[0]
    if not tensor.data:
        raise RefusedTextError("invalid_request", "the tensor holds no text")
    texts = [text for row in tensor.data for text in ([row] if isinstance(row, str) else row)]
    if math.prod(tensor.shape) != len(texts):
        line = f"the shape {tensor.shape} is not that of {len(texts)} texts"
        raise RefusedTextError("invalid_request", line)
    return texts


def _tensor(name: str, rendered: Sequence[dict[str, Any]], shape: list[int]) -> dict[str, Any]:
    if name == "probabilities":
        rows = [list(one[name].values()) for one in rendered]
        shape = [len(rows), len(rows[0])]
        return {"name": name, "datatype": "FP32", "shape": shape, "data": [value for row in rows for value in row]}
    datatype = "BYTES" if name == "label" else "FP32"
    return {"name": name, "datatype": datatype, "shape": shape, "data": [one[name] for one in rendered]}


router.add_api_route(
    "/models/{name}/infer",
    infer,
    methods=["POST"],
    response_model=InferResponse,
    responses=_REFUSALS,
    route_class_override=InferRoute,
)
