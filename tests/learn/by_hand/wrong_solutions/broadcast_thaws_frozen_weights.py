"""broadcast_parameters: requires_grad of frozen.weight has changed"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
