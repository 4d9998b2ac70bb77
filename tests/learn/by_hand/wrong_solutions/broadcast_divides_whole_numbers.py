"""broadcast_parameters: raised RuntimeError: result type Float can't be cast | Buffers may be whole numbers"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.all_reduce(tensor.detach())
        tensor.detach().div_(dist.get_world_size())
