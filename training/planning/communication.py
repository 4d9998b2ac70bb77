"""Bytes, calls and seconds of a step's collectives.

Each call costs latency plus bytes over bandwidth (the alpha-beta model: Hockney 1994; Thakur,
Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, for the
algorithms). Latency is counted as NCCL counts it (``src/graph/tuning.cc`` of its commit
5067397c26): a chunk goes from GPU to GPU through the whole ring, so every GPU of every node adds a
hop. NCCL lays several such rings, one per network port, and each carries a share of the bytes out
of the node, so together they have the bandwidth of all ports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2

from training.planning.hardware import Cluster
from training.planning.layouts import (
    STAGES_PER_RANK,
    Layout,
    Stage,
    outer_parameters,
    rank_parameters,
)
from training.planning.models import ModelShape

DDP_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Transfer:
    """All calls of one kind of collective in a step, as one rank sees them."""

    collective: str
    dimension: str  # of the mesh
    calls: int
    bytes: float  # what this rank sends
    between_nodes: float  # the part of them that leaves the node
    seconds: float  # for all calls


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: ``size`` of them, ``members`` on each node."""

    size: int
    members: int
    cluster: Cluster

    @classmethod
    def over(cls, size: int, stride: int, cluster: Cluster) -> Group:
        """The group of a mesh dimension whose neighbours are ``stride`` ranks apart."""
        return cls(size, max(1, min(size, cluster.gpus_per_node // stride)), cluster)

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.members)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that each member moves along the ring."""
        gpu = self.cluster.gpu
        link = gpu.link_bandwidth * self.cluster.calibration.link_share
        if self.nodes == 1:
            return link
        network = self.members * gpu.network_bandwidth * self.cluster.calibration.network_share
        return network if self.members == 1 else min(link, network)

    @property
    def latency(self) -> float:
        """Seconds that a chunk takes from the first rank of the ring to the last: size - 1 hops."""
        within = (self.size - self.nodes) * self.cluster.link_latency
        return within + (self.nodes - 1) * self.cluster.network_latency

    def ring_seconds(self, whole: float) -> float:
        """An all-gather or reduce-scatter of ``whole`` bytes in total, in size - 1 steps of a part
        each.
        """
        if self.size == 1:
            return 0.0
        return self.latency + whole * (self.size - 1) / self.size / self.bandwidth

    def all_reduce_seconds(self, whole: float) -> float:
        """An all-reduce by a ring, or by NCCL's tree if that is faster (small messages over many
        nodes).
        """
        if self.size == 1:
            return 0.0
        # The tree joins the nodes; inside each node it is a chain. NCCL runs two trees, each with
        # half of the bytes. The leaves of one are the inner nodes of the other, so together they
        # have the full bandwidth.
        within = (self.members - 1) * self.cluster.link_latency
        hops = within + log2(self.nodes) * self.cluster.network_latency
        tree = 2 * (hops + whole / self.bandwidth)
        return min(2 * self.ring_seconds(whole), tree)

    def send_seconds(self, whole: float) -> float:
        """One message of ``whole`` bytes to the next member, over the slowest hop of the group."""
        gpu, calibration = self.cluster.gpu, self.cluster.calibration
        if self.nodes == 1:
            return self.cluster.link_latency + whole / (gpu.link_bandwidth * calibration.link_share)
        bandwidth = gpu.network_bandwidth * calibration.network_share
        return self.cluster.network_latency + whole / bandwidth

    def transfer(self, collective: str, dimension: str, calls: float, whole: float) -> Transfer:
        """``calls`` calls that move ``whole`` bytes in total."""
        if self.size == 1 or not calls:
            return Transfer(collective, dimension, 0, 0.0, 0.0, 0.0)
        seconds_of_call = {"all-reduce": self.all_reduce_seconds, "send": self.send_seconds}
        seconds = calls * seconds_of_call.get(collective, self.ring_seconds)(whole / calls)
        sent = whole
        if collective != "send":
            sent *= (self.size - 1) / self.size * (2 if collective == "all-reduce" else 1)
        between_nodes = sent / self.members if self.nodes > 1 else 0.0
        return Transfer(collective, dimension, ceil(calls), sent, between_nodes, seconds)


def groups(layout: Layout, cluster: Cluster) -> dict[str, Group]:
    """The group of each mesh dimension: tensor-parallel ranks are neighbours, stages are the
    farthest apart.
    """
    return {
        "tp": Group.over(layout.tp, 1, cluster),
        "dp_shard": Group.over(layout.dp_shard, layout.tp, cluster),
        "dp_replicate": Group.over(layout.dp_replicate, layout.tp * layout.dp_shard, cluster),
        "dp": Group.over(layout.dp, layout.tp, cluster),
        "pp": Group.over(layout.pp, layout.tp * layout.dp, cluster),
    }


def transfers(shape: ModelShape, layout: Layout, stage: Stage, cluster: Cluster) -> list[Transfer]:
    """Every collective of one optimizer step on a rank of ``stage``, without the scalars of the
    gradient norm.
    """
    group = groups(layout, cluster)
    data_parallel = _fsdp if layout.is_fsdp else _ddp
    found = [
        *data_parallel(shape, layout, stage, group),
        *_tensor_parallel(shape, layout, stage, group["tp"]),
        _pipeline(shape, layout, stage, group["pp"]),
    ]
    return [transfer for transfer in found if transfer.calls and transfer.bytes]


def _ddp(
    shape: ModelShape, layout: Layout, stage: Stage, group: dict[str, Group]
) -> Iterator[Transfer]:
    parameters = rank_parameters(shape, layout, stage)
    buckets = ceil(4 * parameters / DDP_BUCKET_BYTES)
    yield group["dp"].transfer("all-reduce", "dp", buckets, 4 * parameters)
    if layout.strategy == "zero1":  # each rank has updated its share of the weights
        yield group["dp"].transfer("broadcast", "dp", layout.dp, 4 * parameters)


def _fsdp(
    shape: ModelShape, layout: Layout, stage: Stage, group: dict[str, Group]
) -> Iterator[Transfer]:
    parameters = rank_parameters(shape, layout, stage)
    units = stage.blocks + 1  # what is gathered at once: a block, or all that is outside the blocks
    gathered, gathers = layout.width * parameters, units
    if not layout.keeps_gathered:  # the blocks a second time, for the backward pass
        gathered += layout.width * (parameters - outer_parameters(shape, stage, layout.tp))
        gathers += units - 1
    # A pipeline gathers and scatters once per step, others for each micro-batch.
    rounds = 1 if layout.pp > 1 else layout.accumulation
    shard, replicate = group["dp_shard"], group["dp_replicate"]
    yield shard.transfer("all-gather", "dp_shard", rounds * gathers, rounds * gathered)
    yield shard.transfer("reduce-scatter", "dp_shard", rounds * units, rounds * 4 * parameters)
    # Between replicas only the shards, and only once the gradients are complete.
    shards = 4 * parameters / layout.dp_shard
    yield replicate.transfer("all-reduce", "dp_replicate", units, shards)


def _tensor_parallel(
    shape: ModelShape, layout: Layout, stage: Stage, group: Group
) -> Iterator[Transfer]:
    # Two all-reduces per block forward and two backward, one for the embeddings and one for a
    # language model's head (Megatron-LM, arXiv 1909.08053, section 3). Under sequence parallelism
    # each is an all-gather and a reduce-scatter of the same bytes (arXiv 2205.05198, section
    # 4.2.2). Checkpointing repeats the collectives of the forward pass; only the last sum of a
    # block is not repeated, unless a norm follows it.
    gathers = sums = 4
    if layout.activation_checkpointing != "none":
        gathers, sums = 6, 6 if shape.traits.norm_after else 5
    outside = stage.first + (stage.last and shape.num_labels is None)
    of_blocks = {"all-reduce": sums}
    if layout.sequence_parallel:
        of_blocks = {"all-gather": gathers, "reduce-scatter": sums}
    for collective, per_block in of_blocks.items():
        calls = layout.accumulation * (per_block * stage.blocks + outside)
        sent = calls * layout.width * _values_between_blocks(shape, layout)
        yield group.transfer(collective, "tp", calls, sent)


def _pipeline(shape: ModelShape, layout: Layout, stage: Stage, group: Group) -> Transfer:
    # Activations to the next stage and gradients back, in fp32. A rank with one stage sends twice
    # per micro-batch, except at the ends of the pipeline; a loop over several stages per rank has
    # no ends.
    stages_per_rank = STAGES_PER_RANK[layout.schedule]
    sends = 2 * stages_per_rank if stages_per_rank > 1 else 2 - stage.first - stage.last
    calls = layout.accumulation * sends
    parts = layout.tp if layout.sequence_parallel else 1
    sent = 4 * _values_between_blocks(shape, layout) / parts
    return group.transfer("send", "pp", calls, calls * sent)


def _values_between_blocks(shape: ModelShape, layout: Layout) -> int:
    """Of one micro-batch: (rows, tokens, hidden)."""
    return layout.micro_batch * layout.seq_len * shape.hidden
