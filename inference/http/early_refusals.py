"""Refuses requests at their headers under overload, before anything is built for them.

Under overload most requests are refused, and the processor time of refusals is taken from answers.
Here a refusal takes a sixth of the time that it takes through uvicorn's task, all layers of the
application and a line of the log: 48 instead of 301 us, with 32 clients on two busy cores of an
EPYC. With a message and a keep-alive timer for each of them it was 80 us.
The request gate refuses the same requests in the same form, so what is not decided here, and what
uvicorn's other parser (h11) reads, is left to it.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import Route

from inference.http.error_responses import error_body, retry_after
from inference.http.http1 import Headers
from inference.http.request_context import RequestContext
from inference.http.request_gate import SECURITY_HEADERS, is_stream
from inference.http.server_parts import Parts

# A browser's page may get 403 or needs CORS headers; `expect` and chunks change how a body arrives.
_LEFT_TO_THE_GATE = frozenset((b"origin", b"sec-fetch-site", b"expect", b"transfer-encoding"))
# Seconds for which refusals have the same figures in their message, which is most of their cost.
_SAME_MESSAGE_S = 0.1
_ANY_ID = b"REQUEST-ID"


class EarlyRefusals:
    def __init__(self, parts: Parts, routes: Iterable[Route]) -> None:
        """``routes``: those that put a body's texts into the queue."""
        settings = parts.settings
        self._parts = parts
        self._max_body_bytes = settings.max_body_bytes
        # Whose request it is (a key, or an address that a proxy names) is found out by the gate,
        # and traces begin before it.
        needs_layers = (
            parts.api_keys.is_set or settings.rate_limit_per_s > 0 or settings.otel_endpoint
        )
        fixed = () if needs_layers else [one for one in routes if not one.param_convertors]
        self._paths = {route.path.encode(): route.path for route in fixed}
        # By path: code, headers, and body of an answer to a request with `_ANY_ID`.
        self._written: dict[str, tuple[str, bytes, bytes]] = {}
        self._written_until = 0.0

    def answer_to(self, url: bytes, headers: Headers, defaults: Headers) -> bytes | None:
        """The complete answer to a POST that is refused, counted and logged; None if it is not
        refused here.

        ``defaults``: what the server adds to all answers.
        """
        path = self._paths.get(url)
        if path is None:
            return None
        if not self._parts.is_overloaded(path):
            self._parts.in_progress.on_the_way()
            return None
        if not self._is_plain(headers):
            return None
        context = RequestContext.begin({"headers": headers})
        if context.started > self._written_until:
            self._written.clear()
            self._written_until = context.started + _SAME_MESSAGE_S
        written = self._written.get(path) or self._write(path, defaults)
        if written is None:
            return None
        context.error_code, head, body = written
        self._parts.count_request(context, "POST", path, 503)
        request_id = context.request_id.encode()
        body = body.replace(_ANY_ID, request_id)
        return b"%scontent-length: %d\r\nx-request-id: %s\r\nserver-timing: %s\r\n\r\n%s" % (
            head,
            len(body),
            request_id,
            context.server_timing(),
            body,
        )

    def _is_plain(self, headers: Headers) -> bool:
        """Whether the gate, too, would find nothing but the overload."""
        given = dict(headers)
        num_bytes = int(given.get(b"content-length", b"0"))
        lifecycle = self._parts.lifecycle
        return (
            _LEFT_TO_THE_GATE.isdisjoint(given)
            and not (lifecycle.is_draining or lifecycle.is_leaving)  # the connection is to close
            and num_bytes <= self._max_body_bytes
            and self._parts.body_budget.has_room(num_bytes)
            and not is_stream(headers)
        )

    def _write(self, path: str, defaults: Headers) -> tuple[str, bytes, bytes] | None:
        refusal = self._parts.overload(path)
        if refusal is None:  # a pass has ended in this moment
            return None
        status, code, message, wait_s = refusal
        scope = {"headers": [(b"x-request-id", _ANY_ID)], "path": path}
        RequestContext.begin(scope)
        _, body = error_body(scope, status, code, message)
        headers = [
            *defaults,
            (b"retry-after", retry_after(wait_s).encode()),
            (b"content-type", b"application/json"),
            *SECURITY_HEADERS,
            (b"cache-control", b"no-store"),
        ]
        head = b"HTTP/1.1 503 Service Unavailable\r\n"
        head += b"".join(b"%s: %s\r\n" % header for header in headers)
        self._written[path] = code, head, body
        return self._written[path]
