"""State: weights and moments of a model that lies over ranks, in one form, whole on rank 0.

The form does not say how the model lay: names of parameters to whole tensors. So what one strategy saved any other
takes, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def full_model(parts: Sequence[nn.Module], *, keep: bool, stages: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Names to whole tensors on the CPU.

    Args:
        parts: this rank's part of the model; every rank calls this.
        keep: whether this rank's copies are wanted; false spares their memory.
        stages: the ranks that hold the other stages of a pipeline, the first of which gets everything.
    """
    tensors = {name: tensor for part in parts for name, tensor in part.state_dict().items()}
    return _collect({name: _whole(tensor, keep=keep) for name, tensor in tensors.items()}, keep, stages)


def full_optimizer(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    keep: bool,
    stages: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Names to AdamW's moments and steps, whole, on the CPU; empty before the first step. Arguments as above."""
    states = {
        name: optimizer.state[parameter] for name, parameter in parameters.items() if parameter in optimizer.state
    }
    flat = {(name, field): _whole(value, keep=keep) for name, state in states.items() for field, value in state.items()}
    nested: dict[str, Any] = {}
    for (name, field), value in _collect(flat, keep, stages).items():
        nested.setdefault(name, {})[field] = value
    return nested


@torch.no_grad()
def load_model(parts: Sequence[nn.Module], weights: Mapping[str, torch.Tensor]) -> None:
    """Take this rank's part out of whole weights."""
    for part in parts:
        for name, tensor in part.state_dict().items():
            tensor.copy_(_like(weights[name], tensor))


def load_optimizer(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, states: Mapping[str, Mapping[str, Any]]
) -> None:
    """Take this rank's part out of whole moments."""
    for name, parameter in parameters.items():
        if name in states:
            moments = {field: _like(states[name][field], parameter) for field in MOMENTS}
            step = torch.as_tensor(states[name]["step"], dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step.clone(), **moments}


def _whole(tensor: torch.Tensor, *, keep: bool) -> torch.Tensor | None:
    """A collective call where the tensor is shared out."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu() if keep else None


def _like(full: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``full`` that lies where ``tensor`` does, in its type, in memory of its own."""
    if not isinstance(tensor, DTensor):
        return full.to(tensor.device, tensor.dtype, copy=True)
    # Every rank has read the whole: nothing has to be sent.
    part = distribute_tensor(
        full.to(tensor.device, tensor.dtype, copy=True), tensor.device_mesh, tensor.placements, src_data_rank=None
    )
    return part.to(tensor.device)  # offloaded, it lies beside the mesh's devices


def _collect(tensors: dict[Any, Any], keep: bool, stages: dist.ProcessGroup | None) -> dict[Any, Any]:
    """On the first of a pipeline's ranks, the tensors of all stages; only one rank a stage keeps any."""
    if not keep or stages is None:
        return tensors
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(stages) == "nccl" else None
    described = [(key, tensor.shape, tensor.dtype) for key, tensor in tensors.items()]
    all_described: list[Any] = [None] * stages.size()
    dist.all_gather_object(all_described, described, group=stages)
    if stages.rank() > 0:
        for tensor in tensors.values():
            dist.send(tensor.contiguous().to(device), group=stages, group_dst=0)
        return tensors
    for stage in range(1, stages.size()):
        for key, shape, dtype in all_described[stage]:
            received = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(received, group=stages, group_src=stage)
            tensors[key] = received.cpu()
    return tensors
