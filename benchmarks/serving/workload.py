"""What the servers are asked, and how much arithmetic an answer stands for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.workload import Size
from common.errors import UserError
from common.text import TextTokenizer
from training.data.dataset import load_news

SEED = 7


@dataclass(frozen=True)
class Workload:
    """Texts in the order in which they are sent, and the model's size.

    Attributes:
        lengths: Tokens of each text, cut at the model's limit.
        limit: That limit.
    """

    dataset: str
    texts: list[str]
    lengths: list[int]
    limit: int
    size: Size

    def facts(self) -> dict[str, Any]:
        """What the page needs to know."""
        count, tokens = len(self.texts), sum(self.lengths)
        squares = sum(length**2 for length in self.lengths)
        padded = self.size.forward_work(count * self.limit, count * self.limit**2)
        return {
            "dataset": self.dataset,
            "texts": count,
            "tokens_mean": tokens / count,
            "limit": self.limit,
            "size": asdict(self.size),
            "work": {
                f"padded to {self.limit}": padded / count,
                "unpadded": self.size.forward_work(tokens, squares) / count,
                "unpadded, first token only in the last block": self.size.forward_work(tokens, squares, count) / count,
            },
        }


def read_workload(model: Path, dataset: str) -> Workload:
    """Read a dataset's test texts, shuffled, and the model's size.

    Raises:
        UserError: There is no such data or model.
    """
    try:
        config = json.loads((model / "config.json").read_text())
        limit = json.loads((model / "tokenizer_config.json").read_text())["model_max_length"]
        tokenizer = TextTokenizer.from_file(model / "tokenizer.json", limit)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--model {model}: not a model folder ({error})", code="benchmark-input") from error
    data = load_news(dataset)
    texts = list(data.test.texts)
    Random(SEED).shuffle(texts)
    lengths = [len(encoded.ids) for encoded in tokenizer.encode(texts)]
    return Workload(Path(data.name).name, texts, lengths, limit, _size(config))


def _size(config: dict[str, Any]) -> Size:
    def first(names: Sequence[str]) -> int:
        return next(config[name] for name in names if name in config)

    return Size(
        dim=first(["hidden_size", "dim"]),
        hidden_dim=first(["intermediate_size", "hidden_dim"]),
        n_layers=first(["num_hidden_layers", "n_layers"]),
        n_heads=first(["num_attention_heads", "n_heads"]),
    )
