"""broadcast_parameters: norm.table is not broadcast | state_dict()"""

import torch.distributed as dist
from torch import nn


def broadcast_parameters(model: nn.Module) -> None:
    states = [model.state_dict()]
    dist.broadcast_object_list(states, src=0)
    model.load_state_dict(states[0])
