"""The one layer around every route: decides who may pass, how much and for how long, and logs and
counts every request.

It is one layer instead of eight because each layer costs every request, and pure ASGI because
Starlette's base class hides that a client has disconnected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.http.admission import Allowance, Refusal
from inference.http.error_responses import RETRY_AFTER_SECONDS, error_response
from inference.http.paths import is_change, remove_second_prefix, route_path
from inference.http.request_context import RequestContext
from inference.http.request_log import log_failure
from inference.http.server_parts import Parts

# What nginx logs if the client disconnected before the answer; never sent.
CLIENT_GONE = 499
# Seconds after which a request that is not answered is watched for its client's leaving.
_WATCHED_AFTER_S = 0.05
_ADMIN_PREFIX = "/admin/"
# Pages may be embedded in the Space's page only, and load nothing from elsewhere.
_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'self' https://huggingface.co https://*.huggingface.co"
)
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", _POLICY.encode()),
]
_METHODS = frozenset(("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"))


class RequestGate:
    """Admits requests and follows each of them to its end."""

    def __init__(self, app: ASGIApp, parts: Parts, routes: Sequence[Route]) -> None:
        settings = parts.settings
        self.app = app
        self._routes = routes
        # What a refused request may be counted under, since refused requests are not routed.
        self.paths = frozenset(route.path for route in routes if not route.param_convertors)
        self.metrics = parts.metrics
        self.lifecycle = parts.lifecycle
        self.body_budget = parts.body_budget
        self.in_progress = parts.in_progress
        self.overload = parts.overload
        self.max_body_bytes = settings.max_body_bytes
        self.timeout_s = settings.request_timeout_s
        self.count_request = parts.count_request
        self._limits = parts.limits
        self._origins = frozenset(settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope.get("root_path"):
            remove_second_prefix(scope, self._routes)
        await _GatedRequest(self, scope, receive, send).run()

    def refusal(self, scope: Scope) -> Refusal | None:
        """Why a request may not pass, judged by its headers alone."""
        allowance = self._limits.judge(scope)
        if not isinstance(allowance, Allowance):
            return allowance
        RequestContext.of(scope).allowance = allowance
        if not is_change(scope):
            return None
        headers = scope["headers"]
        given = dict(headers)
        # A page of another site needs nobody's leave to send text/plain, also to a server on the
        # visitor's own machine.
        is_foreign = given.get(b"sec-fetch-site") == b"cross-site"
        if is_foreign and not self._is_allowed(given.get(b"origin", b"")):
            line = "a page of another site sent this; list its origin in CORS_ORIGINS to allow it"
            return 403, "forbidden", line, None
        if refusal := self._size_refusal(given, headers):
            return refusal
        # Neither a change of models nor a stream waits in the queue as a whole: its lines wait for
        # room there.
        path = route_path(scope)
        is_text = scope["method"] == "POST" and not path.startswith(_ADMIN_PREFIX)
        if not is_text or is_stream(headers):
            return None
        # Before the body is read: under overload, reading is most of the cost of a refusal.
        return self.overload(path)

    def _size_refusal(
        self, given: dict[bytes, bytes], headers: list[tuple[bytes, bytes]]
    ) -> Refusal | None:
        announced = given.get(b"content-length", b"0")
        num_bytes = int(announced) if announced.isdigit() else 0
        # Content-Length is only an announcement, so `receive` counts again; but an honest client
        # hears at once.
        if num_bytes > self.max_body_bytes and not is_stream(headers):
            return 413, "body_too_large", self.too_large, None
        if not self.body_budget.has_room(min(num_bytes, self.max_body_bytes)):
            return 503, "server_busy", self.body_budget.BUSY, RETRY_AFTER_SECONDS
        return None

    def _is_allowed(self, origin: bytes) -> bool:
        return "*" in self._origins or origin.decode("latin-1") in self._origins

    @property
    def too_large(self) -> str:
        what = f"the body has more than {self.max_body_bytes} bytes"
        return f"{what}; send shorter texts or fewer of them"


_STREAM_TYPES = frozenset(
    f"application/{name}".encode()
    for name in ("x-ndjson", "ndjson", "jsonl", "x-jsonl", "jsonlines", "x-jsonlines")
)


def is_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    content_type = next((value for name, value in headers if name == b"content-type"), b"")
    return content_type.partition(b";")[0].strip().lower() in _STREAM_TYPES


class _GatedRequest:
    """One request in progress: wraps the server's receive and send, which the app then uses."""

    __slots__ = (
        "context",
        "gate",
        "has_body",
        "inner_receive",
        "inner_send",
        "is_answered",
        "is_gone",
        "is_late",
        "method",
        "scope",
        "status",
        "task",
        "timer",
        "watch",
    )

    def __init__(self, gate: RequestGate, scope: Scope, receive: Receive, send: Send) -> None:
        self.gate = gate
        self.inner_receive = receive
        self.inner_send = send
        self.context = RequestContext.begin(scope)
        self.method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        # HEAD is answered as GET is, and the server leaves out the body.
        self.scope = scope if self.method != "HEAD" else {**scope, "method": "GET"}
        # What is logged if nothing else comes: the client left before the answer began.
        self.status = CLIENT_GONE
        self.is_answered = False
        self.is_gone = False
        self.is_late = False
        self.task = asyncio.current_task()
        self.has_body = False  # all of it
        self.timer: asyncio.TimerHandle | None = None
        self.watch: asyncio.Task[None] | None = None

    async def run(self) -> None:
        gate, context, scope = self.gate, self.context, self.scope
        try:
            # 1. Admit the request by its headers alone, or refuse it before any of its body is
            # read.
            if (refusal := gate.refusal(scope)) is None:
                # 2. The route reads the body through `receive` and answers through `send`, below.
                with gate.in_progress:
                    await gate.app(scope, self.receive, self.send)
            else:
                await error_response(scope, *refusal)(scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self.is_gone:
                raise
            self.status = CLIENT_GONE
        except Exception as error:
            log_failure(context, error)
            if self.status != CLIENT_GONE:
                # The answer has begun, so no other can be sent: all that is left is to close the
                # connection, which tells the client that what it has is not complete.
                raise
            line = "the server failed on this request; its log has the request id"
            await error_response(scope, 500, "internal_error", line)(scope, self.receive, self.send)
        finally:
            # 3. However it ended: return its memory, count it and log it, in this one place.
            if self.timer is not None:
                self.timer.cancel()
            if self.watch is not None:
                self.watch.cancel()
                # It refers to this request: a cycle, which only the garbage collector would free.
                self.watch = None
            gate.body_budget.release(context.held_bytes)
            gate.count_request(context, self.method, self.route(), self.status)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = self.complete(message.get("headers", []))
        elif not message.get("more_body", False):
            self.is_answered = True
        if not self.context.is_stream:
            await self.inner_send(message)
            return
        try:
            async with asyncio.timeout(self.gate.timeout_s):
                await self.inner_send(message)
        except TimeoutError:
            self.cancel()  # a client that takes nothing any more counts as gone
            await asyncio.sleep(0)

    def complete(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        added = [
            (b"x-request-id", self.context.request_id.encode()),
            (b"server-timing", self.context.server_timing()),
        ]
        if self.scope["method"] == "POST":
            added.append((b"cache-control", b"no-store"))
        if self.gate.lifecycle.is_draining or self.gate.lifecycle.is_leaving:
            added.append((b"connection", b"close"))
        return [*headers, *SECURITY_HEADERS, *added]

    async def receive(self) -> Message:
        """Receive a piece of the body; after the last one, wait for a disconnect."""
        if self.has_body:
            await asyncio.wait((self.watch_client(),))
            return {"type": "http.disconnect"}
        message = await self.receive_in_time()
        if message["type"] == "http.disconnect":
            # Cancelling takes effect at this task's next await. Let it be here, before the route
            # gets the message.
            self.cancel()
            await asyncio.sleep(0)
        elif not message.get("more_body", False):
            self.has_body = True
            # Most requests are answered before a task is worth its while.
            self.timer = asyncio.get_running_loop().call_later(_WATCHED_AFTER_S, self.watch_client)
        return message

    def watch_client(self) -> asyncio.Task[None]:
        if self.watch is None:
            self.watch = asyncio.create_task(self.cancel_when_gone())
        return self.watch

    async def receive_in_time(self) -> Message:
        gate = self.gate
        left_s = gate.timeout_s
        if not self.context.is_stream:
            left_s -= time.perf_counter() - self.context.started
        # As asyncio.timeout, at a fifth of its cost.
        timer = asyncio.get_running_loop().call_later(
            left_s, self.give_up_body, asyncio.current_task()
        )
        try:
            message = await self.inner_receive()
        except asyncio.CancelledError:
            if not self.is_late:
                raise
            # It was this request's own timer that cancelled, not the client and not the server.
            asyncio.current_task().uncancel()
            raise HTTPException(
                408, f"the body did not arrive within {gate.timeout_s:g} s; send it again"
            ) from None
        finally:
            timer.cancel()
        if not self.context.is_stream:
            num_bytes = len(message.get("body", b""))
            self.context.held_bytes += num_bytes
            gate.body_budget.take(num_bytes)
            if self.context.held_bytes > gate.max_body_bytes:
                raise HTTPException(413, gate.too_large)
            if not gate.body_budget.has_room(0):
                raise HTTPException(
                    503, gate.body_budget.BUSY, {"Retry-After": str(RETRY_AFTER_SECONDS)}
                )
        return message

    def give_up_body(self, reader: asyncio.Task[None]) -> None:
        self.is_late = True
        reader.cancel()

    async def cancel_when_gone(self) -> None:
        while (await self.inner_receive())["type"] != "http.disconnect":
            pass
        if not self.is_answered:
            self.cancel()

    def cancel(self) -> None:
        # Cancelling the request cancels the futures that it waits for, and that removes its texts
        # from the queue.
        self.is_gone = True
        self.task.cancel()

    def route(self) -> str:
        # From a bounded set: a route's template, never a path that a client made up, or the metrics
        # would grow forever.
        if (route := self.scope.get("route")) is not None:
            return route.path
        path = route_path(self.scope)
        return path if path in self.gate.paths else "unmatched"
