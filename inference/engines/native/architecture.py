"""Which classifiers the kernels compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.encoders import BERT, DISTILBERT, EncoderFamily

LANES = 16  # floats per register, as in kernels.c
# A product of uint8 and int8 is at most 255 x 127, and the kernels sum them in int32.
MAX_INPUTS = (2**31 - 1) // (255 * 127)
ACTIVATIONS = {"gelu": 0, "relu": 1}  # values of the enum in kernels.c


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The sizes of a classifier that the kernels compute, and how transformers names its weights."""

    family: EncoderFamily
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_labels: int
    num_positions: int
    vocab_size: int
    activation: int  # one of ACTIVATIONS
    norm_epsilon: float

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def head_is_tanh(self) -> bool:
        """Whether the layer before the classifier ends in tanh (BERT) rather than ReLU (DistilBERT)."""
        return self.family.pooler_activation == "tanh"

    def block_prefix(self, index: int) -> str:
        """What the names of a block's weights begin with."""
        return f"{self.family.blocks}.{index}."

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EncoderShape:
        """Read a transformers ``config.json``.

        Raises:
            ValueError: The kernels do not compute this model; the message says why.
        """
        if config.get("is_decoder"):
            raise ValueError("is_decoder: the native engine computes encoders only, in which all tokens see each other")
        model_type = config.get("model_type")
        family = next((family for family in (DISTILBERT, BERT) if family.model_type == model_type), None)
        if family is None:
            raise ValueError(f"model_type {model_type!r}: the native engine computes bert and distilbert")
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise ValueError("position_embedding_type: the native engine computes absolute positions only")
        activation = config[family.activation_key]
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r}: the native engine computes {' and '.join(ACTIVATIONS)}")
        epsilon = family.norm_epsilon
        shape = cls(
            family=family,
            num_layers=config[family.num_layers_key],
            hidden_size=config[family.hidden_size_key],
            intermediate_size=config[family.intermediate_size_key],
            num_heads=config[family.num_heads_key],
            num_labels=len(config["id2label"]),
            num_positions=config["max_position_embeddings"],
            vocab_size=config["vocab_size"],
            activation=ACTIVATIONS[activation],
            norm_epsilon=config[epsilon] if isinstance(epsilon, str) else epsilon,
        )
        if shape.num_layers < 1:
            raise ValueError(f"{family.num_layers_key} {shape.num_layers}: the native engine needs at least 1")
        if shape.hidden_size % shape.num_heads:
            raise ValueError(
                f"{family.hidden_size_key} {shape.hidden_size}: must be a multiple of its {shape.num_heads} heads"
            )
        sizes = {
            family.hidden_size_key: shape.hidden_size,
            family.intermediate_size_key: shape.intermediate_size,
            "head size": shape.head_size,
        }
        for name, size in sizes.items():
            if size % LANES:
                raise ValueError(f"{name} {size}: the native engine needs multiples of {LANES}")
            if size > MAX_INPUTS:
                raise ValueError(
                    f"{name} {size}: the native engine sums at most {MAX_INPUTS} products without overflow"
                )
        return shape
