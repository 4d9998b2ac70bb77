"""Which classifiers the kernels compute, and how transformers names their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LANES = 16  # floats in a register, as in kernels.c
# A product of uint8 and int8 is at most 255 x 127, and the kernels sum them in int32.
MAX_INPUTS = (2**31 - 1) // (255 * 127)
ACTIVATIONS = {"gelu": 0, "relu": 1}  # values of the enum in kernels.c


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of the weights, without ``.weight`` and ``.bias`` but for the embedding tables."""

    words: str
    positions: str
    token_types: str | None
    embedding_norm: str
    block: str
    query: str
    key: str
    value: str
    attention_out: str
    attention_norm: str
    wide: str
    narrow: str
    output_norm: str
    pooler: str
    classifier: str


_DISTILBERT = WeightNames(
    words="distilbert.embeddings.word_embeddings.weight",
    positions="distilbert.embeddings.position_embeddings.weight",
    token_types=None,
    embedding_norm="distilbert.embeddings.LayerNorm",
    block="distilbert.transformer.layer.{}.",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_out="attention.out_lin",
    attention_norm="sa_layer_norm",
    wide="ffn.lin1",
    narrow="ffn.lin2",
    output_norm="output_layer_norm",
    pooler="pre_classifier",
    classifier="classifier",
)
_BERT = WeightNames(
    words="bert.embeddings.word_embeddings.weight",
    positions="bert.embeddings.position_embeddings.weight",
    token_types="bert.embeddings.token_type_embeddings.weight",
    embedding_norm="bert.embeddings.LayerNorm",
    block="bert.encoder.layer.{}.",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    wide="intermediate.dense",
    narrow="output.dense",
    output_norm="output.LayerNorm",
    pooler="bert.pooler.dense",
    classifier="classifier",
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a classifier that the kernels compute.

    Attributes:
        width: Features of a token.
        wide: Features inside the feed-forward layer.
        head_is_tanh: Whether the layer before the classifier ends in tanh (BERT) rather than ReLU (DistilBERT).
    """

    names: WeightNames
    num_blocks: int
    width: int
    wide: int
    num_heads: int
    num_labels: int
    num_positions: int
    vocab_size: int
    activation: int
    head_is_tanh: bool
    norm_epsilon: float

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.width // self.num_heads

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Architecture:
        """Read a transformers ``config.json``.

        Raises:
            ValueError: The kernels do not compute this model; the line says why.
        """
        if config.get("is_decoder"):
            raise ValueError("is_decoder: the native engine computes encoders only, in which all tokens see each other")
        model_type = config.get("model_type")
        if model_type == "distilbert":
            architecture = _distilbert(config)
        elif model_type == "bert":
            architecture = _bert(config)
        else:
            raise ValueError(f"model_type {model_type!r}: the native engine computes bert and distilbert")
        if architecture.num_blocks < 1:
            raise ValueError(f"blocks {architecture.num_blocks}: the native engine needs at least 1")
        if architecture.width % architecture.num_heads:
            raise ValueError(f"width {architecture.width} is no multiple of its {architecture.num_heads} heads")
        for name in ("width", "wide", "head_width"):
            size = getattr(architecture, name)
            if size % LANES:
                raise ValueError(f"{name} {size}: the native engine needs multiples of {LANES}")
            if size > MAX_INPUTS:
                raise ValueError(
                    f"{name} {size}: the native engine sums at most {MAX_INPUTS} products without overflow"
                )
        return architecture


def _distilbert(config: Mapping[str, Any]) -> Architecture:
    return Architecture(
        names=_DISTILBERT,
        num_blocks=config["n_layers"],
        width=config["dim"],
        wide=config["hidden_dim"],
        num_heads=config["n_heads"],
        num_labels=len(config["id2label"]),
        num_positions=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        activation=_activation(config["activation"]),
        head_is_tanh=False,
        norm_epsilon=1e-12,
    )


def _bert(config: Mapping[str, Any]) -> Architecture:
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError("position_embedding_type: the native engine computes absolute positions only")
    return Architecture(
        names=_BERT,
        num_blocks=config["num_hidden_layers"],
        width=config["hidden_size"],
        wide=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_labels=len(config["id2label"]),
        num_positions=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        activation=_activation(config["hidden_act"]),
        head_is_tanh=True,
        norm_epsilon=config["layer_norm_eps"],
    )


def _activation(name: str) -> int:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r}: the native engine computes {' and '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
