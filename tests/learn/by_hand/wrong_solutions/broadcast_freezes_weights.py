"""broadcast_parameters: requires_grad of layer.weight has changed"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.requires_grad_(False), src=0)
