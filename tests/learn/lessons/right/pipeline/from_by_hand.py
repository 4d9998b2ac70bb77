"""The order and the stage by hand."""

from collections.abc import Sequence

import torch
from torch import nn

from learn.by_hand.pipeline import Stage, one_forward_one_backward  # noqa: F401


def run_stage(
    module: nn.Module, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], order: Sequence[tuple[str, int]]
) -> None:
    Stage(module, inputs, targets).run(order)
