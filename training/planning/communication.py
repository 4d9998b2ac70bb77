"""Communication: bytes, calls and seconds of a step's collectives.

Each call costs latency and bytes over bandwidth (alpha-beta; Hockney 1994, and Thakur, Rabenseifner & Gropp,
"Optimization of Collective Communication Operations in MPICH", 2005, for the algorithms). Latency is counted as NCCL
counts it (``src/graph/tuning.cc`` of its commit 5067397c26): a chunk goes from GPU to GPU through the whole ring, so
every GPU of every node adds a hop. NCCL lays several such rings, one per network port, and each carries a share of the
bytes out of the node; so together they have the bandwidth of all ports.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from training.planning.hardware import Cluster
from training.planning.memory import is_gathered, keeps_gathered
from training.planning.partition import STAGES_PER_RANK, Stage, outer_parameters, rank_parameters
from training.planning.shapes import Layout, ModelShape, Transfer

DDP_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: ``size`` of them, ``members`` on each of ``nodes`` nodes."""

    size: int
    members: int
    cluster: Cluster

    @classmethod
    def over(cls, size: int, stride: int, cluster: Cluster) -> Group:
        """The group of a mesh dimension whose neighbours are ``stride`` ranks apart."""
        return cls(size, max(1, min(size, cluster.gpus_per_node // stride)), cluster)

    @property
    def nodes(self) -> int:
        """Nodes that it spans."""
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
        """Seconds that a chunk takes from the first rank of the ring to the last: size - 1 hops, nodes - 1 of them
        over the network."""
        return (self.size - self.nodes) * self.cluster.link_latency + (self.nodes - 1) * self.cluster.network_latency

    def ring_seconds(self, whole: float) -> float:
        """An all-gather or reduce-scatter of ``whole`` bytes in all: (n-1) steps of a part each."""
        if self.size == 1:
            return 0.0
        return self.latency + whole * (self.size - 1) / self.size / self.bandwidth

    def all_reduce_seconds(self, whole: float) -> float:
        """An all-reduce: a ring, or NCCL's tree if that is sooner, as it is for small messages over many nodes.

        The tree joins the nodes; inside each node it is a chain. NCCL runs two trees, each with half of the bytes, in
        which the leaves of one are the inner nodes of the other, so it has the full bandwidth.
        """
        if self.size == 1:
            return 0.0
        hops = (self.members - 1) * self.cluster.link_latency + log2(self.nodes) * self.cluster.network_latency
        tree = 2 * (hops + whole / self.bandwidth)
        return min(2 * self.ring_seconds(whole), tree)

    def send_seconds(self, whole: float) -> float:
        """One message of ``whole`` bytes to the next member, over the slowest hop there is."""
        gpu = self.cluster.gpu
        if self.nodes == 1:
            return self.cluster.link_latency + whole / (gpu.link_bandwidth * self.cluster.calibration.link_share)
        return self.cluster.network_latency + whole / (gpu.network_bandwidth * self.cluster.calibration.network_share)

    def sent(self, collective: str, whole: float) -> float:
        """Bytes that one member sends in one call."""
        if collective == "send":
            return whole
        return whole * (self.size - 1) / self.size * (2 if collective == "all-reduce" else 1)


def groups(layout: Layout, cluster: Cluster) -> dict[str, Group]:
    """The group of each mesh dimension; tensor-parallel ranks are neighbours, stages lie farthest apart."""
    replicate_stride = layout.tp * layout.dp_shard
    return {
        "tp": Group.over(layout.tp, 1, cluster),
        "dp_shard": Group.over(layout.dp_shard, layout.tp, cluster),
        "dp_replicate": Group.over(layout.dp_replicate, replicate_stride, cluster),
        "dp": Group.over(layout.dp, layout.tp, cluster),
        "pp": Group.over(layout.pp, layout.tp * layout.dp, cluster),
    }


def transfers(shape: ModelShape, layout: Layout, stage: Stage, cluster: Cluster) -> list[Transfer]:
    """Every collective of one optimizer step on a rank of ``stage``, but the scalars of the gradient norm."""
    found = [
        *_data_parallel(shape, layout, stage, cluster),
        *_tensor_parallel(shape, layout, stage, cluster),
        *_pipeline(shape, layout, stage, cluster),
    ]
    return [transfer for transfer in found if transfer.calls and transfer.bytes]


def _transfer(collective: str, dimension: str, group: Group, calls: float, whole: float) -> Transfer:
    """``calls`` calls that move ``whole`` bytes in all."""
    if group.size == 1 or not calls:
        return Transfer(collective, dimension, 0, 0.0, 0.0, 0.0)
    each = {"all-reduce": group.all_reduce_seconds, "send": group.send_seconds}.get(collective, group.ring_seconds)
    sent = group.sent(collective, whole)
    between = sent / group.members if group.nodes > 1 else 0.0
    return Transfer(collective, dimension, ceil(calls), sent, between, calls * each(whole / calls))


def _data_parallel(shape: ModelShape, layout: Layout, stage: Stage, cluster: Cluster) -> list[Transfer]:
    parameters = rank_parameters(shape, layout, stage)
    group = groups(layout, cluster)
    if not is_gathered(layout):
        buckets = ceil(4 * parameters / DDP_BUCKET_BYTES)
        reduced = _transfer("all-reduce", "dp", group["dp"], buckets, 4 * parameters)
        if layout.strategy != "zero1":
            return [reduced]
        return [reduced, _transfer("broadcast", "dp", group["dp"], layout.dp, 4 * parameters)]
    units = stage.blocks + 1
    outer = outer_parameters(shape, stage, layout.tp)
    width = 4 if layout.precision == "fp32" else 2
    gathered = width * parameters
    if not keeps_gathered(layout):
        gathered += width * (parameters - outer)  # the blocks again, for the backward pass
    rounds = 1 if layout.pp > 1 else layout.accumulation
    calls = rounds * (units if keeps_gathered(layout) else 2 * units - 1)
    return [
        _transfer("all-gather", "dp_shard", group["dp_shard"], calls, rounds * gathered),
        _transfer("reduce-scatter", "dp_shard", group["dp_shard"], rounds * units, rounds * 4 * parameters),
        _transfer("all-reduce", "dp_replicate", group["dp_replicate"], units, 4 * parameters / layout.dp_shard),
    ]


def _tensor_parallel(shape: ModelShape, layout: Layout, stage: Stage, cluster: Cluster) -> list[Transfer]:
    """Two all-reduces a block forward and two backward; one for the embeddings, one for a language model's head.

    Source: Megatron-LM, arXiv 1909.08053, section 3; under sequence parallelism each is an all-gather and a
    reduce-scatter of the same bytes, arXiv 2205.05198, section 4.2.2. Checkpointing of either kind repeats those of
    the forward pass, since none is kept, but for the last sum where no norm comes behind it.
    """
    group = groups(layout, cluster)["tp"]
    gathers = sums = 4
    if layout.activation_checkpointing != "none":
        gathers, sums = 6, 6 if shape.norm_after else 5
    outside = stage.first + (stage.last and shape.num_labels is None)

    def calls(collective: str, of_block: int) -> Transfer:
        count = layout.accumulation * (of_block * stage.blocks + outside)
        return _transfer(collective, "tp", group, count, count * _hidden_bytes(shape, layout))

    if not layout.sequence_parallel:
        return [calls("all-reduce", sums)]
    return [calls("all-gather", gathers), calls("reduce-scatter", sums)]


def _pipeline(shape: ModelShape, layout: Layout, stage: Stage, cluster: Cluster) -> list[Transfer]:
    """Activations to the next stage and their gradients back, for each micro-batch and each stage of a rank."""
    group = groups(layout, cluster)["pp"]
    chunks = STAGES_PER_RANK[layout.schedule]
    # A rank with one stage sends twice a micro-batch but at the ends of the pipeline; in a loop there are no ends.
    sends = 2 * chunks if chunks > 1 else 2 - stage.first - stage.last
    calls = layout.accumulation * sends
    fp32 = 4 * layout.micro_batch * layout.seq_len * shape.hidden / (layout.tp if layout.sequence_parallel else 1)
    return [_transfer("send", "pp", group, calls, calls * fp32)]


def _hidden_bytes(shape: ModelShape, layout: Layout) -> float:
    """The activations of one micro-batch between two blocks, in the computing dtype."""
    width = 4 if layout.precision == "fp32" else 2
    return width * layout.micro_batch * layout.seq_len * shape.hidden
