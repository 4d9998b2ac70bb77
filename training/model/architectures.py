"""How each family of networks is run in parts: embeddings, blocks and head.

Parallel strategies put the parts on different processes, so they need to reach each part by name
(the names are in ``common/encoders.py``) and to run it separately. The head reads a single token of
each row. If that is the first token, the last block computes queries, the output projection and the
feed-forward layers for it alone, and keys and values for all tokens: logits and gradients stay the
same, for a seventh less matrix work in an encoder of six blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from common.encoders import BERT, DISTILBERT, LLAMA, LLAMA_LANGUAGE_MODEL, EncoderFamily
from common.text import segments_of, type_separator
from training.model.attention import row_attention
from training.model.packing import Packing

# A block multiplies by twelve matrices of (hidden, hidden): four in attention, eight in the
# feed-forward layers. If it computes one token, only those of keys and values still work on all
# tokens.
KEYS_AND_VALUES = 2 / 12


class Architecture:
    """One family of networks for sequence classification.

    Attributes:
        family: the names of its modules.
        last_block_work: matrix work of the last block, relative to a block that computes every
        token.
    """

    family: EncoderFamily
    last_block_work: float = 1.0

    @property
    def embeddings(self) -> str:
        return self.family.embeddings

    @property
    def blocks(self) -> str:
        return self.family.blocks

    @property
    def head(self) -> tuple[str, ...]:
        return self.family.head

    def embed(self, network: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
        """(batch, seq) -> (batch, seq, hidden)."""
        return network.get_submodule(self.embeddings)(input_ids)

    def context(
        self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> dict[str, Any]:
        """The arguments of every block besides the hidden states; of an encoder, which keys are
        padding.

        Args:
            hidden: (batch, seq, hidden).
            attention_mask: (batch, seq), 1 for a token; None if nothing is padded.
        """
        return {"attention_mask": key_mask(attention_mask)}

    def classify(
        self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The head, on the output of the last block: (batch, seq or 1, hidden) -> logits (batch,
        num_labels).
        """
        raise NotImplementedError

    def read_one_token(self, network: PreTrainedModel) -> None:
        """Make the last block compute only the token that the head reads, if that saves work."""

    def scores_shape(self, config: PreTrainedConfig, rows: int, length: int) -> tuple[int, ...]:
        """The shape of what :meth:`classify` returns for rows of this many tokens."""
        return rows, config.num_labels

    def head_work(self, network: PreTrainedModel) -> float:
        """Matrix work of the head, relative to a block that computes every token."""
        return 0.0  # it works on one token per row

    def run_blocks(
        self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """All blocks that this process has, in order: (batch, seq, hidden) -> (batch, seq or 1,
        hidden).
        """
        context = self.context(network, hidden, attention_mask)
        for block in blocks_of(network.get_submodule(self.blocks)):
            hidden = block(hidden, **context)
        return hidden

    def can_pack(self, network: PreTrainedModel, device: torch.device) -> bool:
        """Whether :meth:`logits` takes a :class:`Packing` instead of a mask, and gains by it."""
        return False

    def logits(
        self,
        network: PreTrainedModel,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | Packing | None,
    ) -> torch.Tensor:
        """The whole network: (batch, seq) -> (batch, num_labels)."""
        hidden = self.embed(network, input_ids)
        if isinstance(attention_mask, Packing):
            hidden = attention_mask.pack(hidden)
        hidden = self.run_blocks(network, hidden, attention_mask)
        return self.classify(network, hidden, attention_mask)


class FirstTokenArchitecture(Architecture):
    """An encoder whose head reads the first token of each row."""

    last_block_work = KEYS_AND_VALUES

    def can_pack(self, network: PreTrainedModel, device: torch.device) -> bool:
        if device.type != "cpu":
            return True
        # Without dropout, PyTorch's fused attention for CPUs takes a whole padded batch and keeps
        # no weights.
        block = network.get_submodule(self.blocks)[0]
        return any(block.get_submodule(name).p > 0 for name in self.family.attention_dropout)

    def classify(
        self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        pooled = network.get_submodule(self.family.pooler)(hidden[:, 0])  # (batch, hidden)
        pooled = {"relu": F.relu, "tanh": torch.tanh}[self.family.pooler_activation](pooled)
        return network.classifier(network.dropout(pooled))


class DistilBert(FirstTokenArchitecture):
    """DistilBERT (Sanh et al., arXiv 1910.01108)."""

    family = DISTILBERT

    def read_one_token(self, network: PreTrainedModel) -> None:
        last = network.get_submodule(self.blocks)[-1]
        last.forward = MethodType(_distilbert_first_token, last)
        last.attention.forward = MethodType(_distilbert_attend_first, last.attention)


class Bert(FirstTokenArchitecture):
    """BERT (Devlin et al., arXiv 1810.04805)."""

    family = BERT

    def embed(self, network: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
        embeddings = network.get_submodule(self.embeddings)
        return embeddings(input_ids, token_type_ids=token_types(network, input_ids))

    def read_one_token(self, network: PreTrainedModel) -> None:
        last = network.get_submodule(self.blocks)[-1]
        last.forward = MethodType(_bert_first_token, last)
        last.attention.self.forward = MethodType(_bert_attend_first, last.attention.self)


def token_types(network: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor | None:
    """Which text of a pair each token belongs to, int64 (batch, seq); None if the model reads no
    pairs, or no types.
    """
    separator = type_separator(vars(network.config))
    return None if separator is None else segments_of(input_ids, separator)


class Llama(Architecture):
    """Llama (Touvron et al., arXiv 2302.13971): a decoder, whose head reads each row's last token."""

    family = LLAMA

    def logits(
        self, network: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        # The head finds each row's last token by the mask, so there has to be one.
        return super().logits(network, input_ids, mask_of(input_ids, attention_mask))

    def context(
        self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, Any]:
        # Rotary positions, and no mask: padding is at the end of a row, where causal attention
        # never looks.
        positions = torch.arange(attention_mask.shape[1], device=hidden.device)[None]
        return {
            "attention_mask": None,
            "position_embeddings": network.model.rotary_emb(hidden, positions),
        }

    def classify(
        self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        rows = torch.arange(len(hidden), device=hidden.device)
        last = hidden[rows, attention_mask.sum(dim=1) - 1]
        # A norm acts on each token separately, so one token per row is enough.
        return network.score(network.model.norm(last))


class LlamaLanguageModel(Llama):
    """Llama with a head over the vocabulary, which reads every token."""

    family = LLAMA_LANGUAGE_MODEL

    def classify(
        self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        return network.lm_head(network.model.norm(hidden))

    def scores_shape(self, config: PreTrainedConfig, rows: int, length: int) -> tuple[int, ...]:
        return rows, length, config.vocab_size

    def head_work(self, network: PreTrainedModel) -> float:
        block = find_blocks(network)[0]
        return network.lm_head.weight.numel() / sum(
            parameter.numel() for parameter in block.parameters()
        )


ARCHITECTURES: dict[str, Architecture] = {
    architecture.family.network_class: architecture
    for architecture in (DistilBert(), Bert(), Llama(), LlamaLanguageModel())
}


def architecture_of(network: nn.Module) -> Architecture | None:
    return ARCHITECTURES.get(type(network).__name__)


def blocks_of(container: nn.Module) -> Iterable[nn.Module]:
    """Blocks in order; a pipeline stage keeps its blocks in a ModuleDict, by their numbers in the
    whole model.
    """
    return container.values() if isinstance(container, nn.ModuleDict) else container


def find_blocks(network: nn.Module) -> Sequence[nn.Module]:
    """The repeated blocks of any network: its module list with the most parameters; empty if it has
    no list.
    """
    lists = [
        module for module in network.modules() if isinstance(module, nn.ModuleList | nn.ModuleDict)
    ]
    largest = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=None)
    return list(blocks_of(largest)) if largest is not None else []


def mask_of(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The mask of a batch, int64 (batch, seq): all ones if it was left out because nothing is
    padded.
    """
    return torch.ones_like(input_ids) if attention_mask is None else attention_mask


def key_mask(attention_mask: torch.Tensor | Packing | None) -> torch.Tensor | Packing | None:
    """(batch, seq) -> bool (batch, 1, 1, seq), or None if nothing is padded; of packed rows, as it is."""
    if attention_mask is None or isinstance(attention_mask, Packing):
        return attention_mask
    # A pipeline always passes a mask, even for micro-batches without padding. On a GPU, to look
    # would synchronise.
    if attention_mask.device.type == "cpu" and bool(attention_mask.all()):
        return None
    return attention_mask.bool()[:, None, None, :]


Mask = torch.Tensor | Packing | None


def _first_tokens(hidden: torch.Tensor, mask: Mask) -> torch.Tensor:
    """(batch, seq, hidden), or packed (1, tokens, hidden) -> (batch, 1, hidden)."""
    return mask.first_tokens(hidden) if isinstance(mask, Packing) else hidden[:, :1]


def _attend_first(
    module: nn.Module, projections: Sequence[nn.Module], hidden: torch.Tensor, mask: Mask
) -> torch.Tensor:
    """Attention of the first token to all tokens: (batch, seq, hidden), or packed -> (batch, 1, hidden)."""

    def heads(
        projection: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor
    ) -> torch.Tensor:
        return projection(states).unflatten(-1, (-1, module.attention_head_size)).transpose(1, 2)

    query, key, value = projections
    context, _ = row_attention(
        module,
        heads(query, _first_tokens(hidden, mask)),
        heads(key, hidden),
        heads(value, hidden),
        mask,
        scaling=module.scaling,
        dropout=module.dropout.p if module.training else 0.0,
    )
    return context.flatten(2)


# The forward passes of the last block and of its attention, for the first token: (batch, seq,
# hidden) -> (batch, 1, hidden). They replace transformers' own on the modules themselves, so that
# hooks on those modules still run.


def _distilbert_attend_first(
    attention: nn.Module, hidden: torch.Tensor, attention_mask: Mask
) -> torch.Tensor:
    projections = (attention.q_lin, attention.k_lin, attention.v_lin)
    return attention.out_lin(_attend_first(attention, projections, hidden, attention_mask))


def _bert_attend_first(
    attention: nn.Module, hidden: torch.Tensor, attention_mask: Mask
) -> torch.Tensor:
    projections = (attention.query, attention.key, attention.value)
    return _attend_first(attention, projections, hidden, attention_mask)


def _distilbert_first_token(
    block: nn.Module, hidden: torch.Tensor, attention_mask: Mask
) -> torch.Tensor:
    attended = block.attention(hidden, attention_mask) + _first_tokens(hidden, attention_mask)
    first = block.sa_layer_norm(attended)
    return block.output_layer_norm(block.ffn(first) + first)


def _bert_first_token(block: nn.Module, hidden: torch.Tensor, attention_mask: Mask) -> torch.Tensor:
    context = block.attention.self(hidden, attention_mask)
    first = _first_tokens(hidden, attention_mask)
    return block.feed_forward_chunk(block.attention.output(context, first))
