"""A moving average of the weights (``--ema``), which is often better than the weights of any single
step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor


class WeightAverage:
    """An exponential moving average of what this rank trains: whole weights, or its shards of them.

    The running statistics of BatchNorm are averaged with them, since they belong to the weights.
    Source: Tarvainen & Valpola, "Mean teachers", arXiv 1703.01780. ``tensors`` has a tensor
    ``average/NAME`` for each, placed as it is, which starts as a copy of it. ``decay``: what
    remains of the average after a step.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], decay: float) -> None:
        self.decay = decay
        self.parameters = parameters
        self.tensors = {
            f"average/{name}": value.detach().clone() for name, value in parameters.items()
        }

    @torch.no_grad()
    def update(self, step: int, updated: torch.Tensor) -> None:
        """Move towards the weights after optimizer step ``step``, unless the step was skipped.

        ``updated``: whether it was not, bool (), on the device of the gradients, so that the host
        need not wait.
        """
        # In the first steps a shorter memory, or the average would long be that of the weights
        # before training.
        decay = min(self.decay, (1 + step) / (10 + step))
        averages, weights = _local(self.tensors), _local(self.parameters)
        share = (updated * (1 - decay)).to(averages[0].device)  # ()
        torch._foreach_lerp_(averages, weights, [share] * len(averages))

    @torch.no_grad()
    def swap(self, model: Mapping[str, torch.Tensor]) -> None:
        """Exchange the average with the weights, ``model/NAME``; a second call undoes the first,
        bit by bit.
        """
        for name, average in self.tensors.items():
            weight = model[name.replace("average/", "model/", 1)]
            # Copied in place: the optimizer, DDP's buckets and FSDP's shards keep their tensors.
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)


def _local(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        for tensor in tensors.values()
    ]
