"""Without padding in the collectives: whole gradients are all-reduced, and each owner broadcasts its share."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def bounds(parameters: Sequence[nn.Parameter], rank: int) -> tuple[int, int, int]:
    total = sum(parameter.numel() for parameter in parameters)
    size = (total + dist.get_world_size() - 1) // dist.get_world_size()
    return rank * size, min((rank + 1) * size, total), size


def own_part(parameters: Sequence[nn.Parameter], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    start, end, size = bounds(parameters, dist.get_rank())
    part = torch.zeros(size, dtype=parameters[0].dtype)
    part[: max(0, end - start)] = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])[start:end]
    return part


def create_sharded_adam(parameters: Sequence[nn.Parameter], learning_rate: float) -> torch.optim.Adam:
    return torch.optim.Adam([own_part(parameters, parameters)], learning_rate)


def reduce_scatter_gradients(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())
    return own_part(parameters, [parameter.grad for parameter in parameters])


@torch.no_grad()
def zero1_step(parameters: Sequence[nn.Parameter], optimizer: torch.optim.Adam) -> None:
    share = optimizer.param_groups[0]["params"][0]
    optimizer.zero_grad()
    share.grad = reduce_scatter_gradients(parameters)
    optimizer.step()
    for owner in range(dist.get_world_size()):
        start, end, _ = bounds(parameters, owner)
        part = share.clone() if owner == dist.get_rank() else torch.empty_like(share)
        dist.broadcast(part, src=owner)
        for place, value in zip(range(start, end), part, strict=False):
            for parameter in parameters:
                if place < parameter.numel():
                    parameter.view(-1)[place] = value
                    break
                place -= parameter.numel()
