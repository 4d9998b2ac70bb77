"""Streams: JSON lines in, JSON lines out, answered in order while the body still arrives."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inference.batching.classifier import Answer
from inference.batching.served_model import Served
from inference.engines.answering import Wanted
from inference.errors import (
    ModelUnavailableError,
    QueueFullError,
    RateLimitedError,
    RefusedTextError,
    WorkerDownError,
)
from inference.http.error_responses import (
    FAILURES,
    describe,
    describe_invalid,
    error_detail,
    http_code,
)
from inference.http.request_context import RequestContext
from inference.http.routes.answers import (
    cancel_unfinished,
    model_named,
    note,
    refuse_other_kind,
    render,
    show,
    text_of,
    wanted_by,
)
from inference.http.routes.json_route import SMALL_BODY_BYTES, JsonBounds, parse_json
from inference.http.routes.lines import LineReader
from inference.http.schemas import PredictRequest
from inference.http.server_parts import Parts, parts_of, weight_of

MEDIA_TYPE = "application/x-ndjson"
# One group is classified while the next waits: enough to fill forward passes, too little to crowd
# out others.
_GROUP_LINES = 32
_GROUPS_AT_ONCE = 2
_LONGEST_PAUSE_S = 1.0
# A stream with this many refused lines in a row is not a stream of texts.
_MOST_REFUSED_LINES = 1024


# What a line asks for, as the model that answers it understands it.
_Accepted = tuple[PredictRequest, Served, Wanted]


@dataclass(slots=True)
class _Group:
    """Lines submitted together: requests with a future for each, and errors of other lines."""

    lines: list[_Accepted | Exception]
    futures: list[asyncio.Future[Answer]]
    held_bytes: int


class StreamResponse(Response):
    """Reads lines, each a request to /predict, and writes one for each, in order."""

    def __init__(self, request: Request) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self._parts: Parts = parts_of(request)
        # Raised before the answer begins, so that the whole request is refused.
        self._model = model_named(self._parts, request.path_params.get("name"))
        self._model.require().classifier.refuse_if_down()
        self._context = RequestContext.of(request.scope)
        self._context.is_stream = True
        self._index = 0
        self._num_refused = 0  # of the last lines in a row
        self._unsubmitted: list[PredictRequest | Exception] = []
        self._group_lines = _GROUP_LINES
        self._give_up_at = 0.0
        settings = self._parts.settings
        self._timeout_s = settings.request_timeout_s
        self._reader = LineReader(
            request,
            self._parts.stream_budget,
            settings.max_line_bytes,
            max_waiting_bytes=settings.max_body_bytes,
            timeout_s=self._timeout_s,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        groups: deque[_Group] = deque()
        try:
            # The reader begins first, so a client that asks (Expect: 100-continue) is told to send.
            await asyncio.sleep(0)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while self._num_refused < _MOST_REFUSED_LINES and await self._fill(groups):
                body = await self._answer(groups[0])
                self._leave(groups.popleft())
                await send({"type": "http.response.body", "body": body, "more_body": True})
                # Lines that are refused wait for nothing that would let other requests run.
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": self._last_words()})
        finally:
            self._reader.close()
            for group in groups:
                self._leave(group)

    async def _fill(self, groups: deque[_Group]) -> bool:
        """Submit lines until enough are in progress; False once there is nothing left to answer."""
        while len(groups) < _GROUPS_AT_ONCE:
            if not self._unsubmitted:
                # While there is something to answer, only take what has come; the client may be
                # waiting for that answer before it sends more.
                lines = (
                    self._reader.take_ready(_GROUP_LINES)
                    if groups
                    else await self._reader.take(_GROUP_LINES)
                )
                self._unsubmitted = [self._parsed(line) for line in lines]
                self._give_up_at = time.monotonic() + self._timeout_s
            if not self._unsubmitted:
                break
            try:
                groups.append(self._submit(self._unsubmitted[: self._group_lines]))
            except (QueueFullError, RateLimitedError, WorkerDownError) as error:
                # A stream is not in a hurry: it waits for room, whereas a single request is better
                # refused at once.
                if groups:
                    break
                # Half as many lines may fit; the size is as before once a group is accepted.
                self._group_lines = max(1, self._group_lines // 2)
                await self._pause(error)
            else:
                self._unsubmitted = self._unsubmitted[self._group_lines :]
                self._group_lines = _GROUP_LINES
        return bool(groups)

    async def _pause(self, error: QueueFullError | RateLimitedError | WorkerDownError) -> None:
        # The client's own rate lets it continue, however long one group takes.
        if isinstance(error, RateLimitedError):
            self._give_up_at = time.monotonic() + self._timeout_s
        if time.monotonic() > self._give_up_at:
            self._unsubmitted = [
                error if isinstance(one, PredictRequest) else one for one in self._unsubmitted
            ]
        else:
            await asyncio.sleep(min(getattr(error, "retry_after_s", math.inf), _LONGEST_PAUSE_S))

    def _parsed(self, line: bytes | None) -> PredictRequest | Exception:
        settings = self._parts.settings
        try:
            if line is None:
                raise RefusedTextError(
                    "text_too_long", f"the line has more than {settings.max_line_bytes} bytes"
                )
            if len(line) > SMALL_BODY_BYTES:
                JsonBounds(settings).feed(line)
            request = parse_json(PredictRequest, line)
            text_of(request, settings)
        except (ValidationError, HTTPException, RefusedTextError) as error:
            return error
        return request

    def _submit(self, lines: list[PredictRequest | Exception]) -> _Group:
        served = self._model.current
        accepted = [self._accepted(served, line) for line in lines]
        texts = [
            text_of(line[0], self._parts.settings)
            for line in accepted
            if not isinstance(line, Exception)
        ]
        # A stream's request was admitted once. Its texts count as they come, so a client whose rate
        # is used up pauses here, and its connection stays.
        if texts:
            self._context.allowance.require()
        futures = served.classifier.submit(texts, self._timeout_s) if served and texts else []
        self._context.allowance.take(len(texts))
        group = _Group(accepted, futures, weight_of(texts))
        self._parts.stream_budget.take(group.held_bytes)
        return group

    def _accepted(
        self, served: Served | None, line: PredictRequest | Exception
    ) -> _Accepted | Exception:
        # Only now: another model may have been loaded since the line was read, or this one removed.
        if isinstance(line, Exception):
            return line
        if served is None:
            return ModelUnavailableError(str(self._model.error))
        try:
            refuse_other_kind(served, [text_of(line, self._parts.settings)], "text")
            return line, served, wanted_by(served, line)
        except RefusedTextError as error:
            return error

    def _leave(self, group: _Group) -> None:
        self._parts.stream_budget.release(group.held_bytes)
        cancel_unfinished(group.futures)

    async def _answer(self, group: _Group) -> bytes:
        """Wait for a group and render its lines; a line that failed is answered with its error."""
        futures = iter(group.futures)
        rendered: list[bytes] = []
        for line in group.lines:
            content = await self._outcome(line, futures)
            rendered.append(to_json({"index": self._index, **content}))
            self._index += 1
        return b"\n".join(rendered) + b"\n"

    async def _outcome(
        self,
        line: _Accepted | Exception,
        futures: Iterator[asyncio.Future[Answer]],
    ) -> dict[str, Any]:
        if isinstance(line, Exception):
            return self._error(line)
        try:
            answer = await next(futures)
        except FAILURES as error:
            return self._error(error)
        note(self._context, [answer])
        self._num_refused = 0
        request, served, wanted = line
        text = text_of(request, self._parts.settings)
        show(self._parts, served, self._context, [text], [answer], self._index)
        return render(self._parts, served, answer, request.top_k, wanted)

    def _error(self, error: Exception) -> dict[str, Any]:
        if isinstance(error, ValidationError | HTTPException | RefusedTextError):
            self._num_refused += 1
        match error:
            case ValidationError():
                code, message = "invalid_request", f"line: {describe_invalid(error)}"
            case HTTPException():
                code, message = http_code(error.status_code), str(error.detail)
            case _:
                _, code, message, _ = describe(error)
        return {"error": error_detail(code, message, self._context.request_id)}

    def _last_words(self) -> bytes:
        # The status has been sent long ago, so the reason for ending early can only be given here.
        refusal: Exception | None = self._reader.refusal
        if self._num_refused >= _MOST_REFUSED_LINES:
            line = (
                f"{self._num_refused} lines in a row were refused, so the rest is not read; "
                "correct the lines"
            )
            refusal = RefusedTextError("too_many_refused", line)
        return (
            b""
            if refusal is None
            else to_json({"index": self._index, **self._error(refusal)}) + b"\n"
        )
