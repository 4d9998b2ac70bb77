"""The Open Inference Protocol, version 2, over HTTP, for KServe's and Triton's clients."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException

import inference
from common.problem_types import MULTI_LABEL, REGRESSION
from common.text import Text
from inference.batching.classifier import Answer
from inference.batching.served_model import Served
from inference.engines.answering import Answering, Wanted
from inference.errors import RefusedTextError
from inference.http.error_responses import REFUSALS
from inference.http.routes.answers import (
    classify,
    decide,
    model_named,
    refuse_many,
    require_named,
    wanted_by,
)
from inference.http.routes.json_route import JsonRoute, parse_json, read_body
from inference.http.routes.open_inference_schemas import (
    BINARY_HEADER,
    INPUT_NAME,
    PAIR_NAME,
    InferRequest,
    InferResponse,
    InputTensor,
    Liveness,
    ModelMetadata,
    ModelReadiness,
    ProtocolError,
    Readiness,
    ServerMetadata,
    TensorMetadata,
    binary_tensor,
    read_binary_texts,
)
from inference.http.server_parts import Parts, PartsDep, parts_of

_UNKNOWN = {
    404: {"model": ProtocolError, "description": "No model of this name or version is served."}
}
_NOT_READY = {503: {**REFUSALS[503], "model": ProtocolError}}
_READINESS = _UNKNOWN | {
    503: {"model": ModelReadiness, "description": "Texts cannot be classified now."}
}
_REFUSALS = {
    status: {**documented, "model": ProtocolError} for status, documented in REFUSALS.items()
} | _UNKNOWN

_WRONG_LENGTH = f"{BINARY_HEADER} must be a number of bytes within the body"

_BINARY_ANSWER = {"schema": {"type": "string", "format": "binary"}}

router = APIRouter(prefix="/v2", tags=["compatible"])


@router.get("")
async def get_server_metadata() -> ServerMetadata:
    """Describe the server."""
    return ServerMetadata(
        name="distrinews", version=inference.__version__, extensions=["binary_tensor_data"]
    )


@router.get(
    "/health/live", responses={503: {"model": Liveness, "description": "Start the process again."}}
)
async def get_server_liveness(parts: PartsDep, response: Response) -> Liveness:
    """Say that the process answers, as `/livez` does."""
    response.status_code = 200 if parts.dead is None else 503
    return Liveness(live=parts.dead is None)


@router.get(
    "/health/ready",
    responses={503: {"model": Readiness, "description": "Send requests elsewhere."}},
)
async def get_server_readiness(parts: PartsDep, response: Response) -> Readiness:
    """Say whether requests should come here."""
    response.status_code = 200 if parts.unready is None else 503
    return Readiness(ready=parts.unready is None)


@router.get("/models/{name}", responses=_UNKNOWN | _NOT_READY)
async def get_model_metadata(name: str, parts: PartsDep) -> ModelMetadata:
    """Describe the model."""
    served = _served(parts, name)
    return ModelMetadata(
        name=served.name,
        versions=[served.model.info["revision"]],
        platform=served.model.info["engine"].replace(" ", "_"),
        inputs=[
            TensorMetadata(name=name, datatype="BYTES", shape=[-1])
            for name in ((INPUT_NAME, PAIR_NAME) if served.model.reads_pairs else (INPUT_NAME,))
        ],
        # What a request without parameters gets: clients ask for all that is listed here.
        outputs=_outputs(served.model.answering, served.wanted),
    )


def _outputs(answering: Answering, wanted: Wanted) -> list[TensorMetadata]:
    is_number = answering.problem_type is REGRESSION
    probabilities = TensorMetadata(
        name="probabilities", datatype="FP32", shape=[-1, len(answering.labels)]
    )
    if is_number:
        outputs = [TensorMetadata(name="value", datatype="FP32", shape=[-1])]
    elif answering.problem_type is MULTI_LABEL:
        outputs = [TensorMetadata(name="labels", datatype="BYTES", shape=[-1]), probabilities]
    else:
        outputs = [
            TensorMetadata(name="label", datatype="BYTES", shape=[-1]),
            TensorMetadata(name="confidence", datatype="FP32", shape=[-1]),
            probabilities,
        ]
    if wanted.rule is not None and is_number:
        outputs.append(TensorMetadata(name="interval", datatype="FP32", shape=[-1, 2]))
    elif wanted.rule is not None:
        outputs.append(TensorMetadata(name="set", datatype="BYTES", shape=[-1]))
    if wanted.point is not None:
        outputs.append(TensorMetadata(name="abstained", datatype="BYTES", shape=[-1]))
    if wanted.familiarity:
        outputs.append(TensorMetadata(name="familiarity", datatype="FP32", shape=[-1]))
    return outputs


@router.get("/models/{name}/ready", responses=_READINESS)
async def get_model_readiness(name: str, parts: PartsDep, response: Response) -> ModelReadiness:
    """Say whether the model can classify."""
    is_ready = parts.why_not_ready(model_named(parts, name)) is None
    response.status_code = 200 if is_ready else 503
    return ModelReadiness(name=name, ready=is_ready)


@router.get("/models/{name}/versions/{version}", responses=_UNKNOWN | _NOT_READY)
async def get_version_metadata(name: str, version: str, parts: PartsDep) -> ModelMetadata:
    """Describe the model if this is the version that is served."""
    _served(parts, name, version)
    return await get_model_metadata(name, parts)


@router.get("/models/{name}/versions/{version}/ready", responses=_READINESS)
async def get_version_readiness(
    name: str, version: str, parts: PartsDep, response: Response
) -> ModelReadiness:
    """Say whether this version of the model can classify."""
    if model_named(parts, name).current is not None:
        _served(parts, name, version)
    return await get_model_readiness(name, parts, response)


class InferRoute(JsonRoute):
    """A JSON route whose tensors may follow the JSON."""

    async def read(self, request: Request) -> bytes:
        """Read the whole body; only the part before the tensors is JSON."""
        return await read_body(request, _num_json_bytes(request))

    def parse(self, model: type[InferRequest], body: bytes, request: Request) -> InferRequest:
        """Check a body against its model, and put the tensors into it."""
        num_json_bytes = _num_json_bytes(request)
        if num_json_bytes is None:
            return parse_json(model, body)
        if num_json_bytes > len(body):
            raise RefusedTextError("invalid_request", _WRONG_LENGTH)
        infer_request = parse_json(model, body[:num_json_bytes])
        settings, rest = parts_of(request).settings, body[num_json_bytes:]
        binary = [
            tensor for tensor in infer_request.inputs if "binary_data_size" in tensor.parameters
        ]
        for tensor in binary:
            size = tensor.parameters["binary_data_size"] if tensor is not binary[-1] else len(rest)
            if type(size) is not int or not 0 <= size <= len(rest):
                raise RefusedTextError(
                    "invalid_request", "binary_data_size must be a number of bytes after the JSON"
                )
            try:
                tensor.data = read_binary_texts(
                    rest[:size], settings.max_batch_texts, settings.max_text_chars
                )
            except UnicodeDecodeError:
                raise HTTPException(400, "the tensor is not UTF-8") from None
            rest = rest[size:]
        return infer_request


def _num_json_bytes(request: Request) -> int | None:
    announced = request.headers.get(BINARY_HEADER)
    if announced is None:
        return None
    if not re.fullmatch("[0-9]{1,18}", announced):
        raise RefusedTextError("invalid_request", _WRONG_LENGTH)
    return int(announced)


async def infer(request: Request, body: InferRequest, name: str) -> dict[str, Any] | Response:
    """Classify texts: one BYTES tensor in, the tensors `label`, `confidence` and `probabilities`
    out.

    With `binary_data_output`, or `binary_data` of an output, tensors follow the JSON as Triton's
    clients read them.

    A model that reads pairs takes two tensors, `text` and `text_pair`. A multi-label model answers
    with `labels` (of each text, joined by "|") and `probabilities`, a regression model with
    `value`. The model's metadata list its tensors.

    `coverage`, `max_error` and `familiarity` among the parameters of the request add the tensors
    `set` (joined as `labels`) or `interval`, `abstained` (empty where the model answers; where it
    does not, `label` is empty) and `familiarity`.
    """
    parts = parts_of(request)
    served = _served(parts, name)
    texts = _texts(body)
    wanted = wanted_by(served, body.parameters)
    described = _outputs(served.model.answering, wanted)
    names = _wanted_outputs(body, [output.name for output in described])
    refuse_many("data[{}]", texts, parts.settings)
    answers = await classify(request, parts, served, texts, "data[{}]")
    fields = [_fields(parts, served, answer, wanted) for answer in answers]
    shape = body.inputs[0].shape
    tensors = {output.name: _tensor(output, fields, shape) for output in described}
    response: dict[str, Any] = {
        "model_name": served.name,
        "model_version": served.model.info["revision"],
        "outputs": [{**tensors[one]} for one in names],
    }
    if wanted.rule is not None:
        response["parameters"] = {"coverage": wanted.rule.coverage}
    if body.id is not None:
        # Half of a surrogate pair ("\\ud83d") is not a character that an answer could carry.
        response["id"] = body.id.encode("utf-8", "replace").decode()
    binary = _binary_outputs(body, names)
    return _with_binary(response, binary) if binary else response


def _wanted_outputs(body: InferRequest, named: list[str]) -> list[str]:
    wanted = [output.name for output in body.outputs] or named
    if unknown := [name for name in wanted if name not in named]:
        line = f"the model has no output {unknown[0]}, its outputs are {', '.join(named)}"
        if needed := _NEEDED_PARAMETERS.get(unknown[0]):
            line += f"; {unknown[0]} needs {needed} among the parameters of the request"
        raise RefusedTextError("invalid_request", line)
    return wanted


_NEEDED_PARAMETERS = {
    "set": "coverage",
    "interval": "coverage",
    "abstained": "max_error",
    "familiarity": "familiarity",
}


def _binary_outputs(body: InferRequest, wanted: Sequence[str]) -> list[str]:
    """The outputs that follow the JSON as bytes: an output's own word goes before the request's."""
    asked = {output.name: output.parameters.binary_data for output in body.outputs}
    default = body.parameters.binary_data_output
    return [name for name in wanted if (default if asked.get(name) is None else asked[name])]


def _with_binary(response: dict[str, Any], names: Sequence[str]) -> Response:
    tail: list[bytes] = []
    for tensor in response["outputs"]:
        if tensor["name"] in names:
            tail.append(binary_tensor(tensor["datatype"], tensor.pop("data")))
            tensor["parameters"] = {"binary_data_size": len(tail[-1])}
    head = to_json(response)
    headers = {BINARY_HEADER: str(len(head))}
    return Response(head + b"".join(tail), headers=headers, media_type="application/octet-stream")


def _served(parts: Parts, name: str, version: str | None = None) -> Served:
    served = require_named(parts, name)
    revision = served.model.info["revision"]
    if version not in (None, revision):
        raise HTTPException(404, f"no such version of the model; {revision} is served")
    return served


def _texts(body: InferRequest) -> list[Text]:
    if len(body.inputs) == 1:
        return _texts_of(body.inputs[0])
    first, second = sorted(body.inputs, key=lambda tensor: tensor.name == PAIR_NAME)
    if second.name != PAIR_NAME or first.name == PAIR_NAME or first.shape != second.shape:
        line = f"two tensors must be {INPUT_NAME} and {PAIR_NAME}, of the same shape"
        raise RefusedTextError("invalid_request", line)
    return list(zip(_texts_of(first), _texts_of(second), strict=True))


def _texts_of(tensor: InputTensor) -> list[Text]:
    texts = [text for row in tensor.data or [] for text in ([row] if isinstance(row, str) else row)]
    if not texts:
        raise RefusedTextError("invalid_request", "the tensor holds no text")
    if math.prod(tensor.shape) != len(texts):
        raise RefusedTextError(
            "invalid_request", f"the shape {tensor.shape} is not that of {len(texts)} texts"
        )
    return texts


def _fields(parts: Parts, served: Served, answer: Answer, wanted: Wanted) -> dict[str, Any]:
    """An answer to one text, by the names of the tensors."""
    answering = served.model.answering
    given, more = decide(parts, served, answer, wanted)
    fields = answering.fields(answer.values, given) | more
    # A tensor has no null: a label, or a reason, that is not there is an empty text.
    texts = {name: fields[name] or "" for name in ("label", "abstained") if name in fields}
    lists = {name: answering.joined(fields[name]) for name in ("labels", "set") if name in fields}
    return fields | texts | lists


def _tensor(
    output: TensorMetadata, fields: Sequence[dict[str, Any]], shape: list[int]
) -> dict[str, Any]:
    data = [one[output.name] for one in fields]
    if len(output.shape) == 2:  # probabilities and intervals: several numbers for a text
        rows = [list(one.values()) if isinstance(one, dict) else one for one in data]
        shape = [len(rows), output.shape[1]]
        data = [number for row in rows for number in row]
    return {"name": output.name, "datatype": output.datatype, "shape": shape, "data": data}


async def infer_by_version(
    request: Request, body: InferRequest, name: str, version: str
) -> dict[str, Any] | Response:
    """Classify texts as `infer` does if this is the version that is served."""
    _served(parts_of(request), name, version)
    return await infer(request, body, name)


for _path, _endpoint in (
    ("/models/{name}/infer", infer),
    ("/models/{name}/versions/{version}/infer", infer_by_version),
):
    router.add_api_route(
        _path,
        _endpoint,
        methods=["POST"],
        response_model=InferResponse,
        responses={200: {"content": {"application/octet-stream": _BINARY_ANSWER}}, **_REFUSALS},
        route_class_override=InferRoute,
    )
