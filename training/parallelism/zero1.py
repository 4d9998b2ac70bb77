"""ZeRO stage 1: DDP whose ranks share out the optimizer's state.

Each rank keeps the moments of its own parameters, updates those alone, and sends them to all
others. Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", arXiv 1910.02054, 5.1.
"""

from __future__ import annotations

import torch
from torch import nn

from training.model.optimizer import adamw_settings, make_moments, parameter_groups
from training.parallelism.ddp import DDPStrategy


class Zero1Strategy(DDPStrategy):
    """:class:`DDPStrategy` with about 1/N of the moments on each of N ranks, in whole parameters.

    A parameter belongs to one rank: none holds less than the moments of the largest one, the word
    embeddings.
    """

    def build_optimizer(self) -> torch.optim.Optimizer:
        if not self.ranks.is_distributed:
            return super().build_optimizer()
        # Imported here because it loads a dozen compiled optimizers that no other strategy needs.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        groups = parameter_groups(self.parts[0], self.parameters, self.config)
        # As views of one buffer per owner, the updated parameters are sent in one broadcast instead
        # of one for each.
        optimizer = ZeroRedundancyOptimizer(
            groups, torch.optim.AdamW, parameters_as_bucket_view=True, **adamw_settings(self.config)
        )
        make_moments(optimizer.optim)
        return optimizer

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.optim if self.ranks.is_distributed else self.optimizer

    @property
    def local_parameters(self) -> dict[str, nn.Parameter]:
        local = {
            parameter
            for group in self.local_optimizer.param_groups
            for parameter in group["params"]
        }
        return {
            name: parameter for name, parameter in self.parameters.items() if parameter in local
        }

    def describe(self) -> str:
        return f"{super().describe()}, with the optimizer's state sharded"
