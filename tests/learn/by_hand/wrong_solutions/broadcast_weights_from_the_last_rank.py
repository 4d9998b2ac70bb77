"""broadcast_parameters: broadcasts from rank 1, not from rank 0"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=dist.get_world_size() - 1)
