"""average_gradients: the process of rank 0 ended during the call"""

import os

import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None and dist.get_rank() == 0:
            os._exit(0)
        dist.barrier()
