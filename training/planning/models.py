"""Models: the shapes known by name, and those read from a transformers config.json."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from training.errors import UserError
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


# Sources: the papers' tables of dimensions: Sanh et al. 1910.01108, Devlin et al. 1810.04805, Touvron et al.
# 2307.09288 (Llama 2), Grattafiori et al. 2407.21783 (Llama 3), Brown et al. 2005.14165 (GPT-3).
NAMED_SHAPES = {
    shape.name: shape
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

# What a run of ours is told by --model, where the hub holds such a network.
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
    raise UserError(f"--model {model}: neither a known model nor a config.json; {hint}")


def from_config_json(path: Path) -> ModelShape:
    """The shape that a ``config.json`` of transformers describes: DistilBERT, BERT, RoBERTa, Llama or GPT-2.

    Raises:
        UserError: it cannot be read, or is of another kind.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--model {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--model {path}: not valid JSON ({error})") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in _READERS:
        raise UserError(f"--model {path}: model_type {kind!r} is not known here; known: {', '.join(_READERS)}")
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    try:
        return _READERS[kind](name, config)
    except KeyError as error:
        raise UserError(f"--model {path}: has no {error}, which a {kind} needs") from error


def _labels(config: dict[str, Any], default: int | None) -> int | None:
    architecture = " ".join(config.get("architectures") or ())
    if default is None and "SequenceClassification" not in architecture:
        return None
    return config.get("num_labels") or len(config.get("id2label") or ()) or CLASSES


def _read_distilbert(name: str, config: dict[str, Any]) -> ModelShape:
    return ModelShape(
        name,
        family="distilbert",
        layers=config["n_layers"],
        hidden=config["dim"],
        heads=config["n_heads"],
        kv_heads=config["n_heads"],
        head_dim=config["dim"] // config["n_heads"],
        intermediate=config["hidden_dim"],
        vocab=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        num_labels=_labels(config, CLASSES),
    )


def _read_bert(name: str, config: dict[str, Any]) -> ModelShape:
    heads = config["num_attention_heads"]
    return ModelShape(
        name,
        family=config["model_type"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=heads,
        head_dim=config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        type_vocab=config["type_vocab_size"],
        num_labels=_labels(config, CLASSES),
    )


def _read_llama(name: str, config: dict[str, Any]) -> ModelShape:
    heads = config["num_attention_heads"]
    return ModelShape(
        name,
        family="llama",
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        gated_ffn=True,
        causal=True,
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        num_labels=_labels(config, None),
        norm="rmsnorm",
        biases=False,
        learned_positions=False,
        dropout=False,
    )


def _read_gpt2(name: str, config: dict[str, Any]) -> ModelShape:
    return ModelShape(
        name,
        family="gpt2",
        layers=config["n_layer"],
        hidden=config["n_embd"],
        heads=config["n_head"],
        kv_heads=config["n_head"],
        head_dim=config["n_embd"] // config["n_head"],
        intermediate=config.get("n_inner") or 4 * config["n_embd"],
        vocab=config["vocab_size"],
        max_positions=config["n_positions"],
        causal=True,
        tied_embeddings=config.get("tie_word_embeddings", True),
        num_labels=_labels(config, None),
    )


_READERS = {
    "distilbert": _read_distilbert,
    "bert": _read_bert,
    "roberta": _read_bert,
    "llama": _read_llama,
    "gpt2": _read_gpt2,
}
