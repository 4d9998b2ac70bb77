"""Which classifiers the kernels compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.encoders import (
    BERT,
    CAMEMBERT,
    DISTILBERT,
    ELECTRA,
    MODERNBERT,
    MPNET,
    ROBERTA,
    XLM_ROBERTA,
    EncoderFamily,
    max_positions,
)
from common.text import type_separator

FAMILIES = (DISTILBERT, BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, ELECTRA, MPNET, MODERNBERT)
LANES = 16  # floats that one step of the kernels takes, see model.h
# Products in the kernels' int32 sums: of 182 at most, or of 128 with ARM's signed bytes, and 45.
MAX_INPUTS = (2**31 - 1) // (182 * 45) // 2
ACTIVATIONS = {"gelu": 0, "relu": 1}  # values of the enum in model.h
_HEAD_ACTIVATIONS = ACTIVATIONS | {"tanh": 2}
# Bounds of a config.json that may be wrong: a size within them costs no memory to speak of before
# the tensors are there to compare it with.
_MOST_LAYERS, _MOST = 1_000, 2**20


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The sizes of a classifier that the kernels compute, and how transformers
    names its weights.
    """

    family: EncoderFamily
    num_layers: int
    hidden_size: int
    embedding_size: int
    intermediate_size: int
    num_heads: int
    num_labels: int
    num_positions: int  # tokens of the longest text
    vocab_size: int
    activation: int  # one of ACTIVATIONS
    head_activation: int  # one of _HEAD_ACTIVATIONS
    norm_epsilon: float
    padding_id: int | None  # gets the first position; the others count from behind it
    separator: int | None  # behind it begins a pair's second text, whose tokens have another type
    mean_pool: bool  # the head reads the mean of a text's tokens instead of the first one
    windows: tuple[int, ...]  # of each layer: how many tokens one sees to either side, 0 for all
    rotary_thetas: tuple[float | None, ...]  # of each layer with rotary positions

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    def block_prefix(self, index: int) -> str:
        """What the names of a block's weights begin with."""
        return f"{self.family.blocks}.{index}."

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EncoderShape:
        """Read a transformers ``config.json``.

        Raises:
            ValueError: The kernels do not compute this model; the message says why.
        """
        try:
            return cls._of(config)
        except KeyError as error:  # transformers has a default for each
            raise ValueError(
                f"config.json has no {error.args[0]}, which the native engine needs"
            ) from error
        except (
            AttributeError,
            OverflowError,
            TypeError,
        ) as error:  # such as a text where a number belongs
            raise ValueError(f"config.json has a value of the wrong type ({error})") from error

    @classmethod
    def _of(cls, config: Mapping[str, Any]) -> EncoderShape:
        if config.get("is_decoder"):
            raise ValueError(
                "is_decoder: the native engine supports encoders only, in which all tokens see each other"
            )
        model_type = config.get("model_type")
        family = next((family for family in FAMILIES if family.model_type == model_type), None)
        if family is None:
            known = ", ".join(family.model_type for family in FAMILIES)
            raise ValueError(f"model_type {model_type!r}: the native engine supports {known}")
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise ValueError(
                "position_embedding_type: the native engine supports absolute positions only"
            )
        num_layers = config[family.num_layers_key]
        num_positions = max_positions(config)
        embedding_size = config[family.hidden_size_key]
        if family.embedding_projection:
            embedding_size = config.get("embedding_size", embedding_size)
        epsilon, padding = (
            config[key] if isinstance(key, str) else key
            for key in (family.norm_epsilon, family.padding_id)
        )
        # The kernels would read past the end of an array for a size of 0, so this comes before all
        # arithmetic.
        for name, size, most in (
            (family.num_layers_key, num_layers, _MOST_LAYERS),
            (family.hidden_size_key, config[family.hidden_size_key], _MOST),
            ("embedding_size", embedding_size, _MOST),
            (family.intermediate_size_key, config[family.intermediate_size_key], _MOST),
            (family.num_heads_key, config[family.num_heads_key], _MOST),
            ("vocab_size", config["vocab_size"], _MOST),
            ("max_position_embeddings", num_positions, _MOST),
            ("id2label", len(config["id2label"]), _MOST),
        ):
            _check_whole(name, size, 1, most)
        if padding is not None:
            _check_whole("pad_token_id", padding, 0, config["vocab_size"] - 1)
        _check_positive("norm epsilon", epsilon)
        windows, thetas = (0,) * num_layers, (None,) * num_layers
        head_activation = family.pooler_activation
        if family is MODERNBERT:
            windows, thetas = _modernbert_attention(config)
            head_activation = config.get("classifier_activation", "gelu")
        shape = cls(
            family=family,
            num_layers=num_layers,
            hidden_size=config[family.hidden_size_key],
            embedding_size=embedding_size,
            intermediate_size=config[family.intermediate_size_key],
            num_heads=config[family.num_heads_key],
            num_labels=len(config["id2label"]),
            num_positions=num_positions,
            vocab_size=config["vocab_size"],
            activation=_activation(
                family.activation_key, config[family.activation_key], ACTIVATIONS
            ),
            head_activation=_activation(
                "classifier_activation", head_activation, _HEAD_ACTIVATIONS
            ),
            norm_epsilon=epsilon,
            padding_id=padding,
            separator=type_separator(config) if family.token_type_embeddings else None,
            mean_pool=family is MODERNBERT and config.get("classifier_pooling", "cls") == "mean",
            windows=windows,
            rotary_thetas=thetas,
        )
        shape._check_sizes()
        return shape

    def _check_sizes(self) -> None:
        family = self.family
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"{family.hidden_size_key} {self.hidden_size}: must be a multiple of its {self.num_heads} heads"
            )
        # Rotary positions turn the first half of a head's features against the second.
        head_multiple = 2 * LANES if any(self.rotary_thetas) else LANES
        for name, size, multiple in (
            (family.hidden_size_key, self.hidden_size, LANES),
            ("embedding_size", self.embedding_size, LANES),
            (family.intermediate_size_key, self.intermediate_size, LANES),
            ("head size", self.head_size, head_multiple),
        ):
            if size % multiple:
                raise ValueError(f"{name} {size}: the native engine needs multiples of {multiple}")
            if size > MAX_INPUTS:
                raise ValueError(
                    f"{name} {size}: the native engine sums at most {MAX_INPUTS} products without overflow"
                )


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"{name} {value!r:.80}: the native engine needs a whole number from {least} to {most}"
        )


def _check_positive(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{name} {value!r:.80}: the native engine needs a number greater than 0")


def _activation(key: str, name: str, known: Mapping[str, int]) -> int:
    if name not in known:
        raise ValueError(f"{key} {name!r}: the native engine supports {' and '.join(known)}")
    return known[name]


def _modernbert_attention(
    config: Mapping[str, Any],
) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    """Return the window and the base of the rotary frequencies of every layer, from old and new
    forms of the file.
    """
    every, window = config.get("global_attn_every_n_layers", 3), config.get("local_attention", 128)
    _check_whole("global_attn_every_n_layers", every, 1, _MOST)
    _check_whole("local_attention", window, 2, _MOST)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer % every else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    if len(kinds) != config["num_hidden_layers"] or not {
        "full_attention",
        "sliding_attention",
    }.issuperset(kinds):
        what = f"layer_types {kinds!r:.200}: must name full_attention or sliding_attention for each of the"
        raise ValueError(f"{what} {config['num_hidden_layers']} layers")
    thetas: dict[str, float] = {}
    for kind, old_key, usual in (
        ("full_attention", "global_rope_theta", 160_000.0),
        ("sliding_attention", "local_rope_theta", 10_000.0),
    ):
        parameters = (config.get("rope_parameters") or {}).get(kind) or {}
        rope_type = parameters.get("rope_type", "default")
        if rope_type != "default" or config.get("rope_scaling"):
            raise ValueError(
                f"rope_type {rope_type!r}: the native engine supports the default rotary positions only"
            )
        # A layer kind without a theta of its own has the usual one of the family.
        theta = parameters.get("rope_theta") or config.get(old_key) or usual
        _check_positive("rope_theta", theta)
        thetas[kind] = float(theta)
    return (
        tuple(window // 2 if kind == "sliding_attention" else 0 for kind in kinds),
        tuple(thetas[kind] for kind in kinds),
    )
