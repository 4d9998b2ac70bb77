"""Bounds the memory that the bodies of all requests in progress take together."""

from __future__ import annotations

import asyncio


class BodyBudget:
    """Counts bytes held; used on the event loop only."""

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
