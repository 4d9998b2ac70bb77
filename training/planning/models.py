"""Models: the shapes known by name, and those read from a transformers config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from common.errors import UserError
from training.planning.shapes import ModelShape

# The classes of a planned classifier, where nothing says another number: AG News'.
CLASSES = 4


def _encoder(name: str, layers: int, hidden: int, **more: Any) -> ModelShape:
    return ModelShape(
        name,
        layers=layers,
        hidden=hidden,
        heads=hidden // 64,
        kv_heads=hidden // 64,
        head_dim=64,
        intermediate=4 * hidden,
        vocab=30_522,
        max_positions=512,
        num_labels=CLASSES,
        **more,
    )


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int,
    *,
    kv_heads: int = 0,
    vocab: int = 32_000,
    max_positions: int = 4096,
) -> ModelShape:
    return ModelShape(
        name,
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocab=vocab,
        max_positions=max_positions,
        gated_ffn=True,
        causal=True,
        norm="rmsnorm",
        biases=False,
        learned_positions=False,
        dropout=False,
    )


def gpt(
    name: str, layers: int, hidden: int, heads: int, *, vocab: int = 50_257, max_positions: int = 2048
) -> ModelShape:
    """A GPT-2 network of these dimensions, as the papers on scaling give them."""
    return ModelShape(
        name,
        family="gpt2",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=4 * hidden,
        vocab=vocab,
        max_positions=max_positions,
        causal=True,
        tied_embeddings=True,
    )


# Where training finds the networks that are known by name; the hub holds no GPT-3.
HUB_NAMES = {
    "distilbert-base": "distilbert-base-uncased",
    "bert-base": "bert-base-uncased",
    "bert-large": "bert-large-uncased",
    "llama-7b": "meta-llama/Llama-2-7b-hf",
    "llama-13b": "meta-llama/Llama-2-13b-hf",
    "llama-70b": "meta-llama/Llama-2-70b-hf",
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama3-70b": "meta-llama/Meta-Llama-3-70B",
}

# Sources: the papers' tables of dimensions: Sanh et al. 1910.01108, Devlin et al. 1810.04805, Touvron et al.
# 2307.09288 (Llama 2), Grattafiori et al. 2407.21783 (Llama 3), Brown et al. 2005.14165 (GPT-3).
NAMED_SHAPES = {
    shape.name: replace(shape, source=HUB_NAMES.get(shape.name, ""))
    for shape in (
        _encoder("distilbert-base", 6, 768, family="distilbert"),
        _encoder("bert-base", 12, 768, family="bert", type_vocab=2),
        _encoder("bert-large", 24, 1024, family="bert", type_vocab=2),
        _llama("llama-7b", 32, 4096, 32, 11_008),
        _llama("llama-13b", 40, 5120, 40, 13_824),
        _llama("llama-70b", 80, 8192, 64, 28_672, kv_heads=8),
        _llama("llama3-8b", 32, 4096, 32, 14_336, kv_heads=8, vocab=128_256, max_positions=8192),
        _llama("llama3-70b", 80, 8192, 64, 28_672, kv_heads=8, vocab=128_256, max_positions=8192),
        gpt("gpt3-175b", 96, 12_288, 96),
    )
}


def find_shape(model: str) -> ModelShape:
    """The shape of ``--model``: a known name, or the path of a config.json or of a folder that holds one.

    Raises:
        UserError: neither, or a network whose shape is not known here.
    """
    if model in NAMED_SHAPES:
        return NAMED_SHAPES[model]
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.is_file() or path.suffix == ".json":
        return from_config_json(path)
    near = get_close_matches(model.lower(), NAMED_SHAPES, n=2, cutoff=0.3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(NAMED_SHAPES)}"
    raise UserError(f"--model {model}: neither a known model nor a config.json; {hint}", code="plan-model-unknown")


def from_config_json(path: Path) -> ModelShape:
    """The shape that a ``config.json`` of transformers describes: DistilBERT, BERT, RoBERTa, Llama or GPT-2.

    Raises:
        UserError: it cannot be read, or is of another kind.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--model {path}: {error.strerror}", code="plan-model-unknown") from error
    except ValueError as error:
        raise UserError(f"--model {path}: not valid JSON ({error})", code="plan-model-unknown") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in _READERS:
        raise UserError(
            f"--model {path}: model_type {kind!r} is not known here; known: {', '.join(_READERS)}",
            code="plan-model-unknown",
        )
    folder = path.parent if path.name == "config.json" else None
    try:
        shape = _READERS[kind](folder.resolve().name if folder else path.stem, config)
    except ValueError as error:
        raise UserError(f"--model {path}: {error}, which a {kind} needs", code="plan-model-unknown") from error
    has_weights = folder is not None and any(folder.glob("*.safetensors"))
    return replace(shape, source=str(folder) if has_weights else "")


def _size(config: dict[str, Any], name: str, default: int | None = None) -> int:
    """A dimension; null is as good as left out.

    Raises:
        ValueError: there is none and no default, or it is no whole number above 0.
    """
    value = default if config.get(name) is None else config[name]
    if value is None:
        raise ValueError(f"has no {name!r}")
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r} and no whole number above 0")
    return value


def _heads(config: dict[str, Any], name: str, hidden: str) -> dict[str, int]:
    """The heads of a network in which each has keys and values of its own, and their width."""
    heads, width = _size(config, name), _size(config, hidden)
    if width % heads:
        raise ValueError(f"{hidden} {width} is no multiple of {name} {heads}")
    return {"heads": heads, "kv_heads": heads, "head_dim": width // heads}


def _labels(config: dict[str, Any], default: int | None) -> int | None:
    if default is None and "SequenceClassification" not in str(config.get("architectures")):
        return None
    named = config.get("id2label")
    return _size(config, "num_labels", len(named) if isinstance(named, dict) and named else CLASSES)


def _read_distilbert(name: str, config: dict[str, Any]) -> ModelShape:
    return ModelShape(
        name,
        family="distilbert",
        layers=_size(config, "n_layers"),
        hidden=_size(config, "dim"),
        intermediate=_size(config, "hidden_dim"),
        vocab=_size(config, "vocab_size"),
        max_positions=_size(config, "max_position_embeddings"),
        num_labels=_labels(config, CLASSES),
        **_heads(config, "n_heads", "dim"),
    )


def _read_bert(name: str, config: dict[str, Any]) -> ModelShape:
    return ModelShape(
        name,
        family=config["model_type"],
        layers=_size(config, "num_hidden_layers"),
        hidden=_size(config, "hidden_size"),
        intermediate=_size(config, "intermediate_size"),
        vocab=_size(config, "vocab_size"),
        max_positions=_size(config, "max_position_embeddings"),
        type_vocab=_size(config, "type_vocab_size"),
        num_labels=_labels(config, CLASSES),
        **_heads(config, "num_attention_heads", "hidden_size"),
    )


def _read_llama(name: str, config: dict[str, Any]) -> ModelShape:
    heads = _heads(config, "num_attention_heads", "hidden_size")
    heads["kv_heads"] = _size(config, "num_key_value_heads", heads["heads"])
    heads["head_dim"] = _size(config, "head_dim", heads["head_dim"])
    if heads["heads"] % heads["kv_heads"]:
        raise ValueError(f"num_attention_heads {heads['heads']} is no multiple of num_key_value_heads")
    return ModelShape(
        name,
        family="llama",
        layers=_size(config, "num_hidden_layers"),
        hidden=_size(config, "hidden_size"),
        intermediate=_size(config, "intermediate_size"),
        vocab=_size(config, "vocab_size"),
        max_positions=_size(config, "max_position_embeddings"),
        gated_ffn=True,
        causal=True,
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        num_labels=_labels(config, None),
        norm="rmsnorm",
        biases=False,
        learned_positions=False,
        dropout=False,
        **heads,
    )


def _read_gpt2(name: str, config: dict[str, Any]) -> ModelShape:
    hidden = _size(config, "n_embd")
    return ModelShape(
        name,
        family="gpt2",
        layers=_size(config, "n_layer"),
        hidden=hidden,
        intermediate=_size(config, "n_inner", 4 * hidden),
        vocab=_size(config, "vocab_size"),
        max_positions=_size(config, "n_positions"),
        causal=True,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        num_labels=_labels(config, None),
        **_heads(config, "n_head", "n_embd"),
    )


_READERS = {
    "distilbert": _read_distilbert,
    "bert": _read_bert,
    "roberta": _read_bert,
    "llama": _read_llama,
    "gpt2": _read_gpt2,
}
