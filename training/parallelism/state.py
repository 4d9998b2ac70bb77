"""Weights and moments under names that do not depend on how the model is distributed.

Each rank contributes what it holds, as it holds it: whole tensors or shards (DTensor). So a
checkpoint of one strategy can be loaded by any other, on any number of ranks, and no rank ever
needs the whole state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class StrategyState:
    """What one rank holds of a run's state.

    ``tensors``: ``model/NAME``, ``optimizer/NAME/exp_avg|exp_avg_sq|step`` and what a strategy
    adds; references to the trained tensors, neither copied nor gathered; several ranks may hold the
    same whole ones. ``plain``: other values, the same on all ranks.
    """

    tensors: dict[str, torch.Tensor]
    plain: dict[str, Any]


class SavedState(Protocol):
    """A state saved on any number of ranks, from which each rank reads what it needs."""

    plain: Mapping[str, Any]
    tensors: Collection[str]

    def read(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors of these names in place; of a DTensor, this rank's shard."""


def model_tensors(parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"model/{name}": tensor.detach()
        for part in parts
        for name, tensor in part.state_dict().items()
    }


def optimizer_tensors(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    return {
        f"optimizer/{name}/{field}": value
        for name, parameter in parameters.items()
        for field, value in optimizer.state[parameter].items()
    }


def read_optimizer(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, saved: SavedState
) -> None:
    """Read this rank's moments and step counts directly into place; zeros if none were saved."""
    moments = optimizer_tensors(parameters, optimizer)
    for name, tensor in moments.items():
        if name not in saved.tensors:
            tensor.zero_()
    saved.read({name: tensor for name, tensor in moments.items() if name in saved.tensors})


def full_model(
    parts: Sequence[nn.Module], *, keep: bool, stages: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Whole tensors on the CPU by name, on the ranks that ``keep`` them; a collective call.

    In a pipeline, the first rank of ``stages`` gets the tensors of all of them.
    """
    tensors = {name: tensor for part in parts for name, tensor in part.state_dict().items()}
    return _collect(
        {name: _whole(tensor, keep=keep) for name, tensor in tensors.items()}, keep, stages
    )


def _whole(tensor: torch.Tensor, *, keep: bool) -> torch.Tensor | None:
    """A collective call if the tensor is sharded."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if not keep:
        return None
    # A view of zero1's buffer would be written to the file with the whole buffer.
    return (
        tensor.clone()
        if tensor.is_cpu and tensor.untyped_storage().nbytes() > tensor.nbytes
        else tensor.cpu()
    )


def _collect(
    tensors: dict[str, Any], keep: bool, stages: dist.ProcessGroup | None
) -> dict[str, Any]:
    """On the first rank of a pipeline, the tensors of all stages; only one rank per stage keeps any."""
    if not keep or stages is None:
        return tensors
    # The receiver has to know names and shapes before it can allocate; then the tensors come in
    # that order.
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend(stages) == "nccl"
        else None
    )
    described = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    all_described: list[Any] = [None] * stages.size()
    dist.all_gather_object(all_described, described, group=stages)
    if stages.rank() > 0:
        for tensor in tensors.values():
            dist.send(tensor.contiguous().to(device), group=stages, group_dst=0)
        return tensors
    for stage in range(1, stages.size()):
        for name, shape, dtype in all_described[stage]:
            received = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(received, group=stages, group_src=stage)
            tensors[name] = received.cpu()
    return tensors
