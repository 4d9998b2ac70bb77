"""average_gradients: raised NameError: name 'paramter' is not defined | line 9: dist.all_reduce(paramter.grad)"""

import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(paramter.grad)  # noqa: F821
        parameter.grad /= dist.get_world_size()
