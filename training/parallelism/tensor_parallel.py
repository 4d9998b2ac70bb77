"""Tensor parallelism: every matrix cut over ranks that work on the same rows.

Queries, keys, values and the first feed-forward layer are cut by their outputs (columns), the layers after them by
their inputs (rows), so a block sums over the ranks twice forward and twice backward (Shoeybi et al., "Megatron-LM",
arXiv 1909.08053, section 3; in plain collectives in ``by_hand/tensor_parallel.py``). Sequence parallelism also cuts
what lies between those pairs, norms, dropout and residuals, along the sequence: a sum becomes a reduce-scatter and an
all-gather of together the same bytes, and less is kept for the backward pass (Korthikanti et al., arXiv 2205.05198,
section 4.2.2; theirs gathers again in the backward pass, ours keeps the gathered inputs of the column-parallel layers).
What it saves is counted by ``benchmarks/training_features.py``.

Every parameter becomes a DTensor, those that are not cut as well: one mesh for the optimizer and for sharding after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

from common.errors import UserError
from training.model.architectures import architecture_of, find_blocks
from training.model.classifier import NewsClassifier, widen, widen_outside
from training.model.dropout import RowDropout
from training.parallelism.blocks import LENGTH_MULTIPLE
from training.parallelism.tensor_styles import ShareInput, VocabularyParallel, WholeParameters

Plan = dict[str, ParallelStyle]  # dotted names of modules
WHOLE = Replicate()
ALONG_SEQUENCE = Shard(1)  # of (batch, seq, hidden)


@dataclass(frozen=True)
class _Family:
    """How one family of networks is cut.

    ``block``: the plan of a block whose hidden states lie as given; ``ends``: that of embeddings and head, from the
    network's root. Dropout of tensors whose second dimension is cut: ``by_heads`` and ``by_sequence`` in a block,
    ``by_features`` in the head.
    """

    block: Callable[[Placement], Plan]
    ends: Callable[[Placement], Plan]
    by_heads: tuple[str, ...] = ()
    by_sequence: tuple[str, ...] = ()
    by_features: tuple[str, ...] = ()


def apply_tensor_parallel(model: NewsClassifier, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut a model, or a pipeline's stage of one, over the ranks of ``mesh``, in place.

    Before activation checkpointing, compilation and sharding. With sequence parallelism the ranks must divide the
    padded length, and stages pass (batch, seq / ranks, hidden) to each other. Dropout masks are those of one process,
    but for what draws from torch's own generator (see ``dropout.py``).

    Args:
        model: of the same seed or file on every rank; what a stage lacks is passed over.
        mesh: one dimension.
        sequence_parallel: cut norms and dropout along the sequence too.

    Raises:
        UserError: the family of networks is not known, or its heads or features, or lengths along which to cut, cannot
            be shared out evenly.
    """
    network = model.network
    family = _family_of(network, mesh.size())
    if sequence_parallel and LENGTH_MULTIPLE % mesh.size():
        raise UserError(
            f"--sequence_parallel with --tp {mesh.size()}: lengths are multiples of {LENGTH_MULTIPLE}, which "
            f"{mesh.size()} ranks do not divide; leave it out, or use a power of 2"
        )
    layout = ALONG_SEQUENCE if sequence_parallel else WHOLE
    widen_outside(network, find_blocks(network))
    _apply(network, family.ends(layout), family.by_features, mesh)
    for number, block in network.get_submodule(architecture_of(network).blocks).named_children():
        widen(block)  # one at a time, as with sharding
        if sequence_parallel and int(number) == network.config.num_hidden_layers - 1:
            # The head reads a single token of each row, which only one rank would hold.
            gather = PrepareModuleInput(input_layouts=layout, desired_input_layouts=WHOLE, use_local_output=True)
            _apply(block, {"": gather, **family.block(WHOLE)}, family.by_heads, mesh)
        else:
            _apply(block, family.block(layout), family.by_heads + sequence_parallel * family.by_sequence, mesh)


def _apply(module: nn.Module, plan: Plan, dropout: tuple[str, ...], mesh: DeviceMesh) -> None:
    held = {name for name, child in module.named_modules() if any(True for _ in child.parameters())}
    parallelize_module(module, mesh, {name: style for name, style in plan.items() if name in held})
    for name in dropout:
        place = module.get_submodule(name)
        if isinstance(place, RowDropout):
            place.part = (1, mesh.get_local_rank(), mesh.size())


def _family_of(network: nn.Module, ranks: int) -> _Family:
    name = type(network).__name__
    if name not in FAMILIES:
        raise UserError(
            f"--tp {ranks}: {name} cannot be cut (only DistilBERT, BERT and Llama can); "
            "use --strategy zero3, which shares out any network"
        )
    config = network.config
    counts = {
        "attention heads": config.num_attention_heads,
        "heads of keys and values": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "feed-forward features": config.hidden_dim if name.startswith("DistilBert") else config.intermediate_size,
    }
    common = gcd(*counts.values())
    for what, count in counts.items():
        if count % ranks:
            fitting = ", ".join(str(degree) for degree in range(1, common + 1) if common % degree == 0)
            raise UserError(f"--tp {ranks}: {count} {what} cannot be shared out evenly; use one of {fitting}")
    return FAMILIES[name]


def _distilbert_block(layout: Placement) -> Plan:
    return {
        "attention": ShareInput(layout),
        "attention.q_lin": ColwiseParallel(),
        "attention.k_lin": ColwiseParallel(),
        "attention.v_lin": ColwiseParallel(),
        "attention.out_lin": RowwiseParallel(output_layouts=layout),
        "sa_layer_norm": WholeParameters(layout),
        "ffn.lin1": ColwiseParallel(input_layouts=layout),
        "ffn.lin2": RowwiseParallel(output_layouts=layout),
        "output_layer_norm": WholeParameters(layout),
    }


def _distilbert_ends(layout: Placement) -> Plan:
    return {
        "distilbert.embeddings.word_embeddings": VocabularyParallel(WHOLE),
        "distilbert.embeddings.position_embeddings": WholeParameters(WHOLE),
        "distilbert.embeddings.LayerNorm": WholeParameters(WHOLE),
        "distilbert.embeddings": _cut_output(layout),
        "pre_classifier": ColwiseParallel(),
        "classifier": RowwiseParallel(),
    }


def _bert_block(layout: Placement) -> Plan:
    return {
        "attention.self": ShareInput(layout),
        "attention.self.query": ColwiseParallel(),
        "attention.self.key": ColwiseParallel(),
        "attention.self.value": ColwiseParallel(),
        "attention.output.dense": RowwiseParallel(output_layouts=layout),
        "attention.output.LayerNorm": WholeParameters(layout),
        "intermediate.dense": ColwiseParallel(input_layouts=layout),
        "output.dense": RowwiseParallel(output_layouts=layout),
        "output.LayerNorm": WholeParameters(layout),
    }


def _bert_ends(layout: Placement) -> Plan:
    return {
        "bert.embeddings.word_embeddings": VocabularyParallel(WHOLE),
        "bert.embeddings.position_embeddings": WholeParameters(WHOLE),
        "bert.embeddings.token_type_embeddings": WholeParameters(WHOLE),
        "bert.embeddings.LayerNorm": WholeParameters(WHOLE),
        "bert.embeddings": _cut_output(layout),
        "bert.pooler.dense": ColwiseParallel(),
        "classifier": RowwiseParallel(),
    }


def _llama_block(layout: Placement) -> Plan:
    return {
        "input_layernorm": WholeParameters(layout),
        "self_attn": ShareInput(layout),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=layout),
        "post_attention_layernorm": WholeParameters(layout),
        "mlp": ShareInput(layout),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=layout),
    }


def _llama_ends(layout: Placement) -> Plan:
    # The head is one matrix of a row a class: to cut it would cost a call to the other ranks.
    return {
        "model.embed_tokens": VocabularyParallel(layout),
        "model.norm": WholeParameters(WHOLE),
        "score": WholeParameters(WHOLE),
    }


def _cut_output(layout: Placement) -> ParallelStyle:
    return PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=layout)


FAMILIES = {
    "DistilBertForSequenceClassification": _Family(
        _distilbert_block, _distilbert_ends, ("attention.dropout",), ("ffn.dropout",), ("dropout",)
    ),
    "BertForSequenceClassification": _Family(
        _bert_block,
        _bert_ends,
        ("attention.self.dropout",),
        ("attention.output.dropout", "output.dropout"),
        ("dropout",),
    ),
    "LlamaForSequenceClassification": _Family(_llama_block, _llama_ends),
}
