from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.http_servers import JsonHandler, served_answers
from tests.inference.servers import REPOSITORY, stand_in_server


@contextmanager
def _collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    def take(request: JsonHandler) -> bytes:
        bodies.append(request.body())
        return b""

    with served_answers(take) as address:
        yield f"{address}/v1/traces", bodies


def test_a_request_is_a_span_with_its_stages_under_the_caller_s_trace(model_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the otel extra")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the otel extra")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    with (
        _collector() as (endpoint, bodies),
        stand_in_server(model_folder, tmp_path, 0.001, OTEL_ENDPOINT=endpoint) as server,
    ):
        headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
        server.client.post("/predict", json={"text": "secret oil prices"}, headers=headers)
        assert server.stop() == 0
    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    spans = [
        span
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert {span.name for span in spans} == {"POST /predict", "tokenize", "queue", "forward"}
    assert {span.trace_id.hex() for span in spans} == {trace_id}
    assert not [body for body in bodies if b"secret" in body]


def test_without_the_extra_the_server_says_so_in_one_line() -> None:
    blocked = "import sys; sys.modules['opentelemetry.sdk.resources'] = None; from inference.app import app"
    environment = {**os.environ, "OTEL_ENDPOINT": "http://127.0.0.1:1/v1/traces"}
    run = subprocess.run(
        [sys.executable, "-c", blocked], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 2
    assert run.stderr == 'error: OTEL_ENDPOINT: needs OpenTelemetry; pip install "distrinews[otel]" [package-missing]\n'
