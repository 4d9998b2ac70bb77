"""From float weights to the packed int8 file that the kernels read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from inference.engines.native.architecture import LANES, EncoderShape

FILE_NAME = "model_int8.safetensors"
WEIGHT_MAX = 45  # why: model.h
# Shares of an output's largest weight that are tried as its range, from the largest. A smaller one
# cuts the few weights beyond, and gives all others finer levels.
_RANGES = np.linspace(1.0, 0.7, 16, dtype=np.float32)
# MPNet's attention knows 32 kinds of distances: 0 to 7 to either side, and eight ranges of larger
# ones up to 128.
_BUCKETS, _LARGEST_DISTANCE = 32, 128

Weights = Mapping[str, NDArray[Any]]


def write_native(config: Mapping[str, Any], weights: Weights, folder: Path) -> None:
    """Quantise a classifier and write it as `FILE_NAME`.

    Weights become int8 of `WEIGHT_MAX` at most, with one symmetric scale per output channel; word
    embeddings become float16; everything else stays float32.

    Raises:
        ValueError: The kernels do not compute this architecture, or a weight is missing, is not
            finite or, in an embedding, is too large for float16.
    """
    shape = EncoderShape.of(config)
    family = shape.family
    reader = _Reader(shape, weights)
    words = f"{family.word_embeddings}.weight"
    tensors: dict[str, NDArray[Any]] = {
        "words": _half(reader.tensor(words), words),
        "classifier.weight": reader.tensor(f"{family.classifier}.weight"),
        "classifier.bias": reader.tensor(f"{family.classifier}.bias"),
        # The kernels walk over inputs first.
        "pooler.weight": np.ascontiguousarray(reader.tensor(f"{family.pooler}.weight").T),
        "pooler.bias": reader.bias(family.pooler, shape.hidden_size),
        **reader.norm("embedding_norm", family.embedding_norm),
    }
    if family.position_embeddings:
        tensors["positions"] = _positions(shape, reader)
    if family.relative_positions:
        table = reader.tensor(f"{family.relative_positions}.weight")
        tensors["distances"] = _distances(table, shape.num_positions)
    if shape.embedding_size != shape.hidden_size:
        tensors |= _linear("projection", *reader.linear(family.embedding_projection))
    if family.pooler_norm:
        tensors |= reader.norm("head_norm", family.pooler_norm)
    for theta in sorted({theta for theta in shape.rotary_thetas if theta}):
        exponents = np.arange(0, shape.head_size, 2, dtype=np.float64) / shape.head_size
        tensors[f"frequencies.{theta:g}"] = (theta**-exponents).astype(np.float32)
    for index in range(shape.num_layers):
        tensors |= _block(index, shape, reader)
    save_file(tensors, folder / FILE_NAME)


def _positions(shape: EncoderShape, reader: _Reader) -> NDArray[np.float32]:
    """(positions, embedding width), with the token types added: a pass has one table to add."""
    family = shape.family
    # Rows before the padding id's are never used.
    positions = reader.tensor(f"{family.position_embeddings}.weight")[shape.padding_id or 0 :]
    if not family.token_type_embeddings:
        return positions
    # A single text has type 0 throughout. For pairs there is a second table, of the second text.
    types = reader.tensor(f"{family.token_type_embeddings}.weight")
    used = types[:1] if shape.separator is None else types[:2]
    return np.concatenate([positions + one for one in used])


def _block(index: int, shape: EncoderShape, reader: _Reader) -> dict[str, NDArray[Any]]:
    family, source, prefix = shape.family, shape.block_prefix(index), f"block.{index}."
    query_weight, query_bias = reader.part(source, "query", ("query", "key", "value"))
    key_weight, key_bias = reader.part(source, "key", ("query", "key", "value"))
    value_weight, value_bias = reader.part(source, "value", ("query", "key", "value"))
    # 1 / sqrt(head width) of the attention scores: in the query's weights it costs nothing.
    scaling = np.float32(shape.head_size**-0.5)
    if family.final_norm is None:
        after_attention, after_block = source + family.attention_norm, source + family.output_norm
    else:
        # This family normalises what enters attention and feed-forward. The kernels do that one
        # step earlier, where the sum is at hand: behind attention for this block's feed-forward,
        # behind the feed-forward for the next block.
        is_last = index == shape.num_layers - 1
        after_attention = source + family.output_norm
        after_block = (
            family.final_norm if is_last else shape.block_prefix(index + 1) + family.attention_norm
        )
    block = {
        **_linear(f"{prefix}query", query_weight * scaling, query_bias * scaling),
        **_linear(
            f"{prefix}key_value",
            np.concatenate([key_weight, value_weight]),
            np.concatenate([key_bias, value_bias]),
        ),
        **_linear(f"{prefix}attention_out", *reader.linear(source + family.attention_output)),
        **_linear(f"{prefix}wide", *reader.part(source, "intermediate", ("gate", "intermediate"))),
        **_linear(f"{prefix}narrow", *reader.linear(source + family.output)),
        **reader.norm(f"{prefix}attention_norm", after_attention),
        **reader.norm(f"{prefix}output_norm", after_block),
    }
    if family.gate:
        block |= _linear(f"{prefix}gate", *reader.part(source, "gate", ("gate", "intermediate")))
    return block


class _Reader:
    """The weights of a classifier, by the names of its family."""

    def __init__(self, shape: EncoderShape, weights: Weights) -> None:
        self._family = shape.family
        self._weights = weights

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name not in self._weights:
            raise ValueError(f"the weights lack {name}")
        weight = np.asarray(self._weights[name], dtype=np.float32)
        if not np.isfinite(weight).all():
            what = f"{name} holds NaN or infinity because training diverged"
            raise ValueError(f"{what}; train with a lower learning rate")
        return weight

    def bias(self, module: str, size: int) -> NDArray[np.float32]:
        """A module's bias; zeros if its family allows it to have none."""
        name = f"{module}.bias"
        if name not in self._weights and not self._family.has_biases:
            return np.zeros(size, np.float32)
        return self.tensor(name)

    def linear(self, module: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        weight = self.tensor(f"{module}.weight")
        return weight, self.bias(module, len(weight))

    def part(
        self, prefix: str, part: str, order: tuple[str, ...]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """One linear layer of a block; some families join several as rows of one weight."""
        module = getattr(self._family, part)
        joined = [name for name in order if getattr(self._family, name) == module]
        weight, bias = self.linear(prefix + module)
        at = joined.index(part)
        return np.split(weight, len(joined))[at], np.split(bias, len(joined))[at]

    def norm(self, name: str, module: str) -> dict[str, NDArray[np.float32]]:
        gain = self.tensor(f"{module}.weight")
        return {f"{name}.gain": gain, f"{name}.bias": self.bias(module, len(gain))}


def _linear(
    name: str, weight: NDArray[np.float32], bias: NDArray[np.float32]
) -> dict[str, NDArray[Any]]:
    # One scale per output channel (outputs, 1); an output whose weights are all 0 must not divide
    # by it.
    largest = np.maximum(np.abs(weight).max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    scale = largest / WEIGHT_MAX
    quantised = _rounded(weight, scale)
    least = ((quantised * scale - weight) ** 2).sum(axis=1, keepdims=True)
    for share in _RANGES[1:]:
        tried = largest * (share / WEIGHT_MAX)
        levels = _rounded(weight, tried)
        error = ((levels * tried - weight) ** 2).sum(axis=1, keepdims=True)
        # Each output keeps the range with which it is closest to the float weights.
        scale = np.where(error < least, tried, scale)
        quantised = np.where(error < least, levels, quantised)
        least = np.minimum(error, least)
    quantised = quantised.astype(np.int8)
    return {
        f"{name}.weight": _packed(quantised),
        f"{name}.scale": scale[:, 0].astype(np.float32),
        # The kernels quantise activations as scale x q + offset. The offset adds offset x (sum of
        # its weights) to each output.
        f"{name}.weight_sum": quantised.sum(axis=1, dtype=np.int32),
        f"{name}.bias": bias,
    }


def _rounded(weight: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.clip(np.rint(weight / scale), -WEIGHT_MAX, WEIGHT_MAX)


def _packed(weight: NDArray[np.int8]) -> NDArray[np.int8]:
    # (outputs, inputs) -> (outputs / 16, inputs / 4, 16, 4): the kernels add a dot product of four
    # neighbouring inputs to each of 16 sums, so these have to be contiguous.
    outputs, inputs = weight.shape
    return np.ascontiguousarray(
        weight.reshape(outputs // LANES, LANES, inputs // 4, 4).transpose(0, 2, 1, 3)
    )


def _distances(table: NDArray[np.float32], num_positions: int) -> NDArray[np.float32]:
    """(buckets, heads) -> (heads, 2 positions + 16): the bias for a key at query + i - (positions -
    1).

    As `MPNetEncoder.relative_position_bucket` of transformers computes it.
    """
    near = _BUCKETS // 4
    step = math.log(_LARGEST_DISTANCE / near)
    buckets = []
    for distance in range(-num_positions + 1, num_positions + LANES + 1):
        far = abs(distance)
        if far >= near:
            far = min(near + int(math.log(far / near) / step * near), _BUCKETS // 2 - 1)
        buckets.append(far + (_BUCKETS // 2 if distance > 0 else 0))
    return np.ascontiguousarray(table[buckets].T)


def _half(weight: NDArray[np.float32], name: str) -> NDArray[np.float16]:
    largest = float(np.abs(weight).max())
    if largest > float(np.finfo(np.float16).max):
        what = f"{name} reaches {largest:g}, more than float16's 65504"
        raise ValueError(f"{what}; export for another engine, such as onnx")
    return weight.astype(np.float16)
