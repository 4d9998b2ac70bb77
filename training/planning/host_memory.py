"""Host memory: bytes that a run needs in the fullest machine's own memory, beside its GPUs'."""

from __future__ import annotations

from dataclasses import dataclass

from training.planning.hardware import Cluster
from training.planning.shapes import ModelShape

WEIGHT_BYTES = 4  # fp32
STATE_BYTES = 12  # a weight and its two moments, fp32


@dataclass(frozen=True)
class HostMemory:
    """Bytes per machine, without what Python and CUDA take.

    ``loading``: the model's file, mapped once for all ranks of the machine, and the block that each of them is making
    fp32 of. ``saving``: the copies that are written while training goes on, and on the machine of rank 0 the finished
    model.
    """

    loading: float
    saving: float


def estimate_host_memory(shape: ModelShape, cluster: Cluster) -> HostMemory:
    """The most that any layout of the cluster's GPUs needs; the file counts as fp32, and half of it in fp16."""
    parameters = shape.num_parameters
    largest = max(shape.block_parameters, shape.embedding_parameters)
    return HostMemory(
        loading=WEIGHT_BYTES * (parameters + cluster.gpus_per_node * largest),
        saving=STATE_BYTES * parameters / cluster.nodes + WEIGHT_BYTES * parameters,
    )
