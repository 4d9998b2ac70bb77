"""BERT and DistilBERT classifiers as one plain torch module that computes only what the answer needs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from inference.engines.native.architecture import Architecture

# Softmax turns it into exactly 0 in float32, and unlike infinity it survives a text that is all padding.
_MASKED = -1e9
_ACTIVATIONS = (nn.GELU, nn.ReLU)  # by `Architecture.activation`
_INT8_MAX = 127

Weights = Mapping[str, Tensor]


class EncoderGraph(nn.Module):
    """The classifier with a last block that computes the first token only.

    The head reads nothing but the first token. So the last block needs keys and values of all tokens, but query,
    output projection and feed-forward of that one alone: a seventh of a six-block encoder saved, the logits the same.
    """

    def __init__(self, architecture: Architecture, weights: Weights, *, small_embeddings: bool) -> None:
        """Lay the weights out.

        Args:
            architecture: Sizes, and the names of the weights.
            weights: The state dict, names as transformers gives them.
            small_embeddings: Keep word embeddings as int8 with one scale a word, a quarter of their size.
        """
        super().__init__()
        names = architecture.names
        words = weights[names.words].float()
        self.words = _SmallEmbedding(words) if small_embeddings else nn.Embedding.from_pretrained(words)
        positions = weights[names.positions].float()
        # Every token of a lone text has type 0: its embedding may as well be part of the position.
        types = weights[names.token_types].float()[0] if names.token_types else 0
        self.register_buffer("positions", positions + types)
        self.embedding_norm = _norm(architecture, weights, names.embedding_norm)
        last = architecture.num_blocks - 1
        self.blocks = nn.ModuleList(
            _Block(architecture, weights, i, first_token_only=i == last) for i in range(architecture.num_blocks)
        )
        self.pooler = _linear(weights, names.pooler)
        self.pooler_activation = nn.Tanh() if architecture.head_is_tanh else nn.ReLU()
        self.classifier = _linear(weights, names.classifier)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits (texts, labels) from token ids and mask, both int64 (texts, tokens)."""
        hidden = self.embedding_norm(self.words(input_ids) + self.positions[: input_ids.shape[1]])
        # Added to the scores of every head and query: (texts, 1, 1, tokens).
        mask = ((1 - attention_mask) * _MASKED)[:, None, None, :].to(hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.classifier(self.pooler_activation(self.pooler(hidden[:, 0])))


class _Block(nn.Module):
    def __init__(self, architecture: Architecture, weights: Weights, index: int, *, first_token_only: bool) -> None:
        super().__init__()
        names = architecture.names
        prefix = names.block.format(index)
        self.width, self.num_heads, self.head_width = (
            architecture.width,
            architecture.num_heads,
            architecture.head_width,
        )
        self.first_token_only = first_token_only
        # What reads the same input is one product; the first token's query does not.
        reads_all = [names.key, names.value] if first_token_only else [names.query, names.key, names.value]
        self.query = _linear(weights, prefix + names.query) if first_token_only else None
        self.projection = _linear(weights, *(prefix + name for name in reads_all))
        self.attention_out = _linear(weights, prefix + names.attention_out)
        self.attention_norm = _norm(architecture, weights, prefix + names.attention_norm)
        self.wide = _linear(weights, prefix + names.wide)
        self.activation = _ACTIVATIONS[architecture.activation]()
        self.narrow = _linear(weights, prefix + names.narrow)
        self.output_norm = _norm(architecture, weights, prefix + names.output_norm)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        if self.query is None:
            query, key, value = self.projection(hidden).split(self.width, dim=-1)
        else:
            key, value = self.projection(hidden).split(self.width, dim=-1)
            hidden = hidden[:, :1]
            query = self.query(hidden)
        query, key, value = (self._by_head(part) for part in (query, key, value))
        scores = query @ key.transpose(-1, -2) * self.head_width**-0.5 + mask
        context = (scores.softmax(-1) @ value).transpose(1, 2).reshape(hidden.shape)
        hidden = self.attention_norm(hidden + self.attention_out(context))
        return self.output_norm(hidden + self.narrow(self.activation(self.wide(hidden))))

    def _by_head(self, part: Tensor) -> Tensor:
        # In this form ONNX Runtime sees that only the last size changes, and fuses what lies around it.
        return part.view(part.shape[0], part.shape[1], self.num_heads, self.head_width).transpose(1, 2)


class _SmallEmbedding(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        scales = table.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / _INT8_MAX
        self.register_buffer("scales", scales)
        self.register_buffer("table", (table / scales).round().to(torch.int8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids].float() * self.scales[ids]


def _linear(weights: Weights, *names: str) -> nn.Linear:
    weight = torch.cat([weights[f"{name}.weight"] for name in names]).float()
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.load_state_dict({"weight": weight, "bias": torch.cat([weights[f"{name}.bias"] for name in names]).float()})
    return linear


def _norm(architecture: Architecture, weights: Weights, name: str) -> nn.LayerNorm:
    norm = nn.LayerNorm(architecture.width, eps=architecture.norm_epsilon)
    norm.load_state_dict({kind: weights[f"{name}.{kind}"].float() for kind in ("weight", "bias")})
    return norm
