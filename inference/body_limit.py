"""Refuses request bodies that are too large before they fill the memory."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.error_responses import error_response


class BodyLimitMiddleware:
    """Answers 413 to a body beyond the limit, announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body counted."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self.max_bytes:
            await error_response(413, "body_too_large", self._message)(scope, receive, send)
            return
        await self.app(scope, self._counted(receive), send)

    @property
    def _message(self) -> str:
        return f"the body has more than {self.max_bytes} bytes; send shorter texts or fewer of them"

    def _counted(self, receive: Receive) -> Receive:
        num_received = 0

        async def receive_within_limit() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self.max_bytes:
                # FastAPI reads the body and lets this one exception through to the error handlers.
                raise HTTPException(413, self._message)
            return message

        return receive_within_limit
