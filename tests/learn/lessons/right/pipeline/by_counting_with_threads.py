"""The order by counting what is on its way; gradients by torch.autograd.grad, and sends from a thread of their own."""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn


def one_forward_one_backward(rank: int, num_ranks: int, total: int) -> list[tuple[str, int]]:
    order, begun, ended = [], 0, 0
    while ended < total:
        if begun < total and begun - ended < num_ranks - rank:
            order.append(("F", begun))
            begun += 1
        else:
            order.append(("B", ended))
            ended += 1
    return order


def run_stage(
    stage: nn.Module, batches: list[torch.Tensor], labels: list[torch.Tensor], order: list[tuple[str, int]]
) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    weights, graphs = list(stage.parameters()), {}
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    # One thread per receiver: messages to one rank stay in order.
    with ThreadPoolExecutor(1) as forward, ThreadPoolExecutor(1) as backward:
        for kind, i in order:
            if kind == "F":
                x = torch.empty_like(batches[i])
                if rank == 0:
                    x = batches[i]
                else:
                    dist.recv(x, rank - 1)
                x = x.detach().requires_grad_(rank > 0)
                y = stage(x)
                graphs[i] = x, y
                if rank < last:
                    forward.submit(dist.send, y.detach(), rank + 1)
                continue
            x, y = graphs.pop(i)
            if rank == last:
                gradient = 2 * (y.detach() - labels[i]) / y.numel() / len(labels)
            else:
                gradient = torch.empty_like(y)
                dist.recv(gradient, rank + 1)
            *found, of_x = torch.autograd.grad(y, [*weights, x] if rank else [*weights, weights[0]], gradient)
            for weight, part in zip(weights, found, strict=True):
                weight.grad += part
            if rank > 0:
                backward.submit(dist.send, of_x, rank - 1)
