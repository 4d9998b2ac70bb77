"""Memory: bytes on the fullest GPU, by formula.

States follow ZeRO (Rajbhandari et al., arXiv 1910.02054, section 3 and figure 1) with what this trainer keeps: fp32
weights, fp32 gradients and the two fp32 moments of AdamW, 16 bytes a parameter in all, and copies in the computing
dtype beside them. Activations: ``activations.py``. Micro-batches in flight: Narayanan et al., arXiv 2104.04473,
section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.planning.activations import block_activations, kept_bytes, recomputed_bytes
from training.planning.partition import (
    SPLIT_SCHEDULES,
    STAGES_PER_RANK,
    Stage,
    block_parameters,
    outer_parameters,
    rank_parameters,
    representative_ranks,
)
from training.planning.shapes import Layout, MemoryEstimate, ModelShape


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter of weights, gradients and optimizer state."""

    parameter: float
    gradient: float
    optimizer: float


OURS = StateBytes(4, 4, 8)


def zero_states(parameters: float, ranks: int, stage: int, each: StateBytes = OURS) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state on each of ``ranks`` under ZeRO ``stage`` 0 to 3.

    Source: arXiv 1910.02054, figure 1, where ``each`` is (2, 2, 12).
    """
    return (
        each.parameter * parameters / (ranks if stage >= 3 else 1),
        each.gradient * parameters / (ranks if stage >= 2 else 1),
        each.optimizer * parameters / (ranks if stage >= 1 else 1),
    )


def is_gathered(layout: Layout) -> bool:
    """Whether FSDP2 serves the data-parallel dimension, and gathers weights in the computing dtype."""
    return layout.strategy not in ("ddp", "zero1") and layout.dp > 1


def keeps_gathered(layout: Layout) -> bool:
    """Whether gathered weights stay from the forward to the backward pass."""
    return is_gathered(layout) and (layout.strategy == "zero2" or layout.pp > 1)


def in_flight(layout: Layout, stage: int) -> float:
    """How many micro-batches' activations a stage holds at once, in units of its blocks."""
    if layout.schedule == "gpipe" or layout.pp == 1:
        return layout.accumulation if layout.pp > 1 else 1
    if layout.schedule in SPLIT_SCHEDULES:
        # What is kept goes with the gradients of weights, which are put off: every rank keeps the same.
        return min(layout.accumulation, layout.pp)
    depth = layout.pp - stage
    if layout.schedule == "interleaved":
        # Warm-up, in passes through one of the rank's stages.
        chunks = STAGES_PER_RANK[layout.schedule]
        passes = 2 * (depth - 1) + (chunks - 1) * layout.pp + 1
        return min(layout.accumulation, passes / chunks)
    return min(layout.accumulation, depth)


def estimate_memory(shape: ModelShape, layout: Layout, *, fused_attention: bool = True) -> MemoryEstimate:
    """Bytes on the rank that needs the most."""
    estimates = [
        estimate_stage(shape, layout, stage, fused_attention=fused_attention)
        for stage in representative_ranks(shape, layout)
    ]
    return max(estimates, key=lambda estimate: estimate.total)


def estimate_stage(shape: ModelShape, layout: Layout, stage: Stage, *, fused_attention: bool = True) -> MemoryEstimate:
    """Bytes on a rank of one pipeline stage at the fullest of four moments.

    The end of the forward pass; the loss, with the logits; the first block that goes backward, with its weights and
    their gradients; and the end of the backward pass, with all gradients.
    """
    parameters = rank_parameters(shape, layout, stage)
    if layout.strategy == "zero1":
        weights, gradients, optimizer = zero_states(parameters, layout.dp, 1)
        # A parameter's moments are not divided: one rank holds those of the word embeddings.
        optimizer = max(optimizer, OURS.optimizer * shape.vocab * shape.hidden)
    else:
        weights, gradients, optimizer = zero_states(parameters, layout.dp_shard, 3)
    whole_gradients = OURS.gradient * parameters if _holds_whole_gradients(layout) else 0.0
    carried = whole_gradients or (gradients if _carries_gradients(layout) else 0.0)
    held, one_block, outside, logits = _activation_bytes(shape, layout, stage, fused_attention=fused_attention)
    forward, kept, passing = _communication_bytes(shape, layout, stage)
    computed = _width(layout) * block_parameters(shape, layout.tp)
    moments = (
        (carried, held + outside, forward),
        (carried, held + outside + logits, kept),
        (carried + computed, held + outside + one_block, passing),
        (whole_gradients + gradients, outside + one_block, passing),
    )
    fullest = max(moments, key=sum)
    return MemoryEstimate(weights, fullest[0], optimizer, fullest[1], fullest[2])


def _holds_whole_gradients(layout: Layout) -> bool:
    """Whether micro-batches before the last add up whole gradients: where none are shared out, and in a pipeline."""
    return is_gathered(layout) and layout.accumulation > 1 and (layout.dp_shard == 1 or layout.pp > 1)


def _carries_gradients(layout: Layout) -> bool:
    """Whether gradients are there before a backward pass: in DDP's buckets, or of the micro-batch before."""
    return (layout.strategy in ("ddp", "zero1") and layout.dp > 1) or layout.accumulation > 1


def _width(layout: Layout) -> int:
    return 4 if layout.precision == "fp32" else 2


def _activation_bytes(
    shape: ModelShape, layout: Layout, stage: Stage, *, fused_attention: bool
) -> tuple[float, float, float, float]:
    """Bytes that all blocks keep, that one going backward needs beside, around the blocks, and of the logits."""
    tokens = layout.micro_batch * layout.seq_len
    block = block_activations(
        shape,
        layout.seq_len,
        precision=layout.precision,
        gathered=is_gathered(layout),
        fused_attention=fused_attention,
    )
    blocks = stage.blocks - (_first_token_saving(shape) if stage.last else 0)
    held = tokens * blocks * kept_bytes(block, layout) * in_flight(layout, stage.place)
    outside = tokens * _embedding_bytes(shape) if stage.first else 0.0
    logits = tokens * _head_bytes(shape, layout) if stage.last else 0.0
    return held, tokens * recomputed_bytes(block, layout), outside, logits


def _first_token_saving(shape: ModelShape) -> float:
    """The share of the last block's activations that are never made: it keeps what keys and values need."""
    return 0.75 if shape.reads_first_token_only else 0.0


def _embedding_bytes(shape: ModelShape) -> float:
    """Bytes a token behind the embedding: the norm's input and a dropout mask, where there are any."""
    return (4 * shape.hidden if shape.norm_after else 0) + (shape.hidden if shape.dropout else 0) + 8


def _head_bytes(shape: ModelShape, layout: Layout) -> float:
    """Bytes a token of a language model's logits in fp32, their log-softmax and its gradient; and of its norm."""
    if shape.num_labels is not None:
        return 0.0
    return 12 * shape.vocab / layout.tp + (8 + _width(layout)) * shape.hidden


def _communication_bytes(shape: ModelShape, layout: Layout, stage: Stage) -> tuple[float, float, float]:
    """Bytes of weights in the computing dtype and of buffers: in the forward pass, at the loss, in a backward pass."""
    width = _width(layout)
    block, outer = block_parameters(shape, layout.tp), outer_parameters(shape, stage, layout.tp)
    whole = stage.blocks * block + outer
    if is_gathered(layout):
        reducing = OURS.gradient * block
        if keeps_gathered(layout):
            return width * whole, width * whole, width * whole + reducing
        # The group outside the blocks stays gathered, and the next block is fetched while one is at work.
        working = width * (outer + 2 * block)
        return working, 0.0, working + reducing
    if width == 4:
        return 0.0, 0.0, 0.0
    # Autocast copies each matrix once a forward pass; the graph keeps the copy unless it computes a block again.
    words = shape.vocab * shape.hidden / layout.tp if stage.first else 0.0
    copies = width * (whole - words)
    if layout.activation_checkpointing == "none":
        return (copies * in_flight(layout, stage.place),) * 3
    return copies, width * (outer - words), width * (outer - words + block)
