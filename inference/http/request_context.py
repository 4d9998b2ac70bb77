"""What one request carries from the gate through its route and back: id, timing, log line."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import time
from collections.abc import Iterable, MutableMapping
from typing import Any

from starlette.types import Scope

from inference.http.admission import Allowance

_KEY = "distrinews.context"
_PREFIX = secrets.token_hex(4)  # of this process
_COUNT = itertools.count(1)
_GIVEN_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


def _begin_prefix() -> None:
    global _PREFIX
    _PREFIX = secrets.token_hex(4)


os.register_at_fork(after_in_child=_begin_prefix)


class RequestContext:
    """One request.

    Attributes:
        allowance: what is left of the client's rate limit.
        held_bytes: what the request takes of the memory budget for bodies.
        route: the template of its route, known once it has ended.
        request_id: the client's X-Request-ID if it is a plain word, otherwise a new one.
        started: when the request arrived, on `time.perf_counter`.
        num_texts: texts to classify.
        num_tokens: tokens in them.
        stages: seconds in each stage (tokenize, queue, forward); for several texts, the longest.
        error_code: the code of the refusal, if it was refused.
        is_stream: whether its body may take as long as it keeps arriving.
    """

    __slots__ = (
        "allowance",
        "error_code",
        "held_bytes",
        "is_stream",
        "num_texts",
        "num_tokens",
        "request_id",
        "route",
        "stages",
        "started",
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.route = "unmatched"
        self.started = time.perf_counter()
        self.num_texts = 0
        self.num_tokens = 0
        self.stages: tuple[float, float, float] | None = None
        self.error_code: str | None = None
        self.is_stream = False
        self.allowance = Allowance()
        self.held_bytes = 0

    @classmethod
    def begin(cls, scope: Scope) -> RequestContext:
        """Create the context of a request and attach it to its scope."""
        given = dict(scope["headers"]).get(b"x-request-id")
        is_usable = given is not None and _GIVEN_ID.fullmatch(given) is not None
        context = cls(given.decode("ascii") if is_usable else f"{_PREFIX}-{next(_COUNT):x}")
        scope[_KEY] = context
        return context

    @staticmethod
    def of(scope: MutableMapping[str, Any]) -> RequestContext:
        return scope[_KEY]

    def note_answers(self, timings: Iterable[tuple[int, float, float, float]]) -> None:
        """Add up answers, each (tokens, seconds tokenizing, queued, and in the forward pass)."""
        tokenize, queue, forward = self.stages or (0.0, 0.0, 0.0)
        for num_tokens, tokenize_s, queue_s, forward_s in timings:
            self.num_texts += 1
            self.num_tokens += num_tokens
            tokenize = max(tokenize, tokenize_s)
            queue = max(queue, queue_s)
            forward = max(forward, forward_s)
        self.stages = (tokenize, queue, forward)

    def server_timing(self) -> bytes:
        """The value of the Server-Timing header so far, in milliseconds."""
        total = f"total;dur={(time.perf_counter() - self.started) * 1000:.2f}"
        if self.stages is None:
            return total.encode()
        tokenize, queue, forward = self.stages
        return (
            f"tokenize;dur={tokenize * 1000:.2f}, queue;dur={queue * 1000:.2f}, "
            f"forward;dur={forward * 1000:.2f}, {total}"
        ).encode()
