"""Optional traces for OpenTelemetry: one span per request, with its stages inside."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference import __version__
from inference.errors import SettingsError
from inference.http.paths import route_path
from inference.http.request_context import RequestContext

# Probes and metrics come every few seconds and would only be noise.
_UNTRACED = ("/livez", "/readyz", "/health", "/metrics", "/v2/health/")
_STAGES = ("tokenize", "queue", "forward")


class Tracing:
    """Creates spans and sends them to a collector, batched in a thread."""

    def __init__(self, endpoint: str) -> None:
        """Raises:
        SettingsError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise SettingsError(
                'OTEL_ENDPOINT: needs OpenTelemetry; pip install "distrinews[otel]"',
                code="package-missing",
            ) from None
        resource = Resource.create({"service.name": "distrinews", "service.version": __version__})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self.close = provider.shutdown
        self.tracer = provider.get_tracer("distrinews")
        self.kind = SpanKind.SERVER
        self.inside = set_span_in_context
        self.propagator = TraceContextTextMapPropagator()


class TraceMiddleware:
    """Creates a span for every request, as a child of the caller's span if there is one."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, self._sending_the_last_spans(send))
            return
        if scope["type"] != "http" or route_path(scope).startswith(_UNTRACED):
            await self.app(scope, receive, send)
            return
        # The span is named when it ends: which route a request has is known only after routing.
        status = 0

        async def noting_status(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        started = time.time_ns()
        tracing = self._tracing
        parent = tracing.propagator.extract(headers)
        span = tracing.tracer.start_span(
            scope["method"], parent, kind=tracing.kind, start_time=started
        )
        try:
            await self.app(scope, receive, noting_status)
        finally:
            context = RequestContext.of(scope)
            route = context.route
            span.update_name(f"{scope['method']} {route}")
            span.set_attributes(
                {
                    "http.request.method": scope["method"],
                    "http.route": route,
                    "http.response.status_code": status,
                }
            )
            span.set_attributes(
                {"distrinews.request_id": context.request_id, "distrinews.texts": context.num_texts}
            )
            inside = tracing.inside(span)
            for name, seconds in zip(_STAGES, context.stages or (), strict=False):
                # One after the other, as they happen for a single text; for several texts, the
                # longest of each.
                stage = tracing.tracer.start_span(name, inside, start_time=started)
                started += int(seconds * 1e9)
                stage.end(started)
            span.end()

    def _sending_the_last_spans(self, send: Send) -> Send:
        # OpenTelemetry would do it when Python exits, but one worker of several ends without that.
        async def closing(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown."):
                await asyncio.to_thread(self._tracing.close)
            await send(message)

        return closing
