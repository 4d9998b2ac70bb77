"""Holds a body that arrives in pieces until its lines are taken."""

from __future__ import annotations

import asyncio
import re

from fastapi import Request
from starlette.exceptions import HTTPException

from inference.http.server_parts import BodyBudget

_BLANKS = re.compile(rb"\s*+")
# Lines taken together have no more bytes than this, or are a single line.
_TAKEN_BYTES = 64 * 1024


class LineBuffer:
    """Holds the bytes of lines and cuts off those that are taken; as a list, tiny lines would take
    thirty times the memory.

    Blank lines are left out. A line beyond the limit is dropped and reported as None.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._bytes = bytearray()
        self._is_skipping = False

    def __len__(self) -> int:
        return len(self._bytes)

    def feed(self, piece: bytes) -> None:
        self._bytes += piece

    def take(self, most: int, *, is_end: bool = False) -> list[bytes | None]:
        """The next complete lines; at the end of the body, the last line needs no newline."""
        lines: list[bytes | None] = []
        most_bytes = len(self._bytes) - _TAKEN_BYTES
        while (
            len(lines) < most
            and len(self._bytes) > max(0, most_bytes)
            and self._cut_line(lines, is_end=is_end)
        ):
            pass
        return lines

    def _cut_line(self, lines: list[bytes | None], *, is_end: bool) -> bool:
        """Cut off a line and add it to those found; False if no line is complete."""
        if not self._is_skipping:
            # It matches anything, so there is a match.
            del self._bytes[: _BLANKS.match(self._bytes).end()]
        # A line that is too long is reported once, as None, at the moment in which that is known;
        # the rest of it is thrown away piece by piece, so it never takes more than the limit.
        length = self._bytes.find(b"\n")
        is_complete = length >= 0 or is_end
        if length < 0:
            length = len(self._bytes)
        if self._is_skipping:
            self._is_skipping = not is_complete
        elif length > self._max_line_bytes:
            lines.append(None)
            self._is_skipping = not is_complete
        elif not is_complete:
            return False
        elif length:
            lines.append(bytes(self._bytes[:length]))
        del self._bytes[: length + 1]
        return is_complete


class LineReader:
    """Reads a request's body while answers are being sent.

    It keeps reading, within limits, even while answers wait to be read. Otherwise a client that
    reads nothing until it has sent everything would wait for the server, and the server for it.
    """

    def __init__(
        self,
        request: Request,
        budget: BodyBudget,
        max_line_bytes: int,
        max_waiting_bytes: int,
        timeout_s: float,
    ) -> None:
        self.refusal: HTTPException | None = None
        self._request = request
        self._budget = budget
        self._buffer = LineBuffer(max_line_bytes)
        self._max_waiting_bytes = max_waiting_bytes
        self._timeout_s = timeout_s
        self._held_bytes = 0
        self._is_ended = False
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def take(self, most: int) -> list[bytes | None]:
        """The next lines, at least one, waiting if necessary; none at the end of the body."""
        while not (lines := self.take_ready(most)) and not self._is_ended:
            self._changed.clear()
            await self._changed.wait()
        return lines

    def take_ready(self, most: int) -> list[bytes | None]:
        """The lines that have already arrived."""
        lines = self._buffer.take(most, is_end=self._is_ended and self.refusal is None)
        self._hold(len(self._buffer))
        self._changed.set()
        return lines

    def close(self) -> None:
        self._task.cancel()
        self._hold(0)

    async def _read(self) -> None:
        try:
            while await self._read_piece():
                pass
        except HTTPException as error:
            self.refusal = error
        self._is_ended = True
        self._changed.set()

    async def _read_piece(self) -> bool:
        while len(self._buffer) > self._max_waiting_bytes:
            self._changed.clear()
            await self._changed.wait()
        try:
            # Streams whose lines are all incomplete would wait for each other for ever.
            async with asyncio.timeout(self._timeout_s):
                await self._budget.wait_for_room()
        except TimeoutError:
            raise HTTPException(503, self._budget.BUSY) from None
        message = await self._request.receive()
        if message["type"] == "http.disconnect":
            # The gate cancels the request.
            return False
        self._buffer.feed(message.get("body", b""))
        self._hold(len(self._buffer))
        self._changed.set()
        return message.get("more_body", False)

    def _hold(self, num_bytes: int) -> None:
        # Only the difference to what is held already, so that this may be called after every step.
        more = num_bytes - self._held_bytes
        if more > 0:
            self._budget.take(more)
        else:
            self._budget.release(-more)
        self._held_bytes = num_bytes
