"""broadcast_parameters: hangs | rank 0 stands at line 10: dist.broadcast | rank 1 has returned"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    if dist.get_rank() == 0:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
