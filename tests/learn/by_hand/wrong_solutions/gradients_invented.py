"""average_gradients: frozen.weight took no part in the loss and has a gradient now"""

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        gradient = torch.ones_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradient)
        parameter.grad = gradient / dist.get_world_size()
