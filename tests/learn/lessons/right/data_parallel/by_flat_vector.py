"""Whole models and all gradients in one call each."""

import torch
import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    tensors = [tensor.detach() for tensor in [*model.parameters(), *model.buffers()]]
    flat = torch.cat([tensor.flatten().double() for tensor in tensors])
    dist.broadcast(flat, src=0)
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))


def average_gradients(model: nn.Module) -> None:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def global_accuracy(correct: int, total: int) -> float:
    counts = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(counts, (correct, total))
    return sum(right for right, _ in counts) / sum(rows for _, rows in counts)
