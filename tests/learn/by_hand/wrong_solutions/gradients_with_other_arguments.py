"""average_gradients: it takes (model, num_ranks), and is called as average_gradients(model)"""

import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module, num_ranks: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= num_ranks
