"""broadcast_parameters: leaf Variable that requires grad | torch.no_grad()"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        received = tensor.detach().clone()
        dist.broadcast(received, src=0)
        tensor.copy_(received)
