"""broadcast_parameters: forgot the buffers"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)
