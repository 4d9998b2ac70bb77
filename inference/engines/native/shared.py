"""Models that differ only in their last layer, on the weights of one: all heads in one pass.

The encoder takes almost all of the time and memory of a model. The heads are rows of one matrix
then, (labels of all models, width), and each model's scores are its own rows' part of the product.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from inference.engines.base import Engine, TokenBatch
from inference.engines.native.engine import Head, NativeEngine
from inference.engines.windowed import WindowedEngine

# The scores of each text, (texts, labels), and for a model that reads windows which of them decided
# each score, of the same shape.
Reading = tuple[NDArray[np.float32], NDArray[np.int64] | None]


def can_share(engine: Engine) -> bool:
    return isinstance(_native(engine), NativeEngine)


def encoder_key(engine: Engine) -> Hashable:
    """See `NativeEngine.encoder_key`; windows are the tokenizer's."""
    return _native(engine).encoder_key()


class SharedEncoder:
    """One encoder and the heads of several models, which may come and go while passes run.

    A score has the bits that the model gives when it is loaded alone.
    """

    def __init__(self, engine: Engine, key: Hashable) -> None:
        """``engine``: the model whose weights are kept; its own head is added like the others.

        ``key``: what a model must have in common with this one to be added.
        """
        self.key = key
        self._base = engine
        self._changes = threading.Lock()
        # Never changed, only replaced: a pass reads it once, and keeps the rows that it began with.
        self._stack: tuple[Engine, Sequence[tuple[Engine, slice]]] = engine, ()

    def add(self, engine: Engine) -> Engine:
        """Copy the head of a model with the same key.

        Returns the engine that computes this model from now on. It shares threads and buffers with
        the other heads, and reads only its own rows. The engine that was given may be freed.
        """
        own = Head.joined([_native(engine).head])
        head = _replaced(engine, _native(self._base).with_head(own))
        with self._changes:
            self._set_heads([*self._heads(), head])
        return head

    def remove(self, head: Engine) -> None:
        """Take out a head that `add` returned: passes that begin now leave it out.

        The engine itself still works for passes that have begun, and is freed with its last user.
        """
        with self._changes:
            self._set_heads([one for one in self._heads() if one is not head])

    def read_all(self, batch: TokenBatch, threads: int = 1) -> dict[Engine, Reading]:
        """What all heads make of the texts, in one pass, by the engine that `add` returned."""
        stacked, places = self._stack
        if not places:
            return {}
        if isinstance(stacked, WindowedEngine):
            outputs = stacked.outputs(batch, threads)  # (windows, rows of all heads)
            return {head: head.pooled(_own(outputs, rows), batch.lengths) for head, rows in places}
        scores = stacked.logits(batch, threads)  # (texts, rows of all heads)
        return {head: (_own(scores, rows), None) for head, rows in places}

    def _heads(self) -> list[Engine]:
        return [head for head, _ in self._stack[1]]

    def _set_heads(self, heads: Sequence[Engine]) -> None:
        matrices = [_native(head).head for head in heads]
        ends = np.cumsum([len(one.bias) for one in matrices]).tolist()
        places = [
            (head, slice(end - len(one.bias), end))
            for head, one, end in zip(heads, matrices, ends, strict=True)
        ]
        stacked = self._base
        if heads:
            rows = Head.joined(matrices)
            stacked = _replaced(self._base, _native(self._base).with_head(rows))
        self._stack = stacked, places


def _native(engine: Engine) -> NativeEngine:
    return engine.inner if isinstance(engine, WindowedEngine) else engine


def _replaced(engine: Engine, native: NativeEngine) -> Engine:
    """The engine on top of another native one: it reads windows if it did so before."""
    return engine.over(native) if isinstance(engine, WindowedEngine) else native


def _own(scores: NDArray[np.float32], rows: slice) -> NDArray[np.float32]:
    # A copy lies in memory as the scores of the model alone do, so all that is computed from them
    # adds in the same order. It also keeps nothing of the other models alive.
    return np.ascontiguousarray(scores[:, rows])
