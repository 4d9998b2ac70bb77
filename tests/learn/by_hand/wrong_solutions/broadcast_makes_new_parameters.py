"""broadcast_parameters: layer.weight is a new object"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            received = parameter.detach().clone()
            dist.broadcast(received, src=0)
            setattr(module, name, nn.Parameter(received, requires_grad=parameter.requires_grad))
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
