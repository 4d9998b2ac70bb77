"""Bounds the memory that the bodies of all current requests take together, counted in bytes and in texts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

# What a text costs besides its characters: a future, an entry in the queue, an answer.
_BYTES_PER_TEXT = 1024


class BodyBudget:
    """Counts bytes in use; only used on the event loop."""

    # What a request is told if there is no room.
    BUSY = "the bodies in progress fill the memory set aside for them; try again soon"

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._given_back = asyncio.Event()

    def has_room(self, num_bytes: int) -> bool:
        return self.held_bytes + num_bytes <= self.max_bytes

    def take(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes
        self._given_back.set()

    async def wait_for_room(self) -> None:
        """Wait until there is room for a byte."""
        while not self.has_room(1):
            self._given_back.clear()
            await self._given_back.wait()


def weight_of(texts: Sequence[str]) -> int:
    """The bytes of memory that texts take: up to four per character if one of them is an emoji."""
    return sum(map(sys.getsizeof, texts)) + _BYTES_PER_TEXT * len(texts)
