"""BERT and DistilBERT as a plain torch module that computes only what the answer needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from common.encoders import BERT, DISTILBERT
from common.text import segments_of, type_separator
from inference.engines.native.architecture import ACTIVATIONS, EncoderShape
from inference.engines.torch_engine import build_model, token_types

# Softmax makes it exactly 0 in float32. Unlike infinity, it gives no NaN for a text that is all
# padding.
_MASKED = -1e9
_ACTIVATIONS = {ACTIVATIONS["gelu"]: nn.GELU, ACTIVATIONS["relu"]: nn.ReLU}
_INT8_MAX = 127

Config = Mapping[str, Any]
Weights = Mapping[str, Tensor]


def build_module(config: Config, weights: Weights, *, int8: bool) -> tuple[nn.Module, str]:
    """Return the module to export and the kind of graph: ``lean`` if `EncoderGraph` can compute it,
    else ``whole``.
    """
    try:
        shape = EncoderShape.of(config)
    except ValueError:
        shape = None
    if shape is None or shape.family not in (DISTILBERT, BERT):
        return _WholeModel(config, weights).eval(), "whole"
    return EncoderGraph(shape, weights, small_embeddings=int8).eval(), "lean"


class _WholeModel(nn.Module):
    """The transformers classifier itself, for architectures that `EncoderGraph` cannot compute."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__()
        self.model = build_model({**config, "attn_implementation": "eager"}, dict(weights))
        self.separator = type_separator(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        types = token_types(self.separator, input_ids)
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **types).logits


class EncoderGraph(nn.Module):
    """The classifier, with a last block that computes the first token only.

    The head reads nothing but the first token. So the last block computes keys and values for all
    tokens, but the query, the output projection and the feed-forward layers for that one. The
    logits stay the same, and an encoder of six blocks saves a seventh of its work.

    With ``small_embeddings``, word embeddings are int8 with one scale per word, a quarter of their
    size.
    """

    def __init__(self, shape: EncoderShape, weights: Weights, *, small_embeddings: bool) -> None:
        super().__init__()
        family = shape.family
        words = weights[f"{family.word_embeddings}.weight"].float()
        self.word_embeddings = (
            _SmallEmbedding(words) if small_embeddings else nn.Embedding.from_pretrained(words)
        )
        positions = weights[f"{family.position_embeddings}.weight"].float()
        self.separator = shape.separator
        if family.token_type_embeddings:
            # Type 0 is added to the positions; only the tokens of a pair's second text differ from
            # it.
            types = weights[f"{family.token_type_embeddings}.weight"].float()
            positions = positions + types[0]
            if self.separator is not None:
                self.register_buffer("second_text", types[1] - types[0])
        self.register_buffer("position_embeddings", positions)
        self.embedding_norm = _norm(shape, weights, family.embedding_norm)
        last = shape.num_layers - 1
        self.blocks = nn.ModuleList(
            _Block(shape, weights, i, first_token_only=i == last) for i in range(shape.num_layers)
        )
        self.pooler = _linear(weights, family.pooler)
        self.pooler_activation = nn.Tanh() if family.pooler_activation == "tanh" else nn.ReLU()
        self.classifier = _linear(weights, family.classifier)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits (texts, labels) from token ids and mask, both int64 (texts, tokens)."""
        positions = self.position_embeddings[: input_ids.shape[1]]
        hidden = self.word_embeddings(input_ids) + positions  # (texts, tokens, hidden)
        if self.separator is not None:
            hidden = hidden + segments_of(input_ids, self.separator)[..., None] * self.second_text
        hidden = self.embedding_norm(hidden)
        # Added to the scores of every head and query: (texts, 1, 1, tokens).
        mask = ((1 - attention_mask) * _MASKED)[:, None, None, :].to(hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.classifier(self.pooler_activation(self.pooler(hidden[:, 0])))


class _Block(nn.Module):
    def __init__(
        self, shape: EncoderShape, weights: Weights, index: int, *, first_token_only: bool
    ) -> None:
        super().__init__()
        family, prefix = shape.family, shape.block_prefix(index)
        self.hidden_size = shape.hidden_size
        self.num_heads, self.head_size = shape.num_heads, shape.head_size
        # Layers with the same input become one matrix product. In the last block the query reads
        # another input than keys and values: the first token.
        self.query = _linear(weights, prefix + family.query) if first_token_only else None
        joined = [family.key, family.value]
        if not first_token_only:
            joined.insert(0, family.query)
        self.projection = _linear(weights, *(prefix + name for name in joined))
        self.attention_output = _linear(weights, prefix + family.attention_output)
        self.attention_norm = _norm(shape, weights, prefix + family.attention_norm)
        self.intermediate = _linear(weights, prefix + family.intermediate)
        self.activation = _ACTIVATIONS[shape.activation]()
        self.output = _linear(weights, prefix + family.output)
        self.output_norm = _norm(shape, weights, prefix + family.output_norm)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        if self.query is None:
            query, key, value = self.projection(hidden).split(self.hidden_size, dim=-1)
        else:
            key, value = self.projection(hidden).split(self.hidden_size, dim=-1)
            hidden = hidden[:, :1]
            query = self.query(hidden)
        # (texts, heads, tokens, head size); the query has one token in the last block.
        query, key, value = (self._by_head(part) for part in (query, key, value))
        scores = query @ key.transpose(-1, -2) * self.head_size**-0.5 + mask
        context = (scores.softmax(-1) @ value).transpose(1, 2).reshape(hidden.shape)
        hidden = self.attention_norm(hidden + self.attention_output(context))
        return self.output_norm(hidden + self.output(self.activation(self.intermediate(hidden))))

    def _by_head(self, part: Tensor) -> Tensor:
        # (texts, tokens, hidden) -> (texts, heads, tokens, head size). ONNX Runtime recognises this
        # form, in which only the last size is split, and fuses the operators around it.
        return part.view(part.shape[0], part.shape[1], self.num_heads, self.head_size).transpose(
            1, 2
        )


class _SmallEmbedding(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        scales = (
            table.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / _INT8_MAX
        )
        self.register_buffer("scales", scales)
        self.register_buffer("table", (table / scales).round().to(torch.int8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids].float() * self.scales[ids]


def _linear(weights: Weights, *names: str) -> nn.Linear:
    weight = torch.cat([weights[f"{name}.weight"] for name in names]).float()
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.load_state_dict(
        {"weight": weight, "bias": torch.cat([weights[f"{name}.bias"] for name in names]).float()}
    )
    return linear


def _norm(shape: EncoderShape, weights: Weights, name: str) -> nn.LayerNorm:
    norm = nn.LayerNorm(shape.hidden_size, eps=shape.norm_epsilon)
    norm.load_state_dict({kind: weights[f"{name}.{kind}"].float() for kind in ("weight", "bias")})
    return norm
