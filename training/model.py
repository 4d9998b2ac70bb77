"""NewsClassifier: an encoder of the hub with a classification head, and the fast way through it.

Two things make it cheaper than the same network called plainly, with the same logits and gradients:

* the head reads only the first token, so the last block computes its query, output projection and feed-forward
  for that token alone (its keys and values for all): a seventh of a six-block encoder's matrix work is saved.
  Used where the architecture is known (DistilBERT, BERT);
* no attention mask where no row is padded, and dropout masks drawn four to a number (see ``dropout.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForSequenceClassification,
    DistilBertConfig,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask

from inference.model_files import SavedModel
from training.config import TINY
from training.dataset import AG_NEWS_LABELS
from training.dropout import RowDropout, use_row_dropout

LABEL_MAP = dict(enumerate(AG_NEWS_LABELS))
ROW_ATTENTION = "row_dropout"


class NewsClassifier(nn.Module):
    """A sequence classifier over any encoder that ``transformers`` can load.

    Args:
        num_labels: number of classes.
        pretrained_model: a hub name, a local folder, or ``tiny`` for a small DistilBERT with random weights.
        label_names: a name for each class; AG News' where there are four and none are given.
        vocab_size: entries of the vocabulary; read for ``tiny`` only.

    Raises:
        OSError, ValueError: the model cannot be found or read.
    """

    def __init__(
        self,
        num_labels: int = len(AG_NEWS_LABELS),
        pretrained_model: str = "distilbert-base-uncased",
        label_names: Sequence[str] | None = None,
        vocab_size: int = 8192,
    ) -> None:
        super().__init__()
        names = list(label_names or (LABEL_MAP.get(i, str(i)) for i in range(num_labels)))
        labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        self._adopt(_load_network(pretrained_model, num_labels, labels, vocab_size), names)

    @classmethod
    def from_saved(cls, saved: SavedModel) -> NewsClassifier:
        """The classifier of a model folder or ``.pt`` file that training wrote."""
        classifier = cls.__new__(cls)
        nn.Module.__init__(classifier)
        config = AutoConfig.for_model(**saved.config)
        network = AutoModelForSequenceClassification.from_config(config)
        network.load_state_dict(load_file(saved.weights) if isinstance(saved.weights, Path) else saved.weights)
        classifier._adopt(network, saved.labels)
        return classifier

    def _adopt(self, network: PreTrainedModel, label_names: list[str]) -> None:
        self.label_names = label_names
        self.network = network
        self.dropout_stream = use_row_dropout(network)
        network.config._attn_implementation = ROW_ATTENTION
        self._first_token = FIRST_TOKEN_PATHS.get(type(network).__name__)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Logits of a batch.

        Args:
            input_ids: int64, (batch, seq).
            attention_mask: (batch, seq), 1 for a token, 0 for padding at the end of a row.

        Returns:
            (batch, num_labels).
        """
        if self._first_token is None:
            # Batches are padded with 0; some encoders count positions by their own padding id.
            padding = self.network.config.pad_token_id or 0
            input_ids = input_ids.masked_fill(attention_mask == 0, padding)
            return self.network(input_ids=input_ids, attention_mask=attention_mask).logits
        return self._first_token(self.network, input_ids, _key_mask(attention_mask))

    @torch.inference_mode()
    def predict(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The most probable class of each row: int64, (batch,). Dropout is off whatever the module's mode."""
        was_training = self.training
        self.eval()
        try:
            return self(input_ids, attention_mask).argmax(dim=-1)
        finally:
            self.train(was_training)

    def get_label_name(self, label: int) -> str:
        """The name of a class."""
        return self.label_names[label]

    def seed_dropout(self, seed: int, step: int, first_row: int) -> None:
        """Make dropout a function of the seed, the step and the row's place in the global batch."""
        self.dropout_stream.move(seed, step, first_row)
        # For what draws from torch's own generators: GPUs, and layers that call dropout as a function.
        torch.manual_seed(hash((seed, step, first_row)) % 2**63)

    @property
    def max_positions(self) -> int:
        """The longest text, in tokens, that the encoder has positions for."""
        return getattr(self.network.config, "max_position_embeddings", 2**31)


def _load_network(name: str, num_labels: int, labels: dict[str, Any], vocab_size: int) -> PreTrainedModel:
    if name == TINY:
        config = DistilBertConfig(
            vocab_size=vocab_size,
            dim=128,
            hidden_dim=512,
            n_layers=4,
            n_heads=4,
            num_labels=num_labels,
            **labels,
        )
        return AutoModelForSequenceClassification.from_config(config)
    path = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    return AutoModelForSequenceClassification.from_pretrained(
        path,
        num_labels=num_labels,
        ignore_mismatched_sizes=True,
        dtype=torch.float32,
        use_safetensors=True,
        **labels,
    )


def _key_mask(attention_mask: torch.Tensor) -> torch.Tensor | None:
    # On a GPU the look at the mask would wait for the device; there its kernels take a mask at little cost.
    if attention_mask.device.type == "cpu" and bool(attention_mask.all()):
        return None
    return attention_mask.bool()[:, None, None, :]  # (batch, 1, 1, seq)


def row_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention for ``transformers``, with the module's :class:`RowDropout` on the CPU.

    Args:
        query, key, value: (batch, heads, queries or keys, head size).
        attention_mask: bool, broadcastable to (batch, heads, queries, keys), or None.

    Returns:
        (batch, queries, heads, head size), and None for the weights.
    """
    drop = getattr(module, "dropout", None)
    if dropout == 0 or query.device.type != "cpu" or not isinstance(drop, RowDropout):
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
        )
        return context.transpose(1, 2).contiguous(), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = drop(scores.softmax(dim=-1))
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


AttentionInterface.register(ROW_ATTENTION, row_attention)
AttentionMaskInterface.register(ROW_ATTENTION, sdpa_mask)


def _attend_first(
    module: nn.Module,
    projections: Sequence[nn.Module],
    hidden: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """What the first token gathers from all tokens: (batch, seq, hidden) -> (batch, 1, hidden)."""

    def heads(projection: nn.Module, states: torch.Tensor) -> torch.Tensor:
        return projection(states).unflatten(-1, (-1, module.attention_head_size)).transpose(1, 2)

    query, key, value = projections
    context, _ = row_attention(
        module,
        heads(query, hidden[:, :1]),
        heads(key, hidden),
        heads(value, hidden),
        mask,
        scaling=module.scaling,
        dropout=module.dropout.p if module.training else 0.0,
    )
    return context.flatten(2)


def _distilbert_logits(network: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    encoder = network.distilbert
    hidden = encoder.embeddings(input_ids)
    *blocks, last = encoder.transformer.layer
    for block in blocks:
        hidden = block(hidden, mask)
    attention = last.attention
    context = _attend_first(attention, (attention.q_lin, attention.k_lin, attention.v_lin), hidden, mask)
    first = last.sa_layer_norm(attention.out_lin(context) + hidden[:, :1])
    first = last.output_layer_norm(last.ffn(first) + first)[:, 0]
    return network.classifier(network.dropout(F.relu(network.pre_classifier(first))))


def _bert_logits(network: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    encoder = network.bert
    hidden = encoder.embeddings(input_ids)
    *blocks, last = encoder.encoder.layer
    for block in blocks:
        hidden = block(hidden, mask)
    attention = last.attention.self
    context = _attend_first(attention, (attention.query, attention.key, attention.value), hidden, mask)
    first = last.feed_forward_chunk(last.attention.output(context, hidden[:, :1]))
    return network.classifier(network.dropout(encoder.pooler(first)))


FirstTokenPath = Callable[[PreTrainedModel, torch.Tensor, "torch.Tensor | None"], torch.Tensor]
FIRST_TOKEN_PATHS: dict[str, FirstTokenPath] = {
    "DistilBertForSequenceClassification": _distilbert_logits,
    "BertForSequenceClassification": _bert_logits,
}
