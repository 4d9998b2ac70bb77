"""average_gradients: the ranks' collectives do not fit together | line 10: dist.all_reduce(parameter.grad)"""

import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and (name != "layer.weight" or dist.get_rank() > 0):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
