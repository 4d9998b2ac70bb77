"""The interface of every runtime, token ids in and logits out in numpy, and how many texts are run
through one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# Larger passes were no faster on the CPUs measured, and a single text would wait longer for the
# pass before its own.
CPU_BATCH_TOKENS = 512
# Forward passes that run at the same time. On a machine with more processors each pass gets several
# of them, because more passes would only wait for the interpreter's lock.
PASSES_AT_ONCE = 6
# A thread with fewer tokens would read all weights for almost no work: a tile in encoder.h has up
# to six rows. Two threads pay off even so.
TOKENS_PER_THREAD = 6
# Padded batches: texts of similar length waste little, and eight short ones already keep the cores
# busy.
PADDED_TEXTS = 8
# Batches without padding: more tokens gain nothing, and the buffers stay small.
RAGGED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The texts of one forward pass, one after another without padding."""

    ids: NDArray[np.int32]  # of all texts, (tokens,)
    lengths: NDArray[np.int32]  # token ids of each text, (texts,)

    @classmethod
    def of(cls, token_ids: Sequence[Sequence[int]]) -> TokenBatch:
        return cls(
            ids=np.concatenate([np.asarray(ids, dtype=np.int32) for ids in token_ids]),
            lengths=np.array([len(ids) for ids in token_ids], dtype=np.int32),
        )

    def padded(self, pad_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return input ids and mask (1 for a token, 0 for padding), both (texts, longest)."""
        inside = np.arange(self.lengths.max()) < self.lengths[:, None]
        input_ids = np.full(inside.shape, pad_id, dtype=np.int64)
        input_ids[inside] = self.ids
        return input_ids, inside.astype(np.int64)


# The scores of each text, (texts, labels), and for a model that reads windows which of them decided
# each score, of the same shape.
Reading = tuple[NDArray[np.float32], NDArray[np.int64] | None]


class Engine(Protocol):
    """A loaded classifier."""

    name: str  # runtime and precision, such as `onnx int8`
    # Threads shared by all forward passes that run at the same time, at most PASSES_AT_ONCE of
    # them.
    num_slots: int
    # Tokens per forward pass beyond which it gains no more speed.
    batch_tokens: int
    # A batch costs its longest text times the number of texts, rather than the sum of its tokens.
    pads: bool
    # A forked child may use it like its parent, sharing the weights: no runtime with threads of its
    # own does that by itself.
    survives_fork: bool

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        """Return one score per label, (texts, labels), of at least one text with at least one
        token.

        The pass may take ``threads`` slots, 1 to ``num_slots``; an engine with one slot ignores it.
        """
        ...


class ReadsScores(Protocol):
    """A `ProblemType`, or the `Answering` of a model, which knows its calibration too."""

    def answers(self, scores: NDArray[np.float32]) -> NDArray[np.float64]: ...


def answers_of(
    engine: Engine, reader: ReadsScores, token_ids: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    """Return the model's answers to every text, (texts, labels), in the order of the texts."""
    scores = scores_of(engine, token_ids)
    return reader.answers(scores) if len(scores) else scores.astype(np.float64)


def scores_of(engine: Engine, token_ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Return the engine's scores for every text, (texts, labels), in the order of the texts.

    For files, exports and the library: nobody waits for a single text, so all are divided into
    passes at once.
    """
    found: NDArray[np.float32] | None = None
    for chosen in forward_passes([len(ids) for ids in token_ids], pads=engine.pads):
        batch = TokenBatch.of([token_ids[i] for i in chosen])
        scores = engine.logits(batch, engine.num_slots)
        if found is None:
            found = np.empty((len(token_ids), scores.shape[1]), dtype=np.float32)
        found[chosen] = scores
    return found if found is not None else np.empty((0, 0), dtype=np.float32)


def forward_passes(
    lengths: Sequence[int], *, pads: bool, tokens: int = RAGGED_TOKENS
) -> list[list[int]]:
    """Divide texts of these lengths into forward passes: the positions of the texts in each.

    ``tokens``: of a pass without padding, at most, unless a single text has more.
    """
    if pads:
        # Texts of similar length go together. Without padding, texts stay in order and fill a
        # budget of tokens.
        by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
        return [
            by_length[start : start + PADDED_TEXTS]
            for start in range(0, len(lengths), PADDED_TEXTS)
        ]
    passes: list[list[int]] = []
    num_tokens = tokens
    for position, length in enumerate(lengths):
        if num_tokens + length > tokens:
            passes.append([])
            num_tokens = 0
        passes[-1].append(position)
        num_tokens += length
    return passes
