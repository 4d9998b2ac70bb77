"""Models that differ only behind the encoder, on the weights of one: all heads in one pass.

The encoder takes almost all of the time and memory of a model. What comes behind it, the pooler and
the classifier, is a model's own head. In a pass for all models, the scores of a text are one row,
and each model's scores are its own part of it.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from inference.engines.base import Engine, Reading, TokenBatch
from inference.engines.native.engine import NativeEngine, Tensors, aligned_copy
from inference.engines.windowed import WindowedEngine


def can_share(engine: Engine) -> bool:
    return isinstance(_native(engine), NativeEngine)


def encoder_key(engine: Engine) -> Hashable:
    """See `NativeEngine.encoder_key`; windows are the tokenizer's."""
    return _native(engine).encoder_key()


class SharedEncoder:
    """One encoder and the heads of several models, which may come and go while passes run.

    A score has the bits that the model gives when it is loaded alone.
    """

    def __init__(self, engine: Engine, weights: Hashable, texts: Hashable = None) -> None:
        """``engine``: the model whose weights are kept; its own head is added like the others.

        Only models with the same `encoder_key`, ``weights``, may be added, and only if their texts
        become the same ids, as ``texts`` says.
        """
        self.weights, self.texts = weights, texts
        self._base = engine
        self._changes = threading.Lock()
        # Never changed, only replaced: a pass reads it once, and keeps the heads that it began with.
        self._stack: tuple[Engine, Sequence[tuple[Engine, slice]]] = engine, ()

    def for_other_texts(self, engine: Engine, texts: Hashable) -> SharedEncoder:
        """Passes of their own on the same weights, for models whose texts become other ids."""
        native = _native(self._base).with_heads([])
        return SharedEncoder(_replaced(engine, native), self.weights, texts)

    def add(self, engine: Engine) -> Engine:
        """Copy the head of a model that fits.

        Returns the engine that computes this model from now on. It shares threads and buffers with
        the other heads. The engine that was given may be freed.
        """
        with self._changes:
            heads = self._heads()
            known = [_native(one).heads[0] for one in heads]
            own = {
                name: _kept(name, array, known) for name, array in _native(engine).heads[0].items()
            }
            head = _replaced(engine, _native(self._base).with_heads([own]))
            self._set_heads([*heads, head])
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
        # The kernels compute the pooler once for neighbours that have the same one.
        heads = sorted(heads, key=lambda one: _addresses_of_pooler(_native(one).heads[0]))
        tensors = [_native(head).heads[0] for head in heads]
        sizes = [len(one["classifier.bias"]) for one in tensors]
        ends = np.cumsum(sizes).tolist()
        places = [
            (head, slice(end - size, end))
            for head, size, end in zip(heads, sizes, ends, strict=True)
        ]
        self._stack = _replaced(self._base, _native(self._base).with_heads(tensors)), places


def _kept(name: str, array: NDArray[np.float32], known: Sequence[Tensors]) -> NDArray[np.float32]:
    """The same array of another head, so that heads with one pooler have it once; else a copy, as
    the file that an array is a part of stays in memory as long as any of its arrays.
    """
    equal = (one[name] for one in known if np.array_equal(one[name], array))
    found = next(equal, None)
    return aligned_copy(array) if found is None else found


def _addresses_of_pooler(head: Tensors) -> list[int]:
    return [head[name].ctypes.data for name in sorted(head) if not name.startswith("classifier.")]


def _native(engine: Engine) -> NativeEngine:
    return engine.inner if isinstance(engine, WindowedEngine) else engine


def _replaced(engine: Engine, native: NativeEngine) -> Engine:
    """The engine on top of another native one: it reads windows if it did so before."""
    return engine.over(native) if isinstance(engine, WindowedEngine) else native


def _own(scores: NDArray[np.float32], rows: slice) -> NDArray[np.float32]:
    # A copy lies in memory as the scores of the model alone do, so all that is computed from them
    # adds in the same order. It also keeps nothing of the other models alive.
    return np.ascontiguousarray(scores[:, rows])
