"""Which texts are kept for review: all of them while there are few, otherwise a sample.

A tenth is drawn **uniformly**, whatever the answer, so that it tells how often answers are right. The
rest are those that the model is least sure of, or that are least like the training texts.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

from inference.observing.store import KeptText

PER_HOUR = 2_000
_UNIFORM_SHARE = 0.1
_MOST_UNIFORM = int(PER_HOUR * _UNIFORM_SHARE)
_MOST_CHARS = 20_000


def _interest(one: KeptText) -> float:
    """From 0 to 1: the less sure or the less familiar, the more."""
    unsure = min(1.0, 2 * (1 - one.confidence))
    foreign = 0.0 if one.familiarity is None else 1 - 20 * one.familiarity
    return max(unsure, foreign)


def text_to_keep(text: str) -> str:
    # Neither a lone half of a surrogate pair nor a null character can be stored.
    return text[:_MOST_CHARS].encode("utf-8", "replace").decode().replace("\0", "\ufffd")


class Sample:
    """The texts of one model that one process keeps."""

    def __init__(self, generator: random.Random) -> None:
        self._random = generator
        self._hour = -1
        self._num_kept = 0  # in this hour
        self._chosen: list[tuple[float, int, KeptText]] = []  # a heap, the least interesting first
        self._num_offered = 0
        # The share of this hour's texts that is drawn, and the number between 0 and 1 that each
        # drawn text got: it was drawn because it is below the share.
        self._share = _UNIFORM_SHARE
        self._drawn: dict[str, float] = {}
        self._new: list[KeptText] = []  # drawn since `take`
        self._undrawn: list[str] = []

    def offer(self, one: KeptText) -> None:
        if (hour := int(one.at // 3600)) != self._hour:
            self._hour, self._num_kept = hour, len(self._chosen)
            self._share = _UNIFORM_SHARE
            self._drawn.clear()
        if (number := self._random.random()) < self._share:
            self._drawn[one.id] = number
            self._new.append(one)
            self._num_kept += 1
            if len(self._drawn) > _MOST_UNIFORM:
                self._draw_fewer()
            return
        self._choose(one, _interest(one))

    def offer_contradicted(self, one: KeptText) -> None:
        """Let a text be kept to which a candidate in shadow gave another label: more interesting
        than all others.

        It was offered before, and is not drawn again: a second chance would make such texts more
        frequent among the drawn ones than they are.
        """
        if one.id not in self._drawn:
            self._choose(one, 2.0)

    def _choose(self, one: KeptText, interest: float) -> None:
        self._num_offered += 1  # of two that are equally interesting, the later one
        entry = (interest, self._num_offered, one)
        # Half of what an hour may have at once, the rest as the hour goes by.
        allowed = PER_HOUR / 2 * (1 + one.at % 3600 / 3600)
        if self._num_kept < allowed:
            self._num_kept += 1
            heapq.heappush(self._chosen, entry)
        elif self._chosen:
            heapq.heappushpop(self._chosen, entry)

    def _draw_fewer(self) -> None:
        # Every text of the hour, past and future, has the same chance again: those above the new
        # share would not have been drawn with it. They stay, but not as drawn ones.
        self._share /= 2
        self._undrawn += [id for id, number in self._drawn.items() if number >= self._share]
        self._drawn = {id: one for id, one in self._drawn.items() if one < self._share}

    def take(self) -> tuple[list[KeptText], list[str]]:
        """The texts to be kept since the last call, and the ids of those that, now or earlier,
        count as drawn no more.
        """
        taken = [(one, 1) for one in self._new] + [(one, 0) for *_, one in self._chosen]
        kept = [replace(one, text=text_to_keep(one.text), uniform=drawn) for one, drawn in taken]
        undrawn, self._undrawn = self._undrawn, []
        self._new, self._chosen = [], []
        return kept, undrawn
