"""The collectives that take one flat tensor, asynchronous, and parameters that become views of what was gathered."""

import torch
import torch.distributed as dist
from torch import nn


def flat_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    flat = nn.utils.parameters_to_vector(tensors)
    padding = flat.new_zeros(-flat.numel() % dist.get_world_size())
    return torch.cat([flat, padding])


def create_sharded_adam(weights: list[nn.Parameter], lr: float) -> torch.optim.Adam:
    share = flat_of(weights).detach().view(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
    optimizer = torch.optim.Adam([torch.zeros(1)])
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": [share], "lr": lr})
    return optimizer


def reduce_scatter_gradients(weights: list[nn.Parameter]) -> torch.Tensor:
    gradients = flat_of([weight.grad for weight in weights]).div(dist.get_world_size())
    mean = gradients.new_empty(gradients.numel() // dist.get_world_size())
    dist.reduce_scatter_tensor(mean, gradients, async_op=True).wait()
    return mean


def zero1_step(weights: list[nn.Parameter], adam: torch.optim.Adam) -> None:
    share = adam.param_groups[0]["params"][0]
    share.grad = reduce_scatter_gradients(weights)
    adam.step()
    gathered = share.new_empty(share.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(gathered, share.detach(), async_op=True).wait()
    nn.utils.vector_to_parameters(gathered[: sum(weight.numel() for weight in weights)], weights)
    adam.zero_grad()
