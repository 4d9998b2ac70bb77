"""broadcast_parameters: layer.weight is a new object"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            dist.broadcast(parameter.detach(), src=0)
            if dist.get_rank() > 0:
                setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad))
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
