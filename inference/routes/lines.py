"""Cuts a body that arrives in pieces into lines, and keeps those that wait for their turn."""

from __future__ import annotations

import asyncio
from collections import deque

from fastapi import Request
from starlette.exceptions import HTTPException

from inference.body_budget import BodyBudget


class LineSplitter:
    """Cuts bytes into lines; a line beyond the limit is dropped and reported as None."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        self._is_skipping = False

    def feed(self, piece: bytes) -> list[bytes | None]:
        """Return the lines that this piece completes, without those that are blank."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        found: list[bytes | None] = []
        for line in lines:
            self._add(found, line)
        if len(self._rest) > self._max_bytes:
            self._rest = b""
            if not self._is_skipping:
                found.append(None)
            self._is_skipping = True
        return found

    def end(self) -> list[bytes | None]:
        """Return the last line, where nothing ends it."""
        found: list[bytes | None] = []
        self._add(found, self._rest)
        return found

    def _add(self, found: list[bytes | None], line: bytes) -> None:
        if self._is_skipping:
            self._is_skipping = False  # the end of a line that was reported already
        elif line.strip():
            found.append(line if len(line) <= self._max_bytes else None)


class LineReader:
    """Reads a request's body beside the answers that flow out.

    It reads on while answers wait to be taken, within limits: else a client that reads nothing before it has sent
    everything would wait for the server, and the server for it.
    """

    def __init__(self, request: Request, budget: BodyBudget, max_line_bytes: int, max_waiting_bytes: int) -> None:
        self.refusal: HTTPException | None = None
        self._request = request
        self._budget = budget
        self._splitter = LineSplitter(max_line_bytes)
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[bytes | None] = deque()
        self._waiting_bytes = 0
        self._is_ended = False
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def take(self, most: int) -> list[bytes | None]:
        """Return the next lines, at least one, waiting for it if need be; none at the end of the body."""
        while not self._waiting and not self._is_ended:
            await self._wait()
        return self.take_ready(most)

    def take_ready(self, most: int) -> list[bytes | None]:
        """Return the next lines that are here."""
        lines = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        self._count(-sum(len(line or b"") for line in lines))
        self._changed.set()
        return lines

    def close(self) -> None:
        """Stop reading."""
        self._task.cancel()
        self._count(-self._waiting_bytes)

    async def _read(self) -> None:
        try:
            while await self._read_piece():
                pass
        except HTTPException as error:
            self.refusal = error
        self._is_ended = True
        self._changed.set()

    async def _read_piece(self) -> bool:
        while self._waiting_bytes > self._max_waiting_bytes:
            await self._wait()
        await self._budget.wait_for_room()
        message = await self._request.receive()
        if message["type"] == "http.disconnect":
            return False  # the gate cancels the request
        lines = self._splitter.feed(message.get("body", b""))
        has_more = message.get("more_body", False)
        if not has_more:
            lines += self._splitter.end()
        self._waiting += lines
        self._count(sum(len(line or b"") for line in lines))
        self._changed.set()
        return has_more

    def _count(self, num_bytes: int) -> None:
        self._waiting_bytes += num_bytes
        if num_bytes > 0:
            self._budget.take(num_bytes)
        else:
            self._budget.give_back(-num_bytes)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
