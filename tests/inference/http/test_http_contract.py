"""Random requests from the OpenAPI document, valid and not: every answer is a documented one, and none is a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from inference.app import create_app
from inference.http.routes import streams
from inference.settings import Settings
from tests.inference.servers import serving

pytest_plugins = ["schemathesis.pytest.plugin"]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
_ANY_TIME = {"deadline": None, "suppress_health_check": list(HealthCheck)}

# Any lines at all are a valid stream: what is no text is answered by a line of its own.
_STREAM_CHECKS = [check for check in CHECKS if check is not negative_data_rejection]

schema = schemathesis.openapi.from_dict(create_app(Settings()).openapi())


@schemathesis.serializer(streams.MEDIA_TYPE)
def serialize_lines(context: schemathesis.SerializationContext, value: Any) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else json.dumps(value).encode()


def _check(case: schemathesis.Case, address: str) -> None:
    checks = _STREAM_CHECKS if case.media_type == streams.MEDIA_TYPE else CHECKS
    case.call_and_validate(base_url=address, checks=checks)


@pytest.fixture(scope="module")
def address(model_folder: Path) -> Iterator[str]:
    with serving(model_folder, max_text_chars=2000, max_batch_texts=8, explain_max_passes=8) as client:
        yield str(client.base_url)


@schema.parametrize()
@settings(max_examples=10, derandomize=True, **_ANY_TIME)
def test_random_requests_get_documented_answers(case: schemathesis.Case, address: str) -> None:
    _check(case, address)


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=300, **_ANY_TIME)
def test_thousands_of_random_requests_get_documented_answers(case: schemathesis.Case, address: str) -> None:
    _check(case, address)
