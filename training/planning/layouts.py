"""Every sensible way to lay a model over a number of GPUs, and what each pipeline rank then holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import isqrt

from training.facts import STRATEGY_FACTS, WHOLE_MODEL
from training.planning.hardware import Cluster, Precision
from training.planning.models import ModelShape

STRATEGIES = tuple(name for name, facts in STRATEGY_FACTS.items() if not facts.is_deepspeed)
CHECKPOINTING_MODES = ("none", "selective", "full")
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2, "zbv": 2}
# These compute the gradients of inputs and of weights in two passes.
SPLIT_SCHEDULES = ("zero_bubble", "zbv")
# The trainer pads to a multiple of this under sequence parallelism
# (training/parallelism/blocks.py).
LENGTH_MULTIPLE = 16


@dataclass(frozen=True)
class Layout:
    """How a model is laid over ranks, and the batch that each of them works on."""

    strategy: str
    # The degrees; their product is the number of ranks.
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    micro_batch: int = 1  # rows
    accumulation: int = 1  # micro-batches per optimizer step, those of a pipeline too
    seq_len: int = 2048
    precision: Precision = "bf16"
    activation_checkpointing: str = "none"
    sequence_parallel: bool = False
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch * self.accumulation * self.dp * self.seq_len

    @property
    def width(self) -> int:
        """Bytes of a value in the computing dtype."""
        return 4 if self.precision == "fp32" else 2

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 runs the data-parallel dimension and gathers weights in the computing
        dtype.
        """
        return not STRATEGY_FACTS[self.strategy].copies and self.dp > 1

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered weights stay from the forward to the backward pass."""
        return self.is_fsdp and (self.strategy == "zero2" or self.pp > 1)

    @property
    def name(self) -> str:
        """The strategy and the degrees above 1, such as "3d (shard 4 x tp 2)"."""
        degrees = {"pp": self.pp, "replicate": self.dp_replicate}
        degrees |= {"shard": self.dp_shard, "tp": self.tp}
        parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        return f"{self.strategy} ({' x '.join(parts)})" if parts else self.strategy

    @property
    def full_name(self) -> str:
        """The layout and how it runs its batch."""
        extras = [f"{self.micro_batch} x {self.accumulation}"]
        if self.pp > 1:
            extras.append(self.schedule)
        if self.sequence_parallel:
            extras.append("sequence parallel")
        if self.activation_checkpointing != "none":
            extras.append(f"{self.activation_checkpointing} checkpointing")
        return f"{self.name}, {', '.join(extras)}"


@dataclass(frozen=True)
class Work:
    """What is to be trained, whatever the layout."""

    rows: int  # of a global batch
    seq_len: int
    precision: Precision
    micro_batch: int | None = None  # None: whichever is fastest
    activation_checkpointing: str | None = None


def divisors(number: int) -> list[int]:
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def layouts_of(shape: ModelShape, cluster: Cluster, strategy: str) -> Iterator[Layout]:
    """The layouts of a strategy over all GPUs, without a batch."""
    gpus = cluster.gpus
    if gpus == 1 and strategy != "ddp":  # a single GPU has nothing to shard
        return
    if STRATEGY_FACTS[strategy].copies:
        yield Layout(strategy, dp_replicate=gpus)
    elif strategy in WHOLE_MODEL:
        yield from _sharded(Layout(strategy), gpus, cluster)
    elif shape.can_be_split:
        yield from _split(strategy, shape, cluster)


def _split(strategy: str, shape: ModelShape, cluster: Cluster) -> Iterator[Layout]:
    facts = STRATEGY_FACTS[strategy]
    for tp, pp in _degrees(shape, cluster):
        dp = cluster.gpus // tp // pp
        if facts.shards:
            # With a single degree above 1 it would be one of the simpler strategies.
            if (tp > 1) + (pp > 1) + (dp > 1) >= 2:
                yield from _sharded(Layout(strategy, tp=tp, pp=pp), dp, cluster)
        elif (tp > 1, pp > 1) == (facts.tensor, facts.pipeline):
            yield Layout(strategy, tp=tp, pp=pp, dp_replicate=dp)


def _degrees(shape: ModelShape, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Numbers of tensor-parallel ranks and of pipeline ranks that this model can be split over."""
    # Tensor-parallel ranks stay within a node and divide the heads.
    to_divide = (shape.heads, shape.kv_heads, shape.intermediate, cluster.gpus)
    for tp in divisors(cluster.gpus_per_node):
        if all(size % tp == 0 for size in to_divide):
            yield from ((tp, pp) for pp in divisors(cluster.gpus // tp) if pp <= shape.layers)


def _sharded(layout: Layout, dp: int, cluster: Cluster) -> Iterator[Layout]:
    """State sharded over all data ranks, or over those of a node with a replica on each node
    (hybrid sharding).
    """
    yield replace(layout, dp_shard=dp)
    within = cluster.gpus_per_node // layout.tp
    if 1 < within < dp and dp % within == 0:
        yield replace(layout, dp_shard=within, dp_replicate=dp // within)


def with_batches(shape: ModelShape, layout: Layout, work: Work) -> Iterator[Layout]:
    if work.rows % layout.dp:
        return
    # Every micro-batch, checkpointing mode and schedule that fill the global batch exactly.
    rows, tp = work.rows // layout.dp, layout.tp
    can_cut_sequence = tp > 1 and work.seq_len % tp == 0 and LENGTH_MULTIPLE % tp == 0
    sizes = [size for size in divisors(rows) if work.micro_batch in (None, size)]
    asked = work.activation_checkpointing
    modes = CHECKPOINTING_MODES if asked is None else (asked,)
    for size, mode, sequence_parallel in product(sizes, modes, sorted({False, can_cut_sequence})):
        batch = replace(
            layout,
            micro_batch=size,
            accumulation=rows // size,
            seq_len=work.seq_len,
            precision=work.precision,
            activation_checkpointing=mode,
            sequence_parallel=sequence_parallel,
        )
        yield from [batch] if layout.pp == 1 else _with_schedules(shape, batch)


def _with_schedules(shape: ModelShape, layout: Layout) -> Iterator[Layout]:
    for schedule, stages_per_rank in STAGES_PER_RANK.items():
        # The trainer refuses selective checkpointing here; full would recompute a block once per
        # deferred gradient.
        if schedule in SPLIT_SCHEDULES and layout.activation_checkpointing != "none":
            continue
        # PyTorch's looped schedules want the micro-batches in whole rounds of the pipeline.
        fills_rounds = layout.accumulation % layout.pp == 0 or stages_per_rank == 1
        if (
            layout.pp * stages_per_rank <= shape.layers
            and fills_rounds
            and layout.accumulation >= layout.pp
        ):
            yield replace(layout, schedule=schedule)


@dataclass(frozen=True)
class Stage:
    """A pipeline stage, or all stages of a rank; ``first`` holds the embeddings, ``last`` the head."""

    index: int
    blocks: int
    first: bool
    last: bool


@cache
def stages(shape: ModelShape, count: int) -> tuple[Stage, ...]:
    """Cut the blocks into ``count`` stages so that the slowest takes as little time as whole blocks
    allow.
    """
    if count == 1:
        return (Stage(0, shape.layers, first=True, last=True),)
    # A language model's head costs the last stage about as much as several blocks, so it gets fewer
    # of them.
    seq_len = 1024  # the ratios to a block hardly depend on it
    language_head = 0.0
    if shape.num_labels is None:
        language_head = shape.head_flops(seq_len) / shape.block_flops(seq_len)
    # A last block that reads one token computes its keys and values only, as
    # training/model/architectures.py counts.
    last_block = 1 / 6 if shape.reads_first_token_only else 1.0

    # When blocks do not divide evenly the later stages get one more, as in
    # training/parallelism/stages.py.
    def cut(of_last: int) -> tuple[int, ...]:
        share, more = divmod(shape.layers - of_last, count - 1)
        return (*(share + (index >= count - 1 - more) for index in range(count - 1)), of_last)

    def costs(counts: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        found = [*counts[:-1], counts[-1] - 1 + last_block + language_head]
        return max(found), sum(cost * cost for cost in found), counts

    counts = min((cut(of_last) for of_last in range(1, shape.layers - count + 2)), key=costs)
    return tuple(
        Stage(i, blocks, first=i == 0, last=i == count - 1) for i, blocks in enumerate(counts)
    )


def pipeline_ranks(shape: ModelShape, layout: Layout) -> list[Stage]:
    """What each rank of the pipeline holds, all its stages together."""
    per_rank = STAGES_PER_RANK[layout.schedule] if layout.pp > 1 else 1
    cut = stages(shape, layout.pp * per_rank)
    found = []
    for rank in range(layout.pp):
        # zbv goes down the ranks and back up, in a V; the other schedules go round in a loop.
        own = cut[rank :: layout.pp]
        if layout.schedule == "zbv" and layout.pp > 1:
            own = cut[rank], cut[-1 - rank]
        blocks = sum(stage.blocks for stage in own)
        ends = (any(stage.first for stage in own), any(stage.last for stage in own))
        found.append(Stage(rank, blocks, *ends))
    return found


def representative_ranks(shape: ModelShape, layout: Layout) -> list[Stage]:
    """The first rank of each kind: of ranks with equal blocks and ends, none holds more or takes
    longer.
    """
    kinds = {
        (rank.blocks, rank.first, rank.last): rank
        for rank in reversed(pipeline_ranks(shape, layout))
    }
    return list(kinds.values())


def block_parameters(shape: ModelShape, tp: int) -> float:
    """Parameters of one block on one of ``tp`` ranks; norms and the biases of row-wise matrices are
    replicated.
    """
    matrices = shape.attention_weights + shape.ffn_weights
    split_biases = 0
    if shape.traits.biases:
        split_biases = shape.query_width + 2 * shape.key_value_width + shape.intermediate
    whole = shape.block_parameters - matrices - split_biases
    return (matrices + split_biases) / tp + whole


def outer_parameters(shape: ModelShape, stage: Stage, tp: int) -> float:
    """Parameters outside the blocks that the stage holds: embeddings on the first, the head on the
    last.
    """
    words = shape.vocab * shape.hidden
    parameters = 0.0
    if stage.first:
        parameters += shape.embedding_parameters - words + words / tp
    if stage.last:
        split = 0 if shape.tied_embeddings or shape.num_labels is not None else words
        parameters += shape.head_parameters - split + split / tp
        if shape.tied_embeddings and shape.num_labels is None and not stage.first:
            parameters += words / tp  # the last stage has its own copy of a tied embedding
    return parameters


def rank_parameters(shape: ModelShape, layout: Layout, stage: Stage) -> float:
    """Parameters of one rank before data-parallel sharding."""
    blocks = stage.blocks * block_parameters(shape, layout.tp)
    return blocks + outer_parameters(shape, stage, layout.tp)
