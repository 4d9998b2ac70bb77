"""average_gradients: changes the weights themselves (layer.weight)"""

import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
            parameter.detach().sub_(0.1 * parameter.grad)
