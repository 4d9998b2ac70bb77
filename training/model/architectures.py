"""Architectures: what must be known of a family of networks to take it apart and put it together again.

A model is embeddings, blocks and a head. Whoever lays one over processes needs to reach each part by name and to run
it alone; here stands how, one class a family. The head reads one token, so where that token is the first, the last
block computes its query, output projection and feed-forward for it alone (its keys and values for all): the same
logits and gradients for a seventh less matrix work in an encoder of six blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from training.model.dropout import RowDropout

ROW_ATTENTION = "row_dropout"
# The share of a block's matrices, of hidden x hidden each: four of attention, eight of the feed-forward layers.
KEYS_AND_VALUES = 2 / 12


class Architecture:
    """One family of networks for sequence classification.

    ``embeddings``, ``blocks``, ``head``: dotted names of the modules that hold each part's parameters;
    ``last_block_work``: matrix work of the last block, in blocks that compute every token.
    """

    embeddings: str
    blocks: str
    head: tuple[str, ...]
    last_block_work: float = 1.0

    def embed(self, network: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
        """(batch, seq) -> (batch, seq, hidden)."""
        return network.get_submodule(self.embeddings)(input_ids)

    def context(
        self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> dict[str, Any]:
        """What every block is given beside the hidden states: in an encoder, which keys are padding.

        Args:
            hidden: (batch, seq, hidden).
            attention_mask: (batch, seq), 1 for a token; None where nothing is padded.
        """
        return {"attention_mask": key_mask(attention_mask)}

    def classify(
        self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits, (batch, num_labels), from what the last block gave."""
        raise NotImplementedError

    def read_one_token(self, network: PreTrainedModel) -> None:
        """Make the last block compute only the token that the head reads, where that saves work."""

    def run_blocks(
        self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """All blocks that are here, in their order: (batch, seq, hidden) -> (batch, seq or 1, hidden)."""
        context = self.context(network, hidden, attention_mask)
        for block in blocks_of(network.get_submodule(self.blocks)):
            hidden = block(hidden, **context)
        return hidden

    def logits(
        self, network: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The whole way: (batch, seq) -> (batch, num_labels)."""
        hidden = self.run_blocks(network, self.embed(network, input_ids), attention_mask)
        return self.classify(network, hidden, attention_mask)


class DistilBert(Architecture):
    """DistilBERT (Sanh et al., arXiv 1910.01108)."""

    embeddings = "distilbert.embeddings"
    blocks = "distilbert.transformer.layer"
    head = ("pre_classifier", "classifier")
    last_block_work = KEYS_AND_VALUES

    def classify(
        self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """From the first token."""
        return network.classifier(network.dropout(F.relu(network.pre_classifier(hidden[:, 0]))))

    def read_one_token(self, network: PreTrainedModel) -> None:
        """The first."""
        last = network.distilbert.transformer.layer[-1]
        last.forward = MethodType(_distilbert_first_token, last)
        last.attention.forward = MethodType(_distilbert_attend_first, last.attention)


class Bert(Architecture):
    """BERT (Devlin et al., arXiv 1810.04805)."""

    embeddings = "bert.embeddings"
    blocks = "bert.encoder.layer"
    head = ("bert.pooler", "classifier")
    last_block_work = KEYS_AND_VALUES

    def classify(
        self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """From the first token, pooled."""
        return network.classifier(network.dropout(network.bert.pooler(hidden[:, :1])))

    def read_one_token(self, network: PreTrainedModel) -> None:
        """The first."""
        last = network.bert.encoder.layer[-1]
        last.forward = MethodType(_bert_first_token, last)
        last.attention.self.forward = MethodType(_bert_attend_first, last.attention.self)


class Llama(Architecture):
    """Llama (Touvron et al., arXiv 2302.13971): a decoder, whose head reads each row's last token."""

    embeddings = "model.embed_tokens"
    blocks = "model.layers"
    head = ("model.norm", "score")

    def logits(
        self, network: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """As :meth:`Architecture.logits`; the mask tells how long each row is, so there has to be one."""
        return super().logits(network, input_ids, mask_of(input_ids, attention_mask))

    def context(self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
        """Rotary positions. No mask: padding stands at the end, where causal attention never looks."""
        positions = torch.arange(attention_mask.shape[1], device=hidden.device)[None]
        return {"attention_mask": None, "position_embeddings": network.model.rotary_emb(hidden, positions)}

    def classify(self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """From the last token of each row, normalised after it is chosen."""
        rows = torch.arange(len(hidden), device=hidden.device)
        return network.score(network.model.norm(hidden[rows, attention_mask.sum(dim=1) - 1]))


ARCHITECTURES: dict[str, Architecture] = {
    "DistilBertForSequenceClassification": DistilBert(),
    "BertForSequenceClassification": Bert(),
    "LlamaForSequenceClassification": Llama(),
}


def architecture_of(network: nn.Module) -> Architecture | None:
    """The family of a network, or None where it is not known."""
    return ARCHITECTURES.get(type(network).__name__)


def blocks_of(container: nn.Module) -> Iterable[nn.Module]:
    """Blocks in their order; a pipeline stage keeps its own in a ModuleDict, under their numbers."""
    return container.values() if isinstance(container, nn.ModuleDict) else container  # type: ignore[return-value]


def find_blocks(network: nn.Module) -> Sequence[nn.Module]:
    """The repeated blocks of any network: its module list with the most parameters; none where it has no list."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList | nn.ModuleDict)]
    largest = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=None)
    return list(blocks_of(largest)) if largest is not None else []


def mask_of(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The mask of a batch, of ones where there is none since nothing is padded: int64, (batch, seq)."""
    return torch.ones_like(input_ids) if attention_mask is None else attention_mask


def key_mask(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """(batch, seq) -> bool (batch, 1, 1, seq), or None where nothing is padded."""
    if attention_mask is None:
        return None
    # A pipeline has one mask for micro-batches with and without padding. A GPU is not asked: that would wait for it.
    if attention_mask.device.type == "cpu" and bool(attention_mask.all()):
        return None
    return attention_mask.bool()[:, None, None, :]


def row_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention for ``transformers``, with the module's :class:`RowDropout` on the CPU.

    Args:
        query, key, value: (batch, heads, queries or keys, head size); keys may have fewer heads.
        attention_mask: bool, broadcastable to (batch, heads, queries, keys), or None: then a module that says
            ``is_causal`` looks back only.

    Returns:
        (batch, queries, heads, head size), and None for the weights.
    """
    drop = getattr(module, "dropout", None)
    if dropout == 0 or not isinstance(drop, RowDropout) or not drop.masks_attention(query):
        is_causal = attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", False)
        shares_keys = query.shape[1] != key.shape[1]
        context = F.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, is_causal, scale=scaling, enable_gqa=shares_keys
        )
        return context.transpose(1, 2).contiguous(), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = drop(scores.softmax(dim=-1))
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


AttentionInterface.register(ROW_ATTENTION, row_attention)
AttentionMaskInterface.register(ROW_ATTENTION, sdpa_mask)


def _attend_first(
    module: nn.Module, projections: Sequence[nn.Module], hidden: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """What the first token gathers from all tokens: (batch, seq, hidden) -> (batch, 1, hidden)."""

    def heads(projection: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
        return projection(states).unflatten(-1, (-1, module.attention_head_size)).transpose(1, 2)

    query, key, value = projections
    context, _ = row_attention(
        module,
        heads(query, hidden[:, :1]),
        heads(key, hidden),
        heads(value, hidden),
        mask,
        scaling=module.scaling,
        dropout=module.dropout.p if module.training else 0.0,
    )
    return context.flatten(2)


def _distilbert_attend_first(
    attention: nn.Module, hidden: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    projections = (attention.q_lin, attention.k_lin, attention.v_lin)
    return attention.out_lin(_attend_first(attention, projections, hidden, attention_mask))


def _bert_attend_first(attention: nn.Module, hidden: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    projections = (attention.query, attention.key, attention.value)
    return _attend_first(attention, projections, hidden, attention_mask)


def _distilbert_first_token(
    block: nn.Module, hidden: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """The forward pass of DistilBERT's block for the first token: (batch, seq, hidden) -> (batch, 1, hidden)."""
    first = block.sa_layer_norm(block.attention(hidden, attention_mask) + hidden[:, :1])
    return block.output_layer_norm(block.ffn(first) + first)


def _bert_first_token(block: nn.Module, hidden: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The forward pass of BERT's block for the first token: (batch, seq, hidden) -> (batch, 1, hidden)."""
    context = block.attention.self(hidden, attention_mask)
    return block.feed_forward_chunk(block.attention.output(context, hidden[:, :1]))
