"""The small interface that every runtime fulfils: token ids in, logits out, numpy on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# Larger passes were no faster on the CPUs measured, and a single text would wait longer for the pass before its own.
CPU_BATCH_TOKENS = 512
# Passes that run at the same time: on a machine of many processors each gets several of them, since more passes at once
# would wait for the interpreter's lock instead.
PASSES_AT_ONCE = 6
# A thread with fewer tokens reads all weights for almost no work (the tile of kernels.c has six rows); two threads
# always pay.
TOKENS_PER_THREAD = 6


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The texts of one forward pass, laid end to end without padding.

    Attributes:
        ids: Token ids of all texts, (tokens,).
        lengths: Token ids of each text, (texts,).
    """

    ids: NDArray[np.int32]
    lengths: NDArray[np.int32]

    @classmethod
    def of(cls, token_ids: Sequence[Sequence[int]]) -> TokenBatch:
        """Join the token ids of texts, in order."""
        return cls(
            ids=np.concatenate([np.asarray(ids, dtype=np.int32) for ids in token_ids]),
            lengths=np.array([len(ids) for ids in token_ids], dtype=np.int32),
        )

    def padded(self, pad_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return input ids and attention mask (1 for a token, 0 for padding), both (texts, longest)."""
        inside = np.arange(self.lengths.max()) < self.lengths[:, None]
        input_ids = np.full(inside.shape, pad_id, dtype=np.int64)
        input_ids[inside] = self.ids
        return input_ids, inside.astype(np.int64)


class Engine(Protocol):
    """A loaded classifier.

    Attributes:
        name: Runtime and precision, such as ``onnx int8``.
        num_slots: Threads that all forward passes at a time may take together; of the passes `PASSES_AT_ONCE` at most.
        batch_tokens: Tokens of a forward pass beyond which it gains no more speed.
        pads: Whether a batch costs its longest text times its texts, rather than the sum of its tokens.
    """

    name: str
    num_slots: int
    batch_tokens: int
    pads: bool

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        """Run one forward pass.

        Args:
            batch: At least one text; every text has at least one token.
            threads: Slots that this pass may take, 1 to ``num_slots``; an engine of one slot ignores it.

        Returns:
            One score a label before softmax, (texts, labels).
        """
        ...
