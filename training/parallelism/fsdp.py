"""FSDP2: weights, gradients and optimizer state sharded over the data-parallel ranks, block by
block.

ZeRO-3 (Rajbhandari et al., arXiv 1910.02054) gathers a block's weights for its forward pass and
again for its backward pass; ZeRO-2 keeps them gathered in between. On a two-dimensional mesh the
state is sharded along one dimension and replicated along the other (hybrid sharding; Zhao et al.,
"PyTorch FSDP", arXiv 2304.11277, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from training.model.classifier import to_fp32, to_fp32_outside
from training.model.precision import DTYPES

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def apply_fsdp(
    part: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool,
    precision: str = "fp32",
    cpu_offload: bool = False,
) -> None:
    """Shard the parameters of a model or a stage in place; build the optimizer afterwards.

    Args:
        blocks: each is gathered when its turn comes; parameters outside the blocks form one more
            group.
        mesh: (shard) or (replicate, shard).
        reshard_after_forward: free the gathered weights after the forward pass (ZeRO-3) or keep
            them (ZeRO-2).
        precision: in which weights are gathered and multiplied; gradients are summed in fp32,
            shards stay in fp32.
    """
    dtype = None if precision == "fp32" else DTYPES[precision]
    settings = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if cpu_offload
        else OffloadPolicy(),
    }
    to_fp32_outside(part, blocks)
    # PyTorch takes a half-precision input only if weights and running statistics are both in fp32.
    exact = settings | {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
    for module in part.modules():
        if isinstance(module, BATCH_NORMS):
            fully_shard(module, **exact)
    for block in blocks:
        to_fp32(block)  # one at a time: what is sharded already holds its share alone
        fully_shard(block, **settings)
    # Last, and so it takes what no block has taken: embeddings, head and whatever else is outside.
    fully_shard(part, **settings)


def set_gradient_sync(
    parts: Sequence[nn.Module], *, wanted: bool, between_copies_only: bool = False
) -> None:
    """Turn gradient communication on or off for the next backward passes; only a step's last
    micro-batch needs it.

    ``between_copies_only``: only skip the all-reduce between replicas, and keep reduce-scattering
    inside each.
    """
    for part in parts:
        if wanted or between_copies_only:
            part.set_requires_all_reduce(wanted)
        if not between_copies_only:
            part.set_requires_gradient_sync(wanted)
