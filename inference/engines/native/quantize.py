"""From float weights to the packed int8 file that the kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from inference.engines.native.architecture import Architecture

FILE_NAME = "model_int8.safetensors"
PANEL = 64  # outputs that the kernels compute together, as in kernels.c
_INT8_MAX = 127

Weights = Mapping[str, NDArray[Any]]


def write_native(config: Mapping[str, Any], weights: Weights, folder: Path) -> None:
    """Quantise a classifier and write it as `FILE_NAME`.

    Weights become int8 with one symmetric scale an output channel; word embeddings become float16; everything else
    stays float32.

    Args:
        config: The contents of a transformers ``config.json``.
        weights: Float arrays with the names that transformers gives them.
        folder: An existing folder.

    Raises:
        ValueError: The architecture is not one that the kernels compute, or a weight is missing, NaN, infinite or, of
            an embedding, beyond float16.
    """
    architecture = Architecture.of(config)
    names = architecture.names
    tensors: dict[str, NDArray[Any]] = {
        "words": _half(weights, names.words),
        "positions": _positions(architecture, weights),
        "classifier.weight": _float(weights, f"{names.classifier}.weight"),
        "classifier.bias": _float(weights, f"{names.classifier}.bias"),
        # The kernels walk over inputs first.
        "pooler.weight": np.ascontiguousarray(_float(weights, f"{names.pooler}.weight").T),
        "pooler.bias": _float(weights, f"{names.pooler}.bias"),
        **_norm("embedding_norm", weights, names.embedding_norm),
    }
    for index in range(architecture.num_blocks):
        tensors |= _block(f"block.{index}.", architecture, weights, index)
    save_file(tensors, folder / FILE_NAME)


def _block(prefix: str, architecture: Architecture, weights: Weights, index: int) -> dict[str, NDArray[Any]]:
    def linear(name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        full = names.block.format(index) + name
        return _float(weights, f"{full}.weight"), _float(weights, f"{full}.bias")

    names = architecture.names
    query_weight, query_bias = linear(names.query)
    key_weight, key_bias = linear(names.key)
    value_weight, value_bias = linear(names.value)
    scaling = np.float32(architecture.head_width**-0.5)  # saves a pass over the scores
    block = names.block.format(index)
    return {
        **_linear(f"{prefix}query", query_weight * scaling, query_bias * scaling),
        **_linear(
            f"{prefix}key_value",
            np.concatenate([key_weight, value_weight]),
            np.concatenate([key_bias, value_bias]),
        ),
        **_linear(f"{prefix}attention_out", *linear(names.attention_out)),
        **_linear(f"{prefix}wide", *linear(names.wide)),
        **_linear(f"{prefix}narrow", *linear(names.narrow)),
        **_norm(f"{prefix}attention_norm", weights, block + names.attention_norm),
        **_norm(f"{prefix}output_norm", weights, block + names.output_norm),
    }


def _linear(name: str, weight: NDArray[np.float32], bias: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    scale = np.maximum(np.abs(weight).max(axis=1), np.finfo(np.float32).tiny) / _INT8_MAX
    quantised = np.rint(weight / scale[:, None]).astype(np.int8)
    return {
        f"{name}.weight": _packed(quantised),
        f"{name}.scale": scale.astype(np.float32),
        f"{name}.row_offset": (scale * quantised.sum(axis=1, dtype=np.int64)).astype(np.float32),
        f"{name}.bias": bias,
    }


def _packed(weight: NDArray[np.int8]) -> NDArray[np.int8]:
    """Lay (outputs, inputs) out as (panels, inputs / 4, 64, 4): four inputs of 64 outputs lie side by side."""
    outputs, inputs = weight.shape
    filled = np.zeros((-(-outputs // PANEL) * PANEL, inputs), dtype=np.int8)
    filled[:outputs] = weight
    return np.ascontiguousarray(filled.reshape(-1, PANEL, inputs // 4, 4).transpose(0, 2, 1, 3))


def _positions(architecture: Architecture, weights: Weights) -> NDArray[np.float32]:
    positions = _float(weights, architecture.names.positions)
    if architecture.names.token_types is None:
        return positions
    return positions + _float(weights, architecture.names.token_types)[0]  # one text, so every token has type 0


def _norm(name: str, weights: Weights, source: str) -> dict[str, NDArray[Any]]:
    return {
        f"{name}.gain": _float(weights, f"{source}.weight"),
        f"{name}.bias": _float(weights, f"{source}.bias"),
    }


def _float(weights: Weights, name: str) -> NDArray[np.float32]:
    if name not in weights:
        raise ValueError(f"the weights hold no {name}")
    weight = np.asarray(weights[name], dtype=np.float32)
    if not np.isfinite(weight).all():
        raise ValueError(f"{name} holds NaN or infinity, the training diverged; train with a lower learning rate")
    return weight


def _half(weights: Weights, name: str) -> NDArray[np.float16]:
    weight = _float(weights, name)
    largest = float(np.abs(weight).max())
    if largest > float(np.finfo(np.float16).max):
        raise ValueError(f"{name} reaches {largest:g}, beyond float16's 65504; export for another engine, such as onnx")
    return weight.astype(np.float16)
