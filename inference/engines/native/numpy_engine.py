"""The same int8 model without the kernels: encoder.h in NumPy, for a machine without a C compiler.

Activations are quantised as there, and sums of int8 products are exact up to 2,048 inputs. Only
floats are added in another order, which now and then moves a value to the next level of int8:
probabilities differ in the third digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference.engines.base import TokenBatch
from inference.engines.native.architecture import ACTIVATIONS, EncoderShape
from inference.engines.native.engine import (
    SECOND_TEXT,
    NativeEngine,
    Tensors,
    mark_second_texts,
)

Floats = NDArray[np.float32]
_ACTIVATION_MAX = np.float32(182)  # as in model.h
_GELU = (
    2.2779904185e-8,
    -1.5985249319e-6,
    4.7954006732e-5,
    -8.1400107592e-4,
    8.7723201141e-3,
    -6.4572960138e-2,
)
_GELU += (3.9788323641e-1,)


class NumpyEngine(NativeEngine):
    """Takes the artefact of `NativeEngine`; NumPy chooses its threads: one pass at a time."""

    name = "native int8 in numpy"
    survives_fork = False  # not every library for matrix products does

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.num_slots = 1
        self.instructions = "numpy"
        self._shape = EncoderShape.of(config)
        self._read(folder)  # checks every shape
        # The kernels' layout (outputs / 16, inputs / 4, 16, 4) back to (inputs, outputs). As
        # floats, because NumPy multiplies integers without a matrix library, far slower.
        self._float_weights = {
            name: array.transpose(0, 2, 1, 3).reshape(-1, 4 * array.shape[1]).T.astype(np.float32)
            for name, array in self._tensors.items()
            if array.dtype == np.int8
        }

    def logits(self, batch: TokenBatch, threads: int = 1) -> Floats:
        self._check(batch)
        with np.errstate(all="ignore"):  # NaN passes through to the answer, where it is noticed
            return self._logits(batch)

    def _logits(self, batch: TokenBatch) -> Floats:
        # The texts of a batch lie one behind another without padding: text i is the tokens from
        # starts[i] to starts[i + 1]. `places` has each token's position in its own text.
        starts = np.concatenate([[0], np.cumsum(batch.lengths)]).astype(np.int32)
        positions = np.concatenate([np.arange(length) for length in batch.lengths])
        hidden = entering = self._embedded(batch, starts, positions)  # (tokens, width)
        for index in range(self._shape.num_layers):
            hidden, entering = self._block(index, hidden, entering, starts, positions)
        if self._shape.mean_pool:
            lengths = batch.lengths[:, None].astype(np.float32)
            hidden = np.add.reduceat(hidden, starts[:-1]) / lengths
        return self._scores(hidden)

    def _block(
        self,
        index: int,
        hidden: Floats,
        entering: Floats,
        starts: NDArray[np.int32],
        positions: NDArray[np.int64],
    ) -> tuple[Floats, Floats]:
        """One transformer block. Returns the sum that the next block adds to, and what enters its
        products, which are two arrays only in families that normalise before a product.
        """
        shape, prefix, norm_first = self._shape, f"block.{index}.", self._model.norm_first
        is_last = index == shape.num_layers - 1
        # The classifier reads first tokens only, so the last block computes nothing else.
        asking = starts[:-1] if is_last and not shape.mean_pool else np.arange(len(hidden))
        context = self._context(index, entering, asking, starts, positions)
        hidden = hidden[asking] + self._linear_of(prefix + "attention_out", context)
        entering = self._normalised(prefix + "attention_norm", hidden)
        if not norm_first:
            hidden = entering
        wide = self._linear_of(prefix + ("gate" if self._model.is_gated else "wide"), entering)
        wide = _gelu(wide) if shape.activation == ACTIVATIONS["gelu"] else np.maximum(wide, 0)
        if self._model.is_gated:
            wide *= self._linear_of(prefix + "wide", entering)
        hidden = hidden + self._linear_of(prefix + "narrow", wide)
        entering = self._normalised(prefix + "output_norm", hidden)
        # quantize.py writes the final norm as the last block's, so its result is what is read.
        return (entering if not norm_first or is_last else hidden), entering

    def _context(
        self,
        index: int,
        entering: Floats,
        asking: NDArray[np.int64],
        starts: NDArray[np.int32],
        positions: NDArray[np.int64],
    ) -> Floats:
        """Self-attention of the tokens ``asking``, each over its own text: (asking, width)."""
        prefix = f"block.{index}."
        key, value = np.split(self._linear_of(prefix + "key_value", entering), 2, axis=1)
        query = self._linear_of(prefix + "query", entering[asking])
        if theta := self._shape.rotary_thetas[index]:
            turns = self._rotations[theta][positions]
            query, key = self._rotated(query, turns[asking]), self._rotated(key, turns)
        context = np.empty_like(query)
        for start, stop in pairwise(starts):
            own = slice(*np.searchsorted(asking, (start, stop)))  # this text's part of `asking`
            context[own] = self._attended(
                index, query[own], key[start:stop], value[start:stop], positions[asking[own]]
            )
        return context

    def _scores(self, states: Floats) -> Floats:
        """What the encoder says of texts, (texts, width) -> (texts, labels of all models)."""
        return np.concatenate([self._scores_of(head, states) for head in self.heads], axis=1)

    def _scores_of(self, head: Tensors, states: Floats) -> Floats:
        shape, pooler = self._shape, head["pooler.weight"]
        pooled = (states * pooler if pooler.ndim == 1 else states @ pooler) + head["pooler.bias"]
        pooled = (_gelu, lambda x: np.maximum(x, 0), np.tanh)[shape.head_activation](pooled)
        if shape.family.pooler_norm:
            pooled = self._normalised("head_norm", pooled, head)
        return pooled @ head["classifier.weight"].T + head["classifier.bias"]

    def _embedded(
        self, batch: TokenBatch, starts: NDArray[np.int32], positions: NDArray[np.int64]
    ) -> Floats:
        shape, ids = self._shape, batch.ids.astype(np.int32)
        states = self.words[ids].astype(np.float32)
        if shape.family.position_embeddings:
            rows = positions
            if shape.padding_id is not None:
                # The table's first row is for padding alone, and the others count without it.
                is_padding = ids == shape.padding_id
                before = np.cumsum(is_padding) - is_padding
                before -= np.repeat(before[starts[:-1]], batch.lengths)
                rows = np.where(is_padding, 0, positions - before + 1)
            if shape.separator is not None:
                is_second = mark_second_texts(ids, starts, shape.separator) >= SECOND_TEXT
                rows = rows + is_second * (shape.num_positions + (shape.padding_id is not None))
            states += self._tensors["positions"][rows]
        states = self._normalised("embedding_norm", states)
        if shape.embedding_size != shape.hidden_size:
            states = self._linear_of("projection", states)
        return states

    def _linear_of(self, name: str, states: Floats) -> Floats:
        # Each token has a range of its own: an outlier in one text costs the others no precision.
        low, high = states.min(axis=1, keepdims=True), states.max(axis=1, keepdims=True)
        levels = np.rint((states - low) * np.where(high > low, _ACTIVATION_MAX / (high - low), 0))
        # states = levels * step + low, so what `low` adds to an output is low times the sum of its
        # weights: no second product.
        scale = self._tensors[f"{name}.scale"]
        weight_sum = self._tensors[f"{name}.weight_sum"].astype(np.float32)
        shift = self._tensors[f"{name}.bias"] + low * (scale * weight_sum)
        products = levels @ self._float_weights[f"{name}.weight"]  # (tokens, outputs), exact
        return products * ((high - low) / _ACTIVATION_MAX * scale) + shift

    def _normalised(self, name: str, states: Floats, tensors: Tensors | None = None) -> Floats:
        tensors = tensors or self._tensors
        centred = states - states.mean(axis=1, keepdims=True)
        variance = (centred * centred).mean(axis=1, keepdims=True)
        factor = 1 / np.sqrt(variance + np.float32(self._shape.norm_epsilon))
        return centred * factor * tensors[f"{name}.gain"] + tensors[f"{name}.bias"]

    def _attended(
        self, index: int, query: Floats, key: Floats, value: Floats, asking: NDArray[np.int64]
    ) -> Floats:
        """The context of one text's tokens at the places ``asking``, whose ``query`` carries 1 /
        sqrt(head width).
        """
        heads, window = self._shape.num_heads, self._shape.windows[index]
        query, key, value = (
            x.reshape(len(x), heads, -1).transpose(1, 0, 2) for x in (query, key, value)
        )
        scores = query @ key.transpose(0, 2, 1)  # (heads, asking, tokens)
        distances = np.arange(key.shape[1]) - asking[:, None]  # (asking, tokens)
        if self._shape.family.relative_positions:
            # The table begins with the farthest token on the left.
            rows = self._shape.num_positions - 1 + distances
            scores = scores + self._tensors["distances"][:, rows]
        if window:
            scores = np.where(np.abs(distances) <= window, scores, np.float32(-np.inf))
        # Softmax, whose maximum is taken off so that exp cannot overflow.
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        context = weights @ value / weights.sum(axis=2, keepdims=True)
        return context.transpose(1, 0, 2).reshape(len(asking), -1)

    def _rotated(self, states: Floats, turns: Floats) -> Floats:
        heads = states.reshape(len(states), self._shape.num_heads, -1)
        first, second = np.split(heads, 2, axis=2)
        cosine, sine = (part[:, None] for part in np.split(turns, 2, axis=1))
        turned = np.concatenate(
            [first * cosine - second * sine, second * cosine + first * sine], axis=2
        )
        return turned.reshape(states.shape)

    def _rotation(self, theta: float) -> Floats:
        angles = (
            np.arange(self._shape.num_positions)[:, None]
            * self._tensors[f"frequencies.{theta:g}"][None]
        )
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _gelu(states: Floats) -> Floats:
    near = np.clip(states, -4, 4)
    square, share = near * near, np.float32(_GELU[0])
    for factor in _GELU[1:]:
        share = share * square + np.float32(factor)
    return states * (share * near + np.float32(0.5))
