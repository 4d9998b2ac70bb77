"""broadcast_parameters: there is no function broadcast_parameters in broadcast_is | arguments of exercise.py"""

import torch.distributed as dist
from torch import nn


def broadcast(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)
