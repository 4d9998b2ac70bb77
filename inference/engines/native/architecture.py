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
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"  # kinds of ModernBERT's layers
# Bounds of a config.json that may be wrong: a size within them costs no memory to speak of before
# the tensors are there to compare it with.
_MOST_LAYERS, _MOST = 1_000, 2**20


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The sizes of a classifier that the kernels compute, and the names of its weights."""

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
    # Gets the first position; the others count from behind it.
    padding_id: int | None
    # Behind it begins a pair's second text, whose tokens have another type.
    separator: int | None
    # Whether the head reads the mean of a text's tokens instead of the first one.
    mean_pool: bool
    # Per layer: how many tokens a token sees to either side, 0 for all.
    windows: tuple[int, ...]
    # Per layer: the base of the frequencies, None for a layer without rotary positions.
    rotary_thetas: tuple[float | None, ...]

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
            what = f"config.json has no {error.args[0]}, which the native engine needs"
            raise ValueError(what) from error
        # Such as a text where a number belongs: a config.json may come from anybody.
        except (AttributeError, OverflowError, TypeError) as error:
            raise ValueError(f"config.json has a value of the wrong type ({error})") from error

    @classmethod
    def _of(cls, config: Mapping[str, Any]) -> EncoderShape:
        family = _supported_family(config)
        epsilon, padding = (
            config[key] if isinstance(key, str) else key
            for key in (family.norm_epsilon, family.padding_id)
        )
        sizes = _checked_sizes(config, family)
        if padding is not None:
            _check_whole("pad_token_id", padding, 0, sizes["vocab_size"] - 1)
        _check_positive("norm epsilon", epsilon)
        windows, thetas = (0,) * sizes["num_layers"], (None,) * sizes["num_layers"]
        head_activation = family.pooler_activation
        if family is MODERNBERT:
            windows, thetas = _modernbert_attention(config)
            head_activation = config.get("classifier_activation", "gelu")
        key = family.activation_key
        shape = cls(
            family=family,
            **sizes,
            activation=_activation(key, config[key], ACTIVATIONS),
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
            what = f"{family.hidden_size_key} {self.hidden_size}"
            raise ValueError(f"{what}: must be a multiple of its {self.num_heads} heads")
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
                what = f"{name} {size}: the native engine sums at most {MAX_INPUTS}"
                raise ValueError(f"{what} products without overflow")


def _supported_family(config: Mapping[str, Any]) -> EncoderFamily:
    if config.get("is_decoder"):
        what = "is_decoder: the native engine supports encoders only"
        raise ValueError(f"{what}, in which all tokens see each other")
    model_type = config.get("model_type")
    family = next((family for family in FAMILIES if family.model_type == model_type), None)
    if family is None:
        known = ", ".join(family.model_type for family in FAMILIES)
        raise ValueError(f"model_type {model_type!r}: the native engine supports {known}")
    if config.get("position_embedding_type", "absolute") != "absolute":
        what = "position_embedding_type: the native engine supports absolute positions only"
        raise ValueError(what)
    return family


def _checked_sizes(config: Mapping[str, Any], family: EncoderFamily) -> dict[str, int]:
    """The sizes by their names in `EncoderShape`, each a whole number within its bounds."""
    embedding_size = hidden_size = config[family.hidden_size_key]
    if family.embedding_projection:
        embedding_size = config.get("embedding_size", hidden_size)
    # Field, name in config.json, value, the most that it may be.
    sizes = (
        ("num_layers", family.num_layers_key, config[family.num_layers_key], _MOST_LAYERS),
        ("hidden_size", family.hidden_size_key, hidden_size, _MOST),
        ("embedding_size", "embedding_size", embedding_size, _MOST),
        (
            "intermediate_size",
            family.intermediate_size_key,
            config[family.intermediate_size_key],
            _MOST,
        ),
        ("num_heads", family.num_heads_key, config[family.num_heads_key], _MOST),
        ("vocab_size", "vocab_size", config["vocab_size"], _MOST),
        ("num_positions", "max_position_embeddings", max_positions(config), _MOST),
        ("num_labels", "id2label", len(config["id2label"]), _MOST),
    )
    # The kernels would read past the end of an array for a size of 0, so this comes before all
    # arithmetic.
    for _, name, size, most in sizes:
        _check_whole(name, size, 1, most)
    return {field: size for field, _, size, _ in sizes}


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    # Not isinstance: True is an int too.
    if type(value) is not int or not least <= value <= most:
        what = f"{name} {value!r:.80}: the native engine needs a whole number"
        raise ValueError(f"{what} from {least} to {most}")


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
    num_layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [
        _LOCAL if layer % every else _GLOBAL for layer in range(num_layers)
    ]
    if len(kinds) != num_layers or not {_GLOBAL, _LOCAL}.issuperset(kinds):
        what = f"layer_types {kinds!r:.200}: must name {_GLOBAL} or {_LOCAL}"
        raise ValueError(f"{what} for each of the {num_layers} layers")
    thetas = {
        _GLOBAL: _rotary_theta(config, _GLOBAL, "global_rope_theta", 160_000.0),
        _LOCAL: _rotary_theta(config, _LOCAL, "local_rope_theta", 10_000.0),
    }
    # A window of 128 tokens reaches 64 to either side.
    return (
        tuple(window // 2 if kind == _LOCAL else 0 for kind in kinds),
        tuple(thetas[kind] for kind in kinds),
    )


def _rotary_theta(config: Mapping[str, Any], kind: str, old_key: str, usual: float) -> float:
    parameters = (config.get("rope_parameters") or {}).get(kind) or {}
    rope_type = parameters.get("rope_type", "default")
    if rope_type != "default" or config.get("rope_scaling"):
        what = f"rope_type {rope_type!r}: the native engine supports the default rotary positions"
        raise ValueError(f"{what} only")
    # A layer kind without a theta of its own has the usual one of the family.
    theta = parameters.get("rope_theta") or config.get(old_key) or usual
    _check_positive("rope_theta", theta)
    return float(theta)
