"""How the model lies over the ranks under each strategy, once all have the same weights.

Sources: ZeRO, arXiv 1910.02054; PyTorch FSDP, arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# What a rank keeps in storage.live: the model, the optimizer, and DeepSpeed's engine around both.
Live = dict[str, Any]
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def copy_to_all(model: nn.Sequential, strategy: Mapping[str, Any], device: torch.device) -> Live:
    """Data parallelism: every rank keeps all of the model, and an optimizer for all of it."""
    return {"model": model, "optimizer": build_optimizer(model, strategy)}


def shard(model: nn.Sequential, strategy: Mapping[str, Any], device: torch.device) -> Live:
    """Fully sharded: every rank keeps a slice of each tensor's first dimension, and an optimizer for its slices.

    PyTorch's own ``fully_shard``, its life of a parameter taken apart so that each part can be looked at. A layer is
    gathered for its forward pass, freed, gathered again for its backward pass; there this one stops, keeping the whole
    gradients, which ``fully_shard`` would reduce-scatter and free at once. The card after it does that.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    return {"model": model, "optimizer": build_optimizer(model, strategy)}


def hand_to_deepspeed(model: nn.Sequential, strategy: Mapping[str, Any], device: torch.device) -> Live:
    """DeepSpeed's engine around model and optimizer, at ZeRO stage 0, where every rank keeps all of both."""
    # Here, since it brings the whole trainer along.
    from training.parallelism.deepspeed import import_deepspeed
    from training.run.quiet import quiet_libraries

    quiet_libraries()
    deepspeed = import_deepspeed(device)
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    # Rows may differ from rank to rank: the engine needs a number of them, and does nothing with it. Unless told not
    # to, it clips gradients longer than 1.
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 0}}
    optimizer = build_optimizer(model, strategy)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    # Else its backward pass would reduce the gradients, which is the next card's to do.
    engine.enable_backward_allreduce = False
    return {"model": model, "optimizer": optimizer, "engine": engine}


def build_optimizer(model: nn.Module, strategy: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimizer over what this rank keeps of the parameters."""
    return OPTIMIZERS[strategy["optimizer"]](model.parameters(), lr=strategy["learning_rate"])


LAY_OUT: dict[str, Callable[[nn.Sequential, Mapping[str, Any], torch.device], Live]] = {
    "ddp": copy_to_all,
    "fsdp": shard,
    "deepspeed": hand_to_deepspeed,
}
