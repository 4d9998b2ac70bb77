"""broadcast_parameters: averages the ranks' weights"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.detach())
        parameter.detach().div_(dist.get_world_size())
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
