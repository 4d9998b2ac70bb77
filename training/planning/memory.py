"""Bytes on the fullest GPU, by formula, and in the memory of the fullest node.

Weights, gradients and moments follow ZeRO (Rajbhandari et al., arXiv 1910.02054, section 3 and
figure 1) with what this trainer keeps: fp32 weights, fp32 gradients and the two fp32 moments of
AdamW, 16 bytes per parameter, plus copies in the computing dtype. Micro-batches in flight follow
Narayanan et al., arXiv 2104.04473, section 2.2.

Activations are counted with the method of Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", arXiv 2205.05198, section 4, which arrives at 34 s b h + 5 a s^2 b bytes
per block for GPT in 16 bits. The items differ here because the networks are those of
``transformers`` as training/ runs them: fused attention keeps no scores, norms run in fp32 under
autocast, and a decoder's gated feed-forward keeps four tensors of its inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.facts import STRATEGY_FACTS
from training.planning.hardware import Cluster
from training.planning.layouts import (
    SPLIT_SCHEDULES,
    STAGES_PER_RANK,
    Layout,
    Stage,
    block_parameters,
    outer_parameters,
    rank_parameters,
    representative_ranks,
)
from training.planning.models import ModelShape


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the GPU that needs the most."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    # Weights gathered from shards, copies in the computing dtype, gradient buckets.
    communication: float

    @property
    def total(self) -> float:
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.communication


# Bytes per parameter of weights, gradients and AdamW's moments, all in fp32.
WEIGHT, GRADIENT, MOMENTS = 4, 4, 8


def zero_states(
    parameters: float,
    ranks: int,
    stage: int,
    each: tuple[float, float, float] = (WEIGHT, GRADIENT, MOMENTS),
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state on each of ``ranks`` under ZeRO ``stage`` 0
    to 3.

    Source: arXiv 1910.02054, figure 1, with (2, 2, 12) for ``each``.
    """
    shards = (ranks if stage >= 3 else 1, ranks if stage >= 2 else 1, ranks if stage >= 1 else 1)
    weights, gradients, optimizer = (
        size * parameters / count for size, count in zip(each, shards, strict=True)
    )
    return weights, gradients, optimizer


@dataclass(frozen=True)
class BlockActivations:
    """Bytes per token that autograd keeps of one block for the backward pass, on one GPU without
    any parallelism.
    """

    entry: float  # the block's input, which is all that full checkpointing keeps
    # Around norms and dropouts; only sequence parallelism splits it over tensor-parallel ranks.
    norms: float
    inputs: float  # what enters the first matrices, whole on each tensor-parallel rank
    split: float  # inside attention and feed-forward, always split
    scores: float  # attention probabilities, unless a fused kernel avoids them
    # The results of matrix products, which selective checkpointing keeps: the part inside split,
    # and the rest.
    products: float
    whole_products: float


def block_activations(
    shape: ModelShape, seq_len: int, *, precision: str, gathered: bool, fused_attention: bool = True
) -> BlockActivations:
    """What autograd keeps of one block.

    If FSDP2 gathers the weights in ``precision``, a block's input is in it too. Otherwise 16-bit
    precisions are autocast's: residuals are fp32, and each matrix casts its own copy of what it
    reads.
    """
    half = precision != "fp32"
    width = 2 if half else 4
    hidden, traits = shape.hidden, shape.traits

    # Both norms and the dropout masks, without what enters the matrices behind them. LayerNorm
    # keeps its fp32 input; RMSNorm of transformers keeps its fp32 input and the normalised values
    # before the weight.
    norms = traits.dropout_masks * hidden + 2 * 4 * hidden
    if traits.norm == "rmsnorm":
        norms += 2 * (2 if half and gathered else 4) * hidden

    # How many copies of the block's input the query, key and value matrices keep, and those of the
    # feed-forward.
    shares_input = gathered or not half
    copies = 2 if shares_input else 3 + (2 if traits.gated_ffn else 1)

    ffn, ffn_products = _feed_forward(shape, width)
    # Query, output, key, value.
    attention = width * (2 * shape.query_width + 2 * shape.key_value_width)
    return BlockActivations(
        entry=(width if gathered else 4) * hidden,
        norms=norms,
        inputs=width * hidden * copies,
        split=attention + ffn,
        # A probability, what dropout leaves of it, and its mask.
        scores=0 if fused_attention else (2 * width + 1) * shape.heads * seq_len,
        products=attention + ffn_products * width * shape.intermediate,
        whole_products=2 * width * hidden,
    )


def _feed_forward(shape: ModelShape, width: int) -> tuple[int, int]:
    """Bytes per token that autograd keeps between its matrices, and how many matrix products are
    among them.
    """
    inner = shape.intermediate
    if shape.traits.gated_ffn:  # gate, its activation, up, and their product
        return 4 * width * inner, 2
    if shape.family == "gpt2":
        # GELU is written out: x/2; in fp32 the cube's input, tanh, 1 + tanh; their product.
        return (2 * width + 12) * inner, 1
    return 2 * width * inner, 1  # before and after GELU


def kept_bytes(block: BlockActivations, layout: Layout) -> float:
    """Bytes per token that one block keeps on one rank, with the layout's tensor parallelism and
    checkpointing.

    Source: arXiv 2205.05198, equations 2 (tensor), 4 (sequence parallel) and 6 (selective).
    """
    sequence_parts = layout.tp if layout.sequence_parallel else 1
    if layout.activation_checkpointing == "full":
        return block.entry / sequence_parts
    if layout.activation_checkpointing == "selective":
        # Row-wise products are kept as each rank's part of a sum, before it is scattered.
        return block.entry / sequence_parts + block.whole_products + block.products / layout.tp
    return block.norms / sequence_parts + block.inputs + (block.split + block.scores) / layout.tp


def recomputed_bytes(block: BlockActivations, layout: Layout) -> float:
    """Bytes per token of the one block that is being recomputed, on top of what it keeps anyway."""
    if layout.activation_checkpointing == "none":
        return 0.0
    sequence_parts = layout.tp if layout.sequence_parallel else 1
    everything = (
        block.norms / sequence_parts + block.inputs + (block.split + block.scores) / layout.tp
    )
    return max(0.0, everything - kept_bytes(block, layout) + block.entry / sequence_parts)


def in_flight(layout: Layout, stage: int) -> float:
    """How many micro-batches' activations a rank holds at once, in units of all its blocks."""
    if layout.pp == 1:
        return 1
    if layout.schedule == "gpipe":
        return layout.accumulation
    if layout.schedule in SPLIT_SCHEDULES:
        # Activations are freed with the weights' gradients, which are deferred, so every rank holds
        # the same.
        return min(layout.accumulation, layout.pp)
    depth = layout.pp - stage
    if layout.schedule == "interleaved":
        # Warm-up, counted in passes through one of the rank's stages.
        chunks = STAGES_PER_RANK[layout.schedule]
        passes = 2 * (depth - 1) + (chunks - 1) * layout.pp + 1
        return min(layout.accumulation, passes / chunks)
    return min(layout.accumulation, depth)


def estimate_memory(
    shape: ModelShape, layout: Layout, *, fused_attention: bool = True
) -> MemoryEstimate:
    """Bytes on the rank that needs the most."""
    ranks = representative_ranks(shape, layout)
    estimates = [
        estimate_stage(shape, layout, stage, fused_attention=fused_attention) for stage in ranks
    ]
    return max(estimates, key=lambda estimate: estimate.total)


def estimate_stage(
    shape: ModelShape, layout: Layout, stage: Stage, *, fused_attention: bool = True
) -> MemoryEstimate:
    """Bytes on a rank of one pipeline stage, at the fullest of four moments of a step."""
    tokens = layout.micro_batch * layout.seq_len
    weights, gradients, optimizer = _states(shape, layout, stage)
    whole_gradients, carried = _gradients_before(shape, layout, stage, gradients)

    block = block_activations(
        shape,
        layout.seq_len,
        precision=layout.precision,
        gathered=layout.is_fsdp,
        fused_attention=fused_attention,
    )
    # A last block that reads one token keeps a quarter: what its keys and values need.
    blocks = stage.blocks - (0.75 if stage.last and shape.reads_first_token_only else 0)
    held = tokens * blocks * kept_bytes(block, layout) * in_flight(layout, stage.index)
    recomputed = tokens * recomputed_bytes(block, layout)
    outside, logits = (tokens * part for part in _outside_blocks(shape, layout, stage))

    forward, at_loss, backward = _communication_bytes(shape, layout, stage)
    block_gradients = layout.width * block_parameters(shape, layout.tp)
    # A step is fullest at one of four moments: (gradients, activations, communication) at the end
    # of the forward pass, at the loss, in the first block that goes backward, and at the end of the
    # backward pass. Each adds up differently, so the largest of every column would count memory
    # that is never needed at the same time.
    moments = (
        (carried, held + outside, forward),
        (carried, held + outside + logits, at_loss),
        (carried + block_gradients, held + outside + recomputed, backward),
        (whole_gradients + gradients, outside + recomputed, backward),
    )
    fullest = max(moments, key=sum)
    return MemoryEstimate(weights, fullest[0], optimizer, fullest[1], fullest[2])


def _states(shape: ModelShape, layout: Layout, stage: Stage) -> tuple[float, float, float]:
    """Bytes of weights, gradients and moments on a rank of the stage."""
    parameters = rank_parameters(shape, layout, stage)
    if layout.strategy != "zero1":
        return zero_states(parameters, layout.dp_shard, 3)
    weights, gradients, optimizer = zero_states(parameters, layout.dp, 1)
    # ZeRO-1 deals out whole parameters, so one rank has the moments of all word embeddings.
    return weights, gradients, max(optimizer, MOMENTS * shape.vocab * shape.hidden)


def _gradients_before(
    shape: ModelShape, layout: Layout, stage: Stage, gradients: float
) -> tuple[float, float]:
    """Bytes of whole gradients that are added up, and of all that exist before a backward pass
    starts.
    """
    # FSDP adds up whole ones if it postpones the reduce-scatter (in pipelines) or has none (nothing
    # is sharded); otherwise it carries shards from one micro-batch to the next. DDP's buckets live
    # from the first step to the last.
    accumulates = layout.accumulation > 1
    if layout.is_fsdp and accumulates and (layout.dp_shard == 1 or layout.pp > 1):
        whole = GRADIENT * rank_parameters(shape, layout, stage)
        return whole, whole
    keeps_buckets = STRATEGY_FACTS[layout.strategy].copies and layout.dp > 1
    return 0.0, gradients if keeps_buckets or accumulates else 0.0


def _outside_blocks(shape: ModelShape, layout: Layout, stage: Stage) -> tuple[float, float]:
    """Bytes per token that autograd keeps before the first block and behind the last one."""
    embedding = logits = 0.0
    if stage.first:
        # The ids, the norm's input and a dropout mask, if there are any.
        norm = 4 * shape.hidden if shape.traits.norm_after else 0
        embedding = 8 + norm + (shape.hidden if shape.traits.dropout_masks else 0)
    if stage.last and shape.num_labels is None:
        # A language model's logits in fp32, their log-softmax and its gradient; and the final norm.
        logits = 12 * shape.vocab / layout.tp + (8 + layout.width) * shape.hidden
    return embedding, logits


def _communication_bytes(
    shape: ModelShape, layout: Layout, stage: Stage
) -> tuple[float, float, float]:
    """Weights in the computing dtype and buffers: in the forward pass, at the loss, in the backward
    pass.
    """
    width = layout.width
    block, outer = block_parameters(shape, layout.tp), outer_parameters(shape, stage, layout.tp)
    whole = stage.blocks * block + outer
    if layout.is_fsdp:
        reducing = GRADIENT * block
        if layout.keeps_gathered:
            return width * whole, width * whole, width * whole + reducing
        # The group outside the blocks stays gathered, and the next block is prefetched while one
        # computes.
        working = width * (outer + 2 * block)
        return working, 0.0, working + reducing
    if layout.precision == "fp32":
        return 0.0, 0.0, 0.0
    # Autocast copies each matrix once per forward pass; the graph keeps the copy unless it
    # recomputes the block.
    words = shape.vocab * shape.hidden / layout.tp if stage.first else 0.0
    copies = width * (whole - words)
    if layout.activation_checkpointing == "none":
        return (copies * in_flight(layout, stage.index),) * 3
    return copies, width * (outer - words), width * (outer - words + block)


def host_memory(shape: ModelShape, cluster: Cluster) -> dict[str, float]:
    """Bytes that a run needs in the fullest node's own memory, without what Python and CUDA take:
    an upper bound.

    ``loading``: the model's file, counted as fp32 and mapped once for all ranks of the node, and
    the block that each of them is converting to fp32. ``saving``: the copies of weights and moments
    that are written while training continues, and the finished model on rank 0's node.
    """
    parameters = shape.num_parameters
    largest = max(shape.block_parameters, shape.embedding_parameters)
    return {
        "loading": WEIGHT * (parameters + cluster.gpus_per_node * largest),
        "saving": (WEIGHT + MOMENTS) * parameters / cluster.nodes + WEIGHT * parameters,
    }
