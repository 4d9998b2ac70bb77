"""Activations: what autograd keeps of one block for the backward pass, in bytes a token.

The method is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv
2205.05198, section 4, which counts 34 s b h + 5 a s^2 b bytes a block for GPT in 16 bits. The items here are those of
the networks of ``transformers`` as training/ runs them: fused attention keeps no scores, norms run in fp32 under
autocast, and a decoder's gated feed-forward keeps four tensors of its inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.planning.shapes import Layout, ModelShape


@dataclass(frozen=True)
class BlockActivations:
    """Bytes a token that one block keeps on one GPU without any parallelism.

    ``entry``: what enters it, all that full checkpointing keeps. ``norms``: around the norms and dropouts, split over
    tensor-parallel ranks under sequence parallelism only. ``inputs``: what enters the first matrices, whole on each
    of these ranks. ``split``: inside attention and feed-forward, always split. ``scores``: attention probabilities,
    where no fused kernel avoids them. ``products``: of ``split``, and ``whole_products`` of the rest: what matrix
    products gave, which selective checkpointing keeps.
    """

    entry: float
    norms: float
    inputs: float
    split: float
    scores: float
    products: float
    whole_products: float


def block_activations(
    shape: ModelShape, seq_len: int, *, precision: str, gathered: bool, fused_attention: bool = True
) -> BlockActivations:
    """What one block of ``shape`` keeps.

    Args:
        seq_len: tokens of a row; matters to scores alone.
        precision: fp32, or bf16 and fp16 by autocast.
        gathered: weights come gathered in ``precision`` (FSDP2), so that what enters a block is in it too; without,
            residuals are fp32 and each matrix casts its own copy of what it reads.
        fused_attention: the kernel keeps no scores; false on CPUs where attention has dropout.
    """
    half = precision != "fp32"
    width = 2 if half else 4
    copies = 1 if gathered or not half else None
    residual = width if gathered else 4
    hidden, inner = shape.hidden, shape.intermediate
    attention = width * (2 * shape.query_width + 2 * shape.key_value_width)
    ffn, ffn_products = _feed_forward(shape, width)
    return BlockActivations(
        entry=residual * hidden,
        norms=_norms(shape, half=half, gathered=gathered),
        inputs=width * hidden * ((copies or 3) + (copies or (2 if shape.gated_ffn else 1))),
        split=attention + ffn,
        scores=0 if fused_attention else (2 * width + 1) * shape.heads * seq_len,
        products=attention + ffn_products * width * inner,
        whole_products=2 * width * hidden,
    )


def _norms(shape: ModelShape, *, half: bool, gathered: bool) -> float:
    """Both norms and the dropout masks, but what enters the matrices behind them."""
    masks = {"distilbert": 1, "bert": 2, "roberta": 2, "gpt2": 2, "llama": 0}[shape.family] * shape.hidden
    if shape.norm == "layernorm":
        return 2 * 4 * shape.hidden + masks
    # transformers' RMSNorm: the fp32 input, and the normalised values before the weight.
    normalised = 2 if half and gathered else 4
    return 2 * (4 + normalised) * shape.hidden + masks


def _feed_forward(shape: ModelShape, width: int) -> tuple[float, int]:
    """Bytes between the feed-forward's matrices, and how many of those tensors are products."""
    if shape.gated_ffn:  # gate, its activation, up, and their product
        return 4 * width * shape.intermediate, 2
    if shape.family == "gpt2":  # its GELU is written out: x/2; in fp32 what is cubed, tanh, 1 + tanh; their product
        return (2 * width + 12) * shape.intermediate, 1
    return 2 * width * shape.intermediate, 1


def kept_bytes(block: BlockActivations, layout: Layout) -> float:
    """Bytes a token that one block keeps on one rank under the layout's tensor parallelism and checkpointing.

    Source: arXiv 2205.05198, equations 2 (tensor), 4 (sequence parallel) and 6 (selective).
    """
    whole = layout.tp if layout.sequence_parallel else 1
    if layout.activation_checkpointing == "full":
        return block.entry / whole
    if layout.activation_checkpointing == "selective":
        # Row-wise products are kept as each rank's part of a sum, before it is scattered.
        return block.entry / whole + block.whole_products + block.products / layout.tp
    return block.norms / whole + block.inputs + (block.split + block.scores) / layout.tp


def recomputed_bytes(block: BlockActivations, layout: Layout) -> float:
    """Bytes a token of the one block that is being computed again, beside what it keeps anyway."""
    if layout.activation_checkpointing == "none":
        return 0.0
    whole = layout.tp if layout.sequence_parallel else 1
    everything = block.norms / whole + block.inputs + (block.split + block.scores) / layout.tp
    return max(0.0, everything - kept_bytes(block, layout) + block.entry / whole)
