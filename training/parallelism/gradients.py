"""The norm of all gradients on all ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum gradients that tensor-parallel ranks hold as partial sums: norms under sequence parallelism."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(
            placement.is_partial() for placement in gradient.placements
        ):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def global_norm(
    parameters: Iterable[nn.Parameter], stages: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The norm of all gradients of the whole model, the same on every rank: fp32, ().

    Args:
        parameters: this rank's, plain or DTensors, on any meshes. A value that several ranks hold
            counts once.
        stages: the ranks that hold the other stages of a pipeline.
    """
    # |g|^2 is a sum over all elements, wherever they are. Gradients are grouped by the process
    # groups that they are sharded over: one scalar all-reduce per group adds up the shards, and a
    # replicated gradient counts once.
    split: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            split.setdefault(_split_over(parameter.grad), []).append(_local(parameter.grad))
    if stages is None and not any(split):  # nothing is sharded: every rank has all gradients
        return get_total_norm(split.get((), []))
    squares = []
    for groups, gradients in split.items():
        square = get_total_norm(gradients).float().square()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    total = torch.stack(squares).sum()
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def clip_divisor(norm: torch.Tensor, limit: float, scale: float = 1.0) -> torch.Tensor:
    """What gradients have to be divided by to remove the loss ``scale``, and to have at most the
    norm ``limit``: fp32, ().

    Args:
        norm: of all gradients, without the scale. If it is not finite, neither is the result.
    """
    # Fused AdamW divides while it reads a gradient, so clipping costs no pass over memory of its
    # own. The divisor stays on the device: reading it would wait.
    return torch.clamp((norm + 1e-6) / limit, min=1.0).float() * scale


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _split_over(gradient: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks hold different parts of a gradient."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(i)
        for i, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    )
