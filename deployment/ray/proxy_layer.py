"""What Serve's HTTP proxy lacks: a refusal that says "again, please" when a replica dies over a request."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.http.error_responses import error_response
from inference.http.request_context import RequestContext

_RETRY_AFTER_SECONDS = 1


class RetryableRefusals:
    """Adds Retry-After to every 503, and answers 503 if the proxy ends a request without any
    answer.

    That happens when the replica of a request is gone, and Ray's HTTP server would turn it into a
    plain 500. An answer that has begun is cut off, which clients see as a lost connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_answered = False

        async def complete(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                _complete_headers(message)
            await send(message)

        # Serve's proxy returns without a word if the replica is gone, so whether anything was sent
        # is the only sign of it.
        await self.app(scope, receive, complete)
        if not is_answered:
            RequestContext.begin(scope)
            what = "the replica that had this request is gone; send it again"
            refusal = error_response(scope, 503, "replica_lost", what, _RETRY_AFTER_SECONDS)
            refusal.headers["X-Request-ID"] = RequestContext.of(scope).request_id
            await refusal(scope, receive, send)


def _complete_headers(message: Message) -> None:
    headers = MutableHeaders(scope=message)
    if message["status"] == 503:
        headers.setdefault("Retry-After", str(_RETRY_AFTER_SECONDS))
    if request_id := headers.get("X-Request-ID"):
        headers["X-Request-ID"] = request_id  # the replica and the proxy have each set it


def layers() -> list[Middleware]:
    """What RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH asks for."""
    return [Middleware(RetryableRefusals)]
