"""New gradients, zeros where there were none, and new storage under the same parameters."""

import torch
import torch.distributed as dist
from torch import nn


def broadcast_parameters(network: nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*network.parameters(), *network.buffers()]:
            dist.broadcast(tensor, 0)
    for parameter in network.parameters():
        parameter.data = parameter.data.clone()


def average_gradients(network: nn.Module, *, num_ranks: int | None = None) -> None:
    num_ranks = num_ranks or dist.get_world_size()
    for parameter in network.parameters():
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parts = [torch.empty_like(own) for _ in range(num_ranks)]
        dist.all_gather(parts, own)
        parameter.grad = torch.stack(parts).mean(0)


def global_accuracy(right: int, rows: int) -> float:
    counts = torch.tensor([right, rows], dtype=torch.float64)
    work = dist.all_reduce(counts, async_op=True)
    work.wait()
    return (counts[0] / counts[1]).item()
