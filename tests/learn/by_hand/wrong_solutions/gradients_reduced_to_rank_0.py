"""average_gradients: only rank 0 has the mean"""

import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.reduce(parameter.grad, dst=0)
            if dist.get_rank() == 0:
                parameter.grad /= dist.get_world_size()
