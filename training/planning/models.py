"""The networks that can be planned: known by name, or read from a transformers config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from common.errors import UserError, near_names

DEFAULT_CLASSES = 4  # AG News'


@dataclass(frozen=True)
class Family:
    """What all networks of a family have in common."""

    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    # Each norm follows the residual sum, as in BERT, so the embedding ends with one too.
    norm_after: bool = False
    causal: bool = False
    gated_ffn: bool = False
    biases: bool = True
    learned_positions: bool = True
    # Of hidden width, one byte per value, kept by a block for the backward pass.
    dropout_masks: int = 0
    # The last block of a classifier computes its query, output projection and feed-forward for the
    # first token only (training/model/classifier.py).
    reads_first_token: bool = False
    # For tensor and pipeline parallelism, by training/model/architectures.py.
    can_be_split: bool = False


FAMILIES = {
    "distilbert": Family(
        norm_after=True, dropout_masks=1, reads_first_token=True, can_be_split=True
    ),
    "bert": Family(norm_after=True, dropout_masks=2, reads_first_token=True, can_be_split=True),
    "roberta": Family(norm_after=True, dropout_masks=2),
    "gpt2": Family(causal=True, dropout_masks=2),
    "llama": Family(
        norm="rmsnorm",
        causal=True,
        gated_ffn=True,
        biases=False,
        learned_positions=False,
        can_be_split=True,
    ),
}


@dataclass(frozen=True)
class ModelShape:
    """A transformer's dimensions, which are all that memory and time depend on."""

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    max_positions: int
    head_dim: int
    type_vocab: int = 0
    tied_embeddings: bool = False
    # Of the classification head; None for a language model's head over the vocabulary.
    num_labels: int | None = None
    source: str = ""  # the hub name or folder to train from; empty if only the dimensions are known
    # Planned with tensor and pipeline parallelism, which only other programs give it.
    split_elsewhere: bool = False

    @property
    def traits(self) -> Family:
        return FAMILIES[self.family]

    @property
    def can_be_split(self) -> bool:
        return self.traits.can_be_split or self.split_elsewhere

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_weights(self) -> int:
        return 2 * self.hidden * (self.query_width + self.key_value_width)

    @property
    def ffn_weights(self) -> int:
        return (3 if self.traits.gated_ffn else 2) * self.hidden * self.intermediate

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (2 if self.traits.norm == "layernorm" else 1)

    @property
    def block_parameters(self) -> int:
        biases = self.query_width + 2 * self.key_value_width + 2 * self.hidden + self.intermediate
        matrices = self.attention_weights + self.ffn_weights
        return matrices + (biases if self.traits.biases else 0) + 2 * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        positions = self.max_positions if self.traits.learned_positions else 0
        rows = self.vocab + self.type_vocab + positions
        return rows * self.hidden + (self.norm_parameters if self.traits.norm_after else 0)

    @property
    def head_parameters(self) -> int:
        final_norm = 0 if self.traits.norm_after else self.norm_parameters
        if self.num_labels is None:
            return final_norm + (0 if self.tied_embeddings else self.vocab * self.hidden)
        if self.traits.norm_after:  # a dense layer, then the classifier, both with biases
            return self.hidden * self.hidden + self.hidden + (self.hidden + 1) * self.num_labels
        return final_norm + self.hidden * self.num_labels

    @property
    def num_parameters(self) -> int:
        outside = self.embedding_parameters + self.head_parameters
        return self.layers * self.block_parameters + outside

    @property
    def reads_first_token_only(self) -> bool:
        return self.traits.reads_first_token and self.num_labels is not None

    def block_flops(self, seq_len: int) -> float:
        """Floating-point operations of one block's matrix products, forward, for one row of
        ``seq_len`` tokens.
        """
        attention = 4 * seq_len * seq_len * self.query_width
        return 2.0 * seq_len * (self.attention_weights + self.ffn_weights) + attention

    def last_block_flops(self, seq_len: int) -> float:
        if not self.reads_first_token_only:
            return self.block_flops(seq_len)
        keys_and_values = 2 * self.hidden * self.key_value_width
        first_token = self.attention_weights - keys_and_values + self.ffn_weights
        return 2.0 * (seq_len * keys_and_values + first_token) + 4 * seq_len * self.query_width

    def head_flops(self, seq_len: int) -> float:
        if self.num_labels is None:
            return 2.0 * seq_len * self.hidden * self.vocab
        dense = self.hidden if self.traits.norm_after else 0
        return 2.0 * self.hidden * (self.num_labels + dense)

    def forward_flops(self, seq_len: int) -> float:
        """Operations of the matrix products of one row, forward; the backward pass takes twice as
        many.
        """
        # A causal model's scores above the diagonal count, as is usual when utilisation is
        # reported: PaLM, arXiv 2204.02311, appendix B.
        return (
            (self.layers - 1) * self.block_flops(seq_len)
            + self.last_block_flops(seq_len)
            + self.head_flops(seq_len)
        )


def gpt(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    *,
    vocab: int = 50_257,
    max_positions: int = 2048,
) -> ModelShape:
    """A GPT-2 network of the dimensions that papers on scaling give."""
    sizes = (layers, hidden, heads, heads, 4 * hidden, vocab, max_positions, hidden // heads)
    return ModelShape(name, "gpt2", *sizes, tied_embeddings=True)


# From the papers: Sanh et al. 1910.01108 (DistilBERT), Devlin et al. 1810.04805 (BERT), Touvron et
# al. 2307.09288 (Llama 2), Grattafiori et al. 2407.21783 (Llama 3), Brown et al. 2005.14165 (GPT-3,
# whose weights are not public). Their family, and layers, hidden, heads, key-value heads,
# intermediate, vocabulary, positions, head width.
_DIMENSIONS = {
    "distilbert-base": ("distilbert", (6, 768, 12, 12, 3072, 30_522, 512, 64)),
    "bert-base": ("bert", (12, 768, 12, 12, 3072, 30_522, 512, 64)),
    "bert-large": ("bert", (24, 1024, 16, 16, 4096, 30_522, 512, 64)),
    "llama-7b": ("llama", (32, 4096, 32, 32, 11_008, 32_000, 4096, 128)),
    "llama-13b": ("llama", (40, 5120, 40, 40, 13_824, 32_000, 4096, 128)),
    "llama-70b": ("llama", (80, 8192, 64, 8, 28_672, 32_000, 4096, 128)),
    "llama3-8b": ("llama", (32, 4096, 32, 8, 14_336, 128_256, 8192, 128)),
    "llama3-70b": ("llama", (80, 8192, 64, 8, 28_672, 128_256, 8192, 128)),
}
_WEIGHTS = {
    "distilbert-base": "distilbert-base-uncased",
    "bert-base": "bert-base-uncased",
    "bert-large": "bert-large-uncased",
    "llama-7b": "meta-llama/Llama-2-7b-hf",
    "llama-13b": "meta-llama/Llama-2-13b-hf",
    "llama-70b": "meta-llama/Llama-2-70b-hf",
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama3-70b": "meta-llama/Meta-Llama-3-70B",
}
NAMED_SHAPES = {
    name: ModelShape(
        name,
        family,
        *sizes,
        type_vocab=2 if family == "bert" else 0,
        num_labels=DEFAULT_CLASSES if FAMILIES[family].norm_after else None,
        source=_WEIGHTS[name],
    )
    for name, (family, sizes) in _DIMENSIONS.items()
}
# Megatron-LM splits GPT-3; the trainer, which has no weights of it to split, could only shard it.
NAMED_SHAPES["gpt3-175b"] = replace(gpt("gpt3-175b", 96, 12_288, 96), split_elsewhere=True)


def find_shape(model: str) -> ModelShape:
    """The shape of ``--model``: a known name, or the path of a config.json or of the folder that
    holds one.

    Raises:
        UserError: it is neither, or the file does not describe a network that is known here.
    """
    if model in NAMED_SHAPES:
        return NAMED_SHAPES[model]
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    if not path.is_file() and path.suffix != ".json":
        near = near_names(model, NAMED_SHAPES)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(NAMED_SHAPES)}"
        raise UserError(
            f"--model {model}: neither a known model nor a config.json; {hint}",
            code="plan-model-unknown",
        )
    file = _ConfigFile.read(path)
    if path.name != "config.json":
        return _shape_from_config(file, path.stem)
    folder = path.parent
    shape = _shape_from_config(file, folder.resolve().name)
    return replace(shape, source=str(folder)) if any(folder.glob("*.safetensors")) else shape


# What a config.json calls the sizes, and the families that call some of them differently.
COMMON_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "positions": "max_position_embeddings",
}
OWN_KEYS = {
    "distilbert": {
        "layers": "n_layers",
        "hidden": "dim",
        "heads": "n_heads",
        "intermediate": "hidden_dim",
    },
    "gpt2": {
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "intermediate": "n_inner",
        "positions": "n_positions",
    },
}


@dataclass(frozen=True)
class _ConfigFile:
    """A config.json of a known family."""

    path: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> _ConfigFile:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise _unknown(path, str(error.strerror)) from error
        except ValueError as error:
            raise _unknown(path, f"not valid JSON ({error})") from error
        family = values.get("model_type") if isinstance(values, dict) else None
        if not isinstance(family, str) or family not in FAMILIES:
            raise _unknown(path, f"model_type {family!r}: must be one of {', '.join(FAMILIES)}")
        return cls(path, values)

    @property
    def family(self) -> str:
        return self.values["model_type"]

    def size(self, key: str, default: int | None = None) -> int:
        # Null means the same as a missing key.
        value = default if self.values.get(key) is None else self.values[key]
        if value is None:
            raise _unknown(self.path, f"has no {key}, which a {self.family} needs")
        if type(value) is not int or value < 1:  # a bool is an int as well
            raise _unknown(self.path, f"{key} {value!r}: must be a whole number above 0")
        return value

    def check_multiple(self, key: str, value: int, of_key: str, of: int) -> None:
        if value % of:
            raise UserError(
                f"--model {self.path}: {key} {value}: must be a multiple of {of_key} {of}",
                code="uneven-split",
            )


def _unknown(path: Path, why: str) -> UserError:
    return UserError(f"--model {path}: {why}", code="plan-model-unknown")


def _shape_from_config(file: _ConfigFile, name: str) -> ModelShape:
    family, config, size = file.family, file.values, file.size
    keys = COMMON_KEYS | OWN_KEYS.get(family, {})
    heads, hidden = size(keys["heads"]), size(keys["hidden"])
    file.check_multiple(keys["hidden"], hidden, keys["heads"], heads)
    kv_heads, head_dim = heads, hidden // heads
    if family == "llama":
        kv_heads, head_dim = size("num_key_value_heads", heads), size("head_dim", head_dim)
        file.check_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)

    # An encoder is planned as a classifier; a decoder only if its config names a classification
    # head.
    is_encoder = FAMILIES[family].norm_after
    num_labels = None
    if is_encoder or "SequenceClassification" in str(config.get("architectures")):
        labels = config.get("id2label")
        num_labels = size(
            "num_labels", len(labels) if isinstance(labels, dict) and labels else DEFAULT_CLASSES
        )
    return ModelShape(
        name,
        family,
        layers=size(keys["layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=size(keys["intermediate"], 4 * hidden if family == "gpt2" else None),
        vocab=size("vocab_size"),
        max_positions=size(keys["positions"]),
        type_vocab=size("type_vocab_size") if family in ("bert", "roberta") else 0,
        tied_embeddings=not is_encoder
        and bool(config.get("tie_word_embeddings", family == "gpt2")),
        num_labels=num_labels,
    )
