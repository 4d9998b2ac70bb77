"""Layouts: every sensible way to lay a model over a number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt

from training.planning.hardware import Cluster
from training.planning.partition import SPLIT_SCHEDULES, STAGES_PER_RANK
from training.planning.shapes import ActivationCheckpointing, Layout, ModelShape, Precision, StrategyName

STRATEGIES: tuple[StrategyName, ...] = ("ddp", "zero1", "zero2", "zero3", "tp", "pp", "3d")
MODES: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
# The families that training/model/architectures.py takes apart; tensor and pipeline parallelism need that.
DIVISIBLE_FAMILIES = ("distilbert", "bert", "llama")
# The trainer pads to a multiple of this under sequence parallelism (training/parallelism/blocks.py).
LENGTH_MULTIPLE = 16


@dataclass(frozen=True)
class Work:
    """What is to be trained, whatever the layout.

    ``rows``: of a global batch. ``micro_batch``, ``activation_checkpointing``: None = whatever is fastest.
    """

    rows: int
    seq_len: int
    precision: Precision
    micro_batch: int | None = None
    activation_checkpointing: ActivationCheckpointing | None = None


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def degrees(shape: ModelShape, cluster: Cluster, strategy: StrategyName) -> Iterator[Layout]:
    """The layouts of a strategy over all GPUs, without a batch.

    Tensor-parallel ranks stay within a node and divide the heads; stages are at most the blocks. State is shared out
    over all data ranks, or over those of a node with a copy on each node (hybrid sharding). One GPU alone shares
    nothing out, which is ddp.
    """
    gpus = cluster.gpus
    if gpus == 1 and strategy != "ddp":
        return
    if strategy in ("ddp", "zero1"):
        yield Layout(strategy, dp_replicate=gpus)
        return
    if strategy in ("zero2", "zero3"):
        yield from _sharded(Layout(strategy), gpus, cluster)
        return
    if shape.family not in DIVISIBLE_FAMILIES:
        return
    for tp in _tensor_degrees(shape, cluster):
        for pp in divisors(gpus // tp):
            dp = gpus // tp // pp
            split = [tp > 1, pp > 1, dp > 1]
            if pp > shape.layers:
                continue
            if strategy == "tp" and tp > 1 and pp == 1:
                yield Layout(strategy, tp=tp, dp_replicate=dp)
            elif strategy == "pp" and pp > 1 and tp == 1:
                yield Layout(strategy, pp=pp, dp_replicate=dp)
            elif strategy == "3d" and sum(split) >= 2:
                yield from _sharded(Layout(strategy, tp=tp, pp=pp), dp, cluster)


def _sharded(layout: Layout, dp: int, cluster: Cluster) -> Iterator[Layout]:
    yield replace(layout, dp_shard=dp)
    within = cluster.gpus_per_node // layout.tp
    if 1 < within < dp and dp % within == 0:
        yield replace(layout, dp_shard=within, dp_replicate=dp // within)


def _tensor_degrees(shape: ModelShape, cluster: Cluster) -> list[int]:
    divided = (cluster.gpus_per_node, shape.heads, shape.kv_heads, shape.intermediate, cluster.gpus)
    return [tp for tp in divisors(cluster.gpus_per_node) if all(size % tp == 0 for size in divided)]


def with_batches(shape: ModelShape, layout: Layout, work: Work) -> Iterator[Layout]:
    """The layout with every micro-batch, checkpointing and schedule that fill the global batch exactly."""
    if work.rows % layout.dp:
        return
    rows = work.rows // layout.dp
    sizes = [size for size in divisors(rows) if work.micro_batch in (None, size)]
    modes = MODES if work.activation_checkpointing is None else (work.activation_checkpointing,)
    for size in sizes:
        for mode in modes:
            for sequence_parallel in {False, _cuts_sequence(layout.tp, work.seq_len)}:
                batch = replace(
                    layout,
                    micro_batch=size,
                    accumulation=rows // size,
                    seq_len=work.seq_len,
                    precision=work.precision,
                    activation_checkpointing=mode,
                    sequence_parallel=sequence_parallel,
                )
                yield from _with_schedules(shape, batch)


def _cuts_sequence(tp: int, seq_len: int) -> bool:
    return tp > 1 and seq_len % tp == 0 and LENGTH_MULTIPLE % tp == 0


def _with_schedules(shape: ModelShape, layout: Layout) -> Iterator[Layout]:
    if layout.pp == 1:
        yield layout
        return
    for schedule, stages_per_rank in STAGES_PER_RANK.items():
        if schedule in SPLIT_SCHEDULES and layout.activation_checkpointing != "none":
            continue  # selective is refused; full runs a block again for each matrix whose gradient is put off
        # torch's looped schedules want micro-batches in whole rounds of the pipeline.
        rounds = layout.accumulation % layout.pp == 0 or stages_per_rank == 1
        if layout.pp * stages_per_rank <= shape.layers and rounds and layout.accumulation >= layout.pp:
            yield replace(layout, schedule=schedule)
