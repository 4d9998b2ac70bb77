"""ZeRO stage 1: DDP whose ranks share out the optimizer's state.

Each rank keeps the moments of its own parameters, updates those alone, and sends them to all others. Source:
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054, 5.1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from training.model.optimizer import build_optimizer, parameter_groups
from training.parallelism.ddp import DDPStrategy


class Zero1Strategy(DDPStrategy):
    """:class:`DDPStrategy` with about 1/N of the moments on each of N ranks, in whole parameters.

    A parameter belongs to one rank: none holds less than the moments of the largest one, the word embeddings.
    """

    def build_optimizer(self) -> torch.optim.Optimizer:
        """AdamW over all parameters, whose state each rank holds for its own; ``own_optimizer`` is that part."""
        if not self.ranks.is_distributed:
            self.own_optimizer = build_optimizer(self.parameters.values(), self.config.weight_decay)
            return self.own_optimizer
        # Here, since it imports a dozen compiled optimizers that no other strategy needs.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        groups = parameter_groups(self.parameters.values(), self.config.weight_decay)
        # As views of one buffer per owner, the updated parameters are sent in one broadcast instead of one for each.
        shared_out = ZeroRedundancyOptimizer(
            groups, torch.optim.AdamW, parameters_as_bucket_view=True, lr=0.0, fused=True
        )
        self.own_optimizer = shared_out.optim
        return shared_out

    @property
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank updates."""
        own = {parameter for group in self.own_optimizer.param_groups for parameter in group["params"]}
        return {name: parameter for name, parameter in self.parameters.items() if parameter in own}

    def describe(self) -> str:
        """How many copies, and of what not."""
        return f"{super().describe()}, the optimizer's state shared out"

    def own_moments(self) -> tuple[Mapping[str, nn.Parameter], torch.optim.Optimizer]:
        """Those of this rank's own parameters."""
        return self.own_parameters, self.own_optimizer
