"""A small engine whose answers are known, that can be held, and that fails on certain token ids."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference.engines.base import TokenBatch

NUM_LABELS = 3
# Token ids that do harm.
RAISES, DIES, ANSWERS_NAN = 90, 91, 92


@dataclass(frozen=True)
class Pass:
    """One forward pass: the token ids of each text, and the threads it was given."""

    texts: list[tuple[int, ...]]
    threads: int


class StandInEngine:
    """Scores a text by its token ids; keeps account of every pass and of how many ran at once.

    Attributes:
        broken: What every pass raises, None while the engine works.
    """

    name = "stand-in"
    broken: str | None = None
    batch_tokens = 512
    survives_fork = True

    def __init__(self, *, num_slots: int = 1, pads: bool = False) -> None:
        self.num_slots = num_slots
        self.pads = pads
        self.passes: list[Pass] = []
        self.most_slots_busy = 0
        self.begun = threading.Semaphore(0)  # one for each pass that has begun
        self._held: threading.Semaphore | None = None
        self._lock = threading.Lock()
        self._slots_busy = 0

    def hold(self) -> None:
        """Let no pass that begins from here on end before `let_one_go` or `let_go`."""
        self._held = self._held or threading.Semaphore(0)

    def let_one_go(self) -> None:
        """End one held pass."""
        assert self._held
        self._held.release()

    def let_go(self) -> None:
        """End what is held, and hold no more."""
        held, self._held = self._held, None
        if held:
            held.release(len(self.passes) + self.num_slots)

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        """Run one forward pass; see `inference.engines.base.Engine`."""
        texts = [tuple(part.tolist()) for part in np.split(batch.ids, np.cumsum(batch.lengths)[:-1])]
        with self._lock:
            self.passes.append(Pass(texts, threads))
            self._slots_busy += threads
            self.most_slots_busy = max(self.most_slots_busy, self._slots_busy)
        self.begun.release()
        try:
            if held := self._held:
                assert held.acquire(timeout=30)
            if self.broken:
                raise RuntimeError(self.broken)
            if any(DIES in text for text in texts):
                raise SystemExit
            if any(RAISES in text for text in texts):
                raise RuntimeError("a bad text")
            return np.array([scores_of(text) for text in texts], np.float32)
        finally:
            with self._lock:
                self._slots_busy -= threads


def scores_of(text: tuple[int, ...]) -> list[float]:
    """The scores of a text."""
    if ANSWERS_NAN in text:
        return [float("nan")] * NUM_LABELS
    return [0.0, text[0] / 10, len(text) / 10]


def answer_of(text: tuple[int, ...]) -> tuple[float, ...]:
    """The probabilities of a text."""
    exponentials = np.exp(np.array(scores_of(text), np.float32).astype(np.float64))
    return tuple((exponentials / exponentials.sum()).tolist())
