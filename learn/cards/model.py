"""The model of the cards, a small perceptron, and what a rank holds of it at a moment."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from common.errors import UserError
from learn.cards.storage import Storage

MAX_PARAMETERS = 1_000_000


def build_mlp(layers: Sequence[int], seed: int = 0) -> nn.Sequential:
    """Linear layers with ReLU between them; ``layers``: features, hidden ones, classes."""
    # The cards' seed decides, not what has been drawn before in this process.
    torch.manual_seed(seed)
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(layers):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*modules[:-1])  # no ReLU on the logits, which may be negative


def layer_sizes(model: nn.Sequential) -> list[int]:
    linear = [module for module in model if isinstance(module, nn.Linear)]
    return [linear[0].in_features, *(layer.out_features for layer in linear)]


def read_architecture(text: str, num_features: int, num_classes: int) -> list[int]:
    """Layer sizes from their text, such as ``4,16,8,3``.

    Raises:
        UserError: it is not a list of sizes, or does not fit the data.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) < 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(
            f"model_arch {text!r}: must be sizes of layers, such as "
            f"{num_features},16,8,{num_classes}",
            code="card-network",
        )
    layers = [int(part) for part in parts]
    if layers[0] != num_features:
        problem = f"begins with {layers[0]}, but the data has {num_features} features"
        raise UserError(f"model_arch {text}: {problem}", code="card-network")
    if layers[-1] != num_classes:
        problem = f"ends with {layers[-1]}, but the data has {num_classes} classes"
        raise UserError(f"model_arch {text}: {problem}", code="card-network")
    if (count := num_parameters(layers)) > MAX_PARAMETERS:
        raise UserError(
            f"model_arch {text}: {count:,} parameters; at most {MAX_PARAMETERS:,} can be shown",
            code="card-network",
        )
    return layers


def num_parameters(layers: Sequence[int]) -> int:
    # The + 1 is the bias of each output.
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(layers))


def record_held(moment: Literal["before", "broadcast", "after"], storage: Storage) -> None:
    """Save the rank's model as it is at this moment; does nothing before there is a model.

    ``before.safetensors`` holds ``parameters/NAME`` and ``gradients/NAME`` (if it has gradients);
    ``before.json`` their shapes and checksums.
    """
    model = storage.live.get("model")
    if model is None or not storage.recording:
        return
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"parameters/{name}"] = own_part(parameter)
        if parameter.grad is not None:
            tensors[f"gradients/{name}"] = own_part(parameter.grad)
    storage.save_tensors(moment, tensors)
    storage.save(moment, {name: describe(tensor) for name, tensor in tensors.items()})


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's part of a tensor: its shard, or all of it."""
    # A copy, because FSDP cannot free memory that numpy has a view of.
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def describe(tensor: torch.Tensor) -> dict[str, list[int] | str]:
    """A tensor's shape, and a checksum of its bytes, which is equal if every bit is."""
    # Of the bytes, because "equal except for rounding" would hide replicas that drift apart.
    data = tensor.detach().cpu().contiguous().numpy().tobytes()
    return {"shape": list(tensor.shape), "checksum": hashlib.sha256(data).hexdigest()[:12]}


def gradient_norm(model: nn.Module) -> float:
    """The norm over all gradients.

    If they are sharded this is a collective, which all ranks must call.
    """
    gradients = [parameter.grad for parameter in model.parameters()]
    # Squares add up over tensors and over shards, norms do not: the root comes last.
    squares = torch.stack([own_part(gradient).square().sum() for gradient in gradients]).sum()
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        dist.all_reduce(squares)
    return squares.sqrt().item()
