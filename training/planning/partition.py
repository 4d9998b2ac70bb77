"""Partition: which blocks a pipeline stage holds, and how many parameters lie on one rank before any sharding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from training.planning.shapes import Layout, ModelShape

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2, "zbv": 2}
# They run the gradients of inputs and of weights apart.
SPLIT_SCHEDULES = ("zero_bubble", "zbv")
# Of a whole block's matrix work, that of a last block which reads one token: as training/model/architectures.py has it.
KEYS_AND_VALUES = 1 / 6


@dataclass(frozen=True)
class Stage:
    """A stage, or all of a rank: its ``place``, its blocks, the embeddings (``first``) and the head (``last``)."""

    place: int
    blocks: int
    first: bool
    last: bool


@cache
def stages(shape: ModelShape, count: int) -> tuple[Stage, ...]:
    """Cut the blocks into ``count`` stages so that the slowest takes as little as whole blocks allow.

    A language model's head costs the last stage about as much as several blocks: it gets fewer of them. Blocks that are
    over go to the later stages, as in ``training.parallelism.stages.balanced_split``, which cuts the trainer's models.
    """
    if count == 1:
        return (Stage(0, shape.layers, first=True, last=True),)
    seq_len = 1024  # the ratios to a block hardly depend on it
    language_head = shape.head_flops(seq_len) / shape.block_flops(seq_len) if shape.num_labels is None else 0.0
    last_block = KEYS_AND_VALUES if shape.reads_first_token_only else 1.0

    def costs(counts: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        found = [*counts[:-1], counts[-1] - 1 + last_block + language_head]
        return max(found), sum(cost * cost for cost in found), counts

    cuts = (_even(shape.layers - of_last, count - 1, of_last) for of_last in range(1, shape.layers - count + 2))
    counts = min(cuts, key=costs)
    return tuple(Stage(i, blocks, first=i == 0, last=i == count - 1) for i, blocks in enumerate(counts))


def _even(blocks: int, count: int, of_last: int) -> tuple[int, ...]:
    """Blocks shared out evenly, the shorter shares first; and those of the last stage."""
    share, more = divmod(blocks, count)
    return (*(share + (place >= count - more) for place in range(count)), of_last)


def pipeline_ranks(shape: ModelShape, layout: Layout) -> list[Stage]:
    """What each rank of the pipeline holds, all its stages together: in a loop every pp-th, in a V from both ends."""
    per_rank = STAGES_PER_RANK[layout.schedule] if layout.pp > 1 else 1
    cut = stages(shape, layout.pp * per_rank)
    found = []
    for rank in range(layout.pp):
        own = [cut[rank], cut[-1 - rank]] if layout.schedule == "zbv" and layout.pp > 1 else cut[rank :: layout.pp]
        blocks = sum(stage.blocks for stage in own)
        found.append(Stage(rank, blocks, any(stage.first for stage in own), any(stage.last for stage in own)))
    return found


def representative_ranks(shape: ModelShape, layout: Layout) -> list[Stage]:
    """The first rank of each kind: of ranks alike in blocks and ends, none keeps more or takes longer."""
    kinds = {(rank.blocks, rank.first, rank.last): rank for rank in reversed(pipeline_ranks(shape, layout))}
    return list(kinds.values())


def block_parameters(shape: ModelShape, tp: int) -> float:
    """Parameters of one block on one of ``tp`` tensor-parallel ranks; norms and row-wise biases lie on each."""
    matrices = shape.attention_weights + shape.ffn_weights
    split_biases = (shape.query_width + 2 * shape.key_value_width + shape.intermediate) if shape.biases else 0
    whole = shape.block_parameters - matrices - split_biases
    return (matrices + split_biases) / tp + whole


def outer_parameters(shape: ModelShape, stage: Stage, tp: int) -> float:
    """Parameters outside the blocks that the stage holds: embeddings on the first, the head on the last."""
    words = shape.vocab * shape.hidden
    parameters = 0.0
    if stage.first:
        parameters += shape.embedding_parameters - words + words / tp
    if stage.last:
        split = 0 if shape.tied_embeddings or shape.num_labels is not None else words
        parameters += shape.head_parameters - split + split / tp
        if shape.tied_embeddings and shape.num_labels is None and not stage.first:
            parameters += words / tp  # the last stage keeps a copy of its own
    return parameters


def rank_parameters(shape: ModelShape, layout: Layout, stage: Stage) -> float:
    """Parameters of one rank before data-parallel sharding."""
    return stage.blocks * block_parameters(shape, layout.tp) + outer_parameters(shape, stage, layout.tp)
