"""Bounds the memory that the bodies of all requests in progress take together, as bytes and as texts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

# What a text takes on its way beside its characters: a future, a place in the queue, an answer.
_BYTES_PER_TEXT = 1024


class BodyBudget:
    """Counts bytes held; used on the event loop only."""

    # What a request is told that finds no room.
    BUSY = "the bodies in progress fill the memory set aside for them; try again soon"

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._given_back = asyncio.Event()

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many more may be held."""
        return self.held_bytes + num_bytes <= self.max_bytes

    def take(self, num_bytes: int) -> None:
        """Hold so many more."""
        self.held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Hold so many less."""
        self.held_bytes -= num_bytes
        self._given_back.set()

    async def wait_for_room(self) -> None:
        """Wait until a byte fits."""
        while not self.has_room(1):
            self._given_back.clear()
            await self._given_back.wait()


def weight_of(texts: Sequence[str]) -> int:
    """Return the bytes of memory that texts in progress take: up to four for each character, if one is an emoji."""
    return sum(map(sys.getsizeof, texts)) + _BYTES_PER_TEXT * len(texts)
