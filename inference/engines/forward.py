"""From token ids to probabilities where nobody waits for a single text: files, exports, the library."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inference.engines.base import Engine, TokenBatch

# Neighbours in length pad little, and eight short texts already fill the cores.
PADDED_TEXTS = 8
# An engine without padding gains nothing beyond this, and its buffers stay small.
RAGGED_TOKENS = 1024


def probabilities_of(engine: Engine, token_ids: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return the probability of every label for every text, (texts, labels), in the order of the texts."""
    found: NDArray[np.float64] | None = None
    for chosen in forward_passes([len(ids) for ids in token_ids], pads=engine.pads):
        batch = TokenBatch.of([token_ids[i] for i in chosen])
        probabilities = softmax(engine.logits(batch, engine.num_slots))
        if found is None:
            found = np.empty((len(token_ids), probabilities.shape[1]))
        found[chosen] = probabilities
    return found if found is not None else np.empty((0, 0))


def forward_passes(lengths: Sequence[int], *, pads: bool) -> list[list[int]]:
    """Divide texts into forward passes.

    Args:
        lengths: Token ids of each text.
        pads: Whether the engine pads: near lengths go together then, else texts stay in order up to a sum of tokens.

    Returns:
        The positions of the texts of each pass; every text is in one of them.
    """
    if pads:
        by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
        return [by_length[start : start + PADDED_TEXTS] for start in range(0, len(lengths), PADDED_TEXTS)]
    passes: list[list[int]] = []
    num_tokens = RAGGED_TOKENS
    for position, length in enumerate(lengths):
        if num_tokens + length > RAGGED_TOKENS:
            passes.append([])
            num_tokens = 0
        passes[-1].append(position)
        num_tokens += length
    return passes


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Turn scores (texts, labels) into probabilities."""
    scores = logits.astype(np.float64)
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)
