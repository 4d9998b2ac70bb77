"""What a rank holds of the model at a moment: its parameters and gradients, their values and their checksums."""

from __future__ import annotations

import hashlib
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from learn.cards.storage import Storage


def record_held(moment: Literal["before", "broadcast", "after"], storage: Storage) -> None:
    """Keep what the rank's model looks like at this moment; nothing before there is a model.

    ``before.safetensors`` holds ``parameters/NAME`` and ``gradients/NAME``, those that there are; ``before.json`` their
    shapes and checksums.
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
    """A copy of what of a tensor lies on this rank: its shard, or all of it."""
    # A copy, since memory that numpy has looked at cannot be freed by FSDP any more.
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def describe(tensor: torch.Tensor) -> dict[str, list[int] | str]:
    """A tensor's shape, and a checksum of its bytes: equal when the tensors are equal bit for bit."""
    data = tensor.detach().cpu().contiguous().numpy().tobytes()
    return {"shape": list(tensor.shape), "checksum": hashlib.sha256(data).hexdigest()[:12]}


def gradient_norm(model: nn.Module) -> float:
    """The length of all gradients together; of sharded ones over all ranks, so that all must ask."""
    gradients = [parameter.grad for parameter in model.parameters()]
    squares = torch.stack([own_part(gradient).square().sum() for gradient in gradients]).sum()
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        dist.all_reduce(squares)
    return squares.sqrt().item()
