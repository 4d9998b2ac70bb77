"""average_gradients: hangs | rank 0 stands at line 7: while any"""

from torch import nn


def average_gradients(model: nn.Module) -> None:
    while any(parameter.requires_grad for parameter in model.parameters()):
        pass
