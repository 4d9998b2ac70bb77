"""broadcast_parameters: each rank keeps its own weights"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.detach().clone(), src=0)
