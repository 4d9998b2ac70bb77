"""Tensor parallelism: every matrix is split over ranks that work on the same rows.

Queries, keys, values and the first feed-forward layer are split by outputs (columns), and the
layers after them by inputs (rows), so a block needs two all-reduces forward and two backward
(Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3; in plain collectives in
``by_hand/tensor_parallel.py``). Sequence parallelism also splits what is between those pairs,
norms, dropout and residuals, along the sequence. An all-reduce becomes a reduce-scatter and an
all-gather, which together move the same bytes, and fewer activations are kept for the backward pass
(Korthikanti et al., arXiv 2205.05198, section 4.2.2; theirs gathers again in the backward pass,
ours keeps the gathered inputs of the column-parallel layers). ``benchmarks/training_features.py``
counts what it saves.

Every parameter becomes a DTensor, even one that is not split, so that the optimizer and FSDP see a
single mesh.
"""

from __future__ import annotations

from math import gcd

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from common.encoders import BERT, DISTILBERT, LLAMA, LLAMA_LANGUAGE_MODEL, EncoderFamily
from common.errors import UserError
from training.model.architectures import architecture_of, find_blocks
from training.model.classifier import NewsClassifier, to_fp32, to_fp32_outside
from training.model.dropout import RowDropout
from training.parallelism.blocks import LENGTH_MULTIPLE
from training.parallelism.tensor_styles import ShareInput, VocabularyParallel, WholeParameters

Plan = dict[str, ParallelStyle]  # by the dotted name of the module
WHOLE = Replicate()
ALONG_SEQUENCE = Shard(1)  # of (batch, seq, hidden)


FAMILIES = {
    family.network_class: family for family in (DISTILBERT, BERT, LLAMA, LLAMA_LANGUAGE_MODEL)
}


def apply_tensor_parallel(
    model: NewsClassifier, mesh: DeviceMesh, *, sequence_parallel: bool
) -> None:
    """Split a model, or a pipeline stage of one, over the ranks of ``mesh``, in place.

    This comes before activation checkpointing, compilation and sharding. With sequence parallelism
    the ranks must divide the padded length, and stages pass (batch, seq / ranks, hidden) to each
    other. Dropout masks are those of one process, except where torch's own generator draws them
    (see ``dropout.py``).

    Args:
        model: built from the same seed or file on every rank.
        mesh: one dimension.
        sequence_parallel: also split norms and dropout along the sequence.

    Raises:
        UserError: the family of networks is not known, or its heads, features or lengths cannot be
            split evenly.
    """
    network = model.network
    names = _family_of(network, mesh.size())
    if sequence_parallel and LENGTH_MULTIPLE % mesh.size():
        raise UserError(
            f"--sequence_parallel with --tp {mesh.size()}: lengths are multiples of "
            f"{LENGTH_MULTIPLE}, which are not "
            f"divisible by {mesh.size()} ranks; leave it out, or use a power of 2",
            code="uneven-split",
        )
    # How the hidden states between attention and feed-forward are placed.
    layout = ALONG_SEQUENCE if sequence_parallel else WHOLE
    to_fp32_outside(network, find_blocks(network))
    _apply(network, _plan_of_ends(names, layout), names.head_dropout, mesh)
    for number, block in network.get_submodule(architecture_of(network).blocks).named_children():
        to_fp32(block)  # one at a time, so that a rank never holds the whole model in fp32
        if sequence_parallel and int(number) == network.config.num_hidden_layers - 1:
            # The head reads a single token of each row, which only one rank would have: gather the
            # sequence before.
            gather = PrepareModuleInput(
                input_layouts=layout, desired_input_layouts=WHOLE, use_local_output=True
            )
            _apply(block, {"": gather, **_block_plan(names, WHOLE)}, names.attention_dropout, mesh)
        else:
            # Attention weights are always split, by heads; the hidden states only along the
            # sequence.
            dropout = names.attention_dropout + (names.output_dropout if sequence_parallel else ())
            _apply(block, _block_plan(names, layout), dropout, mesh)


def _apply(module: nn.Module, plan: Plan, dropout: tuple[str, ...], mesh: DeviceMesh) -> None:
    """Apply a plan; ``dropout`` names the dropout layers whose tensors are split in dimension 1."""
    # A pipeline stage lacks the embeddings or the head, or both.
    held = {name for name, child in module.named_modules() if any(True for _ in child.parameters())}
    parallelize_module(module, mesh, {name: style for name, style in plan.items() if name in held})
    for name in dropout:
        layer = module.get_submodule(name)
        if isinstance(layer, RowDropout):
            layer.part = (1, mesh.get_local_rank(), mesh.size())


def _family_of(network: nn.Module, ranks: int) -> EncoderFamily:
    name = type(network).__name__
    if name not in FAMILIES:
        raise UserError(
            f"--tp {ranks}: {name} cannot be split (only DistilBERT, BERT and Llama can); "
            "use --strategy zero3, which shards any network",
            code="model-not-splittable",
        )
    config = network.config
    if FAMILIES[name] is LLAMA_LANGUAGE_MODEL and config.tie_word_embeddings:
        raise UserError(
            f"--tp {ranks}: the head of this language model is also its embedding table "
            "(tie_word_embeddings), which "
            "is not split; use --strategy zero3",
            code="model-not-splittable",
        )
    counts = {
        "attention heads": config.num_attention_heads,
        "heads of keys and values": getattr(
            config, "num_key_value_heads", config.num_attention_heads
        ),
        "feed-forward features": getattr(config, FAMILIES[name].intermediate_size_key),
    }
    # Any divisor of all three counts splits them evenly.
    common = gcd(*counts.values())
    for what, count in counts.items():
        if count % ranks:
            fitting = ", ".join(
                str(degree) for degree in range(1, common + 1) if common % degree == 0
            )
            raise UserError(
                f"--tp {ranks}: {count} {what} cannot be split evenly; use one of {fitting}",
                code="uneven-split",
            )
    return FAMILIES[name]


def _block_plan(names: EncoderFamily, layout: Placement) -> Plan:
    """The styles of a block's modules; ``layout`` is that of the hidden states between its halves."""
    # Megatron's split (Shoeybi et al., section 3): the first layer of each half by columns, so by
    # heads or features, and the second by rows. The activations between the two are never
    # communicated; each half ends in one all-reduce, or in one reduce-scatter with sequence
    # parallelism.
    plan = {
        names.attention: ShareInput(layout),
        names.query: ColwiseParallel(),
        names.key: ColwiseParallel(),
        names.value: ColwiseParallel(),
        names.attention_output: RowwiseParallel(output_layouts=layout),
        names.attention_norm: WholeParameters(layout),
        names.output: RowwiseParallel(output_layouts=layout),
        names.output_norm: WholeParameters(layout),
    }
    if names.gate is None:
        return plan | {names.intermediate: ColwiseParallel(input_layouts=layout)}
    # Two layers read the same states, so these are gathered once for both.
    return plan | {
        names.feed_forward: ShareInput(layout),
        names.gate: ColwiseParallel(),
        names.intermediate: ColwiseParallel(),
    }


def _plan_of_ends(names: EncoderFamily, layout: Placement) -> Plan:
    """The styles of the embeddings and of the head; ``layout`` is that of the hidden states in the blocks."""
    if names.embeddings == names.word_embeddings:
        plan: Plan = {names.word_embeddings: VocabularyParallel(layout)}
    else:
        # The other tables and the norm work on whole sequences; their output is split along the
        # sequence once.
        tables = (names.position_embeddings, names.token_type_embeddings, names.embedding_norm)
        plan = {
            names.word_embeddings: VocabularyParallel(WHOLE),
            **{table: WholeParameters(WHOLE) for table in tables if table},
            names.embeddings: PrepareModuleOutput(
                output_layouts=WHOLE, desired_output_layouts=layout
            ),
        }
    if names.pooler:
        return plan | {names.pooler: ColwiseParallel(), names.classifier: RowwiseParallel()}
    if names is LLAMA_LANGUAGE_MODEL:
        # As large as the embeddings, so it is split like them, by words; each rank gets the scores
        # of all words.
        return plan | {
            names.final_norm: WholeParameters(WHOLE),
            names.classifier: ColwiseParallel(output_layouts=WHOLE),
        }
    # A head without a pooler is a single matrix with one row per class: to split it would cost a
    # collective.
    return plan | {
        names.final_norm: WholeParameters(WHOLE),
        names.classifier: WholeParameters(WHOLE),
    }
