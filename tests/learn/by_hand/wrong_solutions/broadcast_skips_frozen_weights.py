"""broadcast_parameters: only some of the model is broadcast, frozen.weight not"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.detach(), src=0)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
