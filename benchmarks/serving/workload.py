"""The texts that the servers are asked, and the size of the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from common.errors import UserError
from common.text import TextTokenizer
from training.data.dataset import load_data

SEED = 7


@dataclass(frozen=True)
class Workload:
    """Texts in the order in which they are sent, and for the page: their lengths in tokens, and the model's size."""

    texts: list[str]
    facts: dict[str, Any]


def read_workload(model: Path, dataset: str) -> Workload:
    """Read a dataset's test texts, shuffled, and the model's size.

    Raises:
        UserError: there is no such data or model.
    """
    try:
        config = json.loads((model / "config.json").read_text())
        limit = json.loads((model / "tokenizer_config.json").read_text())["model_max_length"]
        tokenizer = TextTokenizer.from_file(model / "tokenizer.json", limit)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"--model {model}: not a model folder ({error})", code="benchmark-input"
        ) from error
    data = load_data(dataset)
    texts = list(data.test.texts)
    # Test sets are often sorted by label, and texts of a label resemble one another in length.
    Random(SEED).shuffle(texts)
    lengths = [len(encoded.ids) for encoded in tokenizer.encode(texts)]

    def first(*names: str) -> int:  # BERT's and DistilBERT's names
        return next(config[name] for name in names if name in config)

    size = {
        "dim": first("hidden_size", "dim"),
        "hidden_dim": first("intermediate_size", "hidden_dim"),
        "n_layers": first("num_hidden_layers", "n_layers"),
        "n_heads": first("num_attention_heads", "n_heads"),
    }
    facts = {
        "texts": len(texts),
        "tokens_mean": sum(lengths) / len(lengths),
        "limit": limit,
        "size": size,
    }
    return Workload(texts, {"dataset": Path(data.name).name} | facts)
