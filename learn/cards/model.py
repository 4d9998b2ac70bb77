"""The model of the cards: a multi-layer perceptron, small enough to see every number of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from common.errors import UserError

MOST_PARAMETERS = 1_000_000


def build_mlp(layers: Sequence[int], seed: int = 0) -> nn.Sequential:
    """Linear layers with ReLU between them, from random weights.

    Args:
        layers: sizes: features, hidden ..., classes.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(layers):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def layer_sizes(model: nn.Sequential) -> list[int]:
    """What :func:`build_mlp` was given."""
    linear = [module for module in model if isinstance(module, nn.Linear)]
    return [linear[0].in_features, *(layer.out_features for layer in linear)]


def read_architecture(text: str, num_features: int, num_classes: int) -> list[int]:
    """Layer sizes from their text, such as ``4,16,8,3``.

    Raises:
        UserError: it is no list of sizes, or does not go with the data.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) < 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(
            f"model_arch {text!r}: must be sizes of layers, such as {num_features},16,8,{num_classes}",
            code="card-network",
        )
    layers = [int(part) for part in parts]
    if layers[0] != num_features:
        raise UserError(
            f"model_arch {text}: begins with {layers[0]}, but the data has {num_features} features", code="card-network"
        )
    if layers[-1] != num_classes:
        raise UserError(
            f"model_arch {text}: ends with {layers[-1]}, but the data has {num_classes} classes", code="card-network"
        )
    if (count := num_parameters(layers)) > MOST_PARAMETERS:
        raise UserError(
            f"model_arch {text}: {count:,} parameters; at most {MOST_PARAMETERS:,} can be looked at",
            code="card-network",
        )
    return layers


def num_parameters(layers: Sequence[int]) -> int:
    """Weights and biases of all layers."""
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(layers))
