"""Small classifiers of each family that can be taken apart, the same on every rank, and rows for them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    LlamaConfig,
    PreTrainedConfig,
    RobertaConfig,
)

from common.model_folder import SavedModel
from training.model.classifier import NewsClassifier

FAMILIES = ("distilbert", "bert", "llama")
VOCABULARY = 97  # what no number of ranks divides
LABELS = ["World", "Sports", "Business"]


def small_config(family: str, dropout: float = 0.0, layers: int = 3, spread: float = 0.2) -> PreTrainedConfig:
    """Blocks of width 32, 4 heads; Llama's pairs of heads share keys and values (8 heads, 4 of keys)."""
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 40, "initializer_range": spread}
    common |= {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
    if family == "distilbert":
        rates = {"dropout": dropout, "attention_dropout": dropout, "seq_classif_dropout": dropout}
        return DistilBertConfig(dim=32, hidden_dim=64, n_layers=layers, n_heads=4, **rates, **common)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, **common}
    if family in ("bert", "roberta"):
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        return {"bert": BertConfig, "roberta": RobertaConfig}[family](num_attention_heads=4, **rates, **size)
    return LlamaConfig(num_attention_heads=8, num_key_value_heads=4, pad_token_id=0, **size)


def small_model(
    family: str,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    layers: int = 3,
    spread: float = 0.2,
) -> NewsClassifier:
    """In training mode, of one seed; no bias is zero and no norm is one."""
    torch.manual_seed(7)
    network = AutoModelForSequenceClassification.from_config(small_config(family, dropout, layers, spread))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(spread / 4 * torch.randn_like(parameter))
    saved = SavedModel(Path(), network.config.to_dict(), network.state_dict(), "", LABELS, 40, {})
    return NewsClassifier.from_saved(saved).to(dtype).train()


def small_batch(lengths: tuple[int, ...] = (16, 9, 3, 12)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids and mask, (rows, longest), and labels."""
    generator = torch.Generator().manual_seed(3)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask
    return ids, mask, torch.arange(len(lengths)) % len(LABELS)
