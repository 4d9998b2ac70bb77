"""broadcast_parameters: broadcasts from rank 1, not from rank 0"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=dist.get_world_size() - 1)
