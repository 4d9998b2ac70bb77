"""From float weights to the packed int8 file that the kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from inference.engines.native.architecture import EncoderShape

FILE_NAME = "model_int8.safetensors"
PANEL = 64  # outputs that the kernels compute together, as in kernels.c
_INT8_MAX = 127

Weights = Mapping[str, NDArray[Any]]


def write_native(config: Mapping[str, Any], weights: Weights, folder: Path) -> None:
    """Quantise a classifier and write it as `FILE_NAME`.

    Weights become int8 with one symmetric scale per output channel; word embeddings become float16; everything else
    stays float32.

    Raises:
        ValueError: The kernels do not compute this architecture, or a weight is missing, is not finite or, in an
            embedding, is too large for float16.
    """
    shape = EncoderShape.of(config)
    family = shape.family
    positions = _float(weights, f"{family.position_embeddings}.weight")
    if family.token_type_embeddings:
        # A single text is given, not a pair, so every token has type 0.
        positions = positions + _float(weights, f"{family.token_type_embeddings}.weight")[0]
    tensors: dict[str, NDArray[Any]] = {
        "words": _half(weights, f"{family.word_embeddings}.weight"),
        "positions": positions,
        "classifier.weight": _float(weights, f"{family.classifier}.weight"),
        "classifier.bias": _float(weights, f"{family.classifier}.bias"),
        # The kernels walk over inputs first.
        "pooler.weight": np.ascontiguousarray(_float(weights, f"{family.pooler}.weight").T),
        "pooler.bias": _float(weights, f"{family.pooler}.bias"),
        **_norm("embedding_norm", weights, family.embedding_norm),
    }
    for index in range(shape.num_layers):
        tensors |= _block(f"block.{index}.", shape, weights, shape.block_prefix(index))
    save_file(tensors, folder / FILE_NAME)


def _block(prefix: str, shape: EncoderShape, weights: Weights, source: str) -> dict[str, NDArray[Any]]:
    def linear(name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return _float(weights, f"{source}{name}.weight"), _float(weights, f"{source}{name}.bias")

    family = shape.family
    query_weight, query_bias = linear(family.query)
    key_weight, key_bias = linear(family.key)
    value_weight, value_bias = linear(family.value)
    scaling = np.float32(shape.head_size**-0.5)  # saves a pass over the scores
    return {
        **_linear(f"{prefix}query", query_weight * scaling, query_bias * scaling),
        **_linear(
            f"{prefix}key_value",
            np.concatenate([key_weight, value_weight]),
            np.concatenate([key_bias, value_bias]),
        ),
        **_linear(f"{prefix}attention_out", *linear(family.attention_output)),
        **_linear(f"{prefix}wide", *linear(family.intermediate)),
        **_linear(f"{prefix}narrow", *linear(family.output)),
        **_norm(f"{prefix}attention_norm", weights, source + family.attention_norm),
        **_norm(f"{prefix}output_norm", weights, source + family.output_norm),
    }


def _linear(name: str, weight: NDArray[np.float32], bias: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    scale = np.maximum(np.abs(weight).max(axis=1), np.finfo(np.float32).tiny) / _INT8_MAX
    # The kernels quantise activations as scale x q + offset. The offset adds offset x (sum of its weights) to each
    # output, and that sum is known here.
    quantised = np.rint(weight / scale[:, None]).astype(np.int8)
    return {
        f"{name}.weight": _packed(quantised),
        f"{name}.scale": scale.astype(np.float32),
        f"{name}.row_offset": (scale * quantised.sum(axis=1, dtype=np.int64)).astype(np.float32),
        f"{name}.bias": bias,
    }


def _packed(weight: NDArray[np.int8]) -> NDArray[np.int8]:
    # (outputs, inputs) -> (panels, inputs / 4, 64, 4). VPDPBUSD sums the products of four neighbouring inputs for each
    # of 16 outputs, so these have to be contiguous.
    outputs, inputs = weight.shape
    filled = np.zeros((-(-outputs // PANEL) * PANEL, inputs), dtype=np.int8)
    filled[:outputs] = weight
    return np.ascontiguousarray(filled.reshape(-1, PANEL, inputs // 4, 4).transpose(0, 2, 1, 3))


def _norm(name: str, weights: Weights, source: str) -> dict[str, NDArray[Any]]:
    return {
        f"{name}.gain": _float(weights, f"{source}.weight"),
        f"{name}.bias": _float(weights, f"{source}.bias"),
    }


def _float(weights: Weights, name: str) -> NDArray[np.float32]:
    if name not in weights:
        raise ValueError(f"the weights lack {name}")
    weight = np.asarray(weights[name], dtype=np.float32)
    if not np.isfinite(weight).all():
        raise ValueError(f"{name} holds NaN or infinity because training diverged; train with a lower learning rate")
    return weight


def _half(weights: Weights, name: str) -> NDArray[np.float16]:
    weight = _float(weights, name)
    largest = float(np.abs(weight).max())
    if largest > float(np.finfo(np.float16).max):
        raise ValueError(
            f"{name} reaches {largest:g}, more than float16's 65504; export for another engine, such as onnx"
        )
    return weight.astype(np.float16)
