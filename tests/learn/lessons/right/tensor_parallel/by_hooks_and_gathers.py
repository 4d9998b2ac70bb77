"""Without autograd functions: hooks on tensors, all-gathers instead of all-reduces, the bias added by one rank."""

import torch
import torch.distributed as dist
from torch import nn


def gathered_sum(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.stack(parts).sum(0)


def copy_to_ranks(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor * 1
    if copy.requires_grad:
        copy.register_hook(gathered_sum)
    return copy


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + (gathered_sum(tensor) - tensor.detach())


def parallel_feed_forward(inputs: torch.Tensor, up: nn.Linear, down: nn.Linear) -> torch.Tensor:
    size = up.out_features // dist.get_world_size()
    own = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    hidden = (copy_to_ranks(inputs) @ up.weight[own].T + up.bias[own]).clamp(min=0)
    output = hidden @ down.weight[:, own].T
    # The bias takes part in one summand, but its gradient must arrive on every rank.
    return sum_over_ranks(output + (down.bias if dist.get_rank() == 0 else down.bias - down.bias.detach()))
