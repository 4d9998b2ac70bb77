"""NewsClassifier: an encoder of the hub with a classification head, and the fast way through it.

Two things make it cheaper than the same network called plainly, with the same logits and gradients: the last block
works for one token alone, where the architecture is known (see ``architectures.py``); no attention mask where no row
is padded, and dropout masks drawn four to a number (see ``dropout.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, DistilBertConfig, PreTrainedModel

from inference.model_files import SavedModel
from training.architectures import ROW_ATTENTION, architecture_of, find_blocks
from training.config import TINY
from training.dataset import AG_NEWS_LABELS
from training.dropout import use_row_dropout

LABEL_MAP = dict(enumerate(AG_NEWS_LABELS))


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
        if network.config.pad_token_id is None:
            # A decoder may name none, and then takes single rows only.
            network.config.pad_token_id = 0
        self.architecture = architecture_of(network)
        if self.architecture:
            self.architecture.read_one_token(network)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Logits of a batch.

        Args:
            input_ids: int64, (batch, seq).
            attention_mask: (batch, seq), 1 for a token, 0 for padding at the end of a row.

        Returns:
            (batch, num_labels).
        """
        if self.architecture:
            return self.architecture.logits(self.network, input_ids, attention_mask)
        # Batches are padded with 0; some encoders count positions by their own padding id.
        input_ids = input_ids.masked_fill(attention_mask == 0, self.network.config.pad_token_id)
        return self.network(input_ids=input_ids, attention_mask=attention_mask).logits

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
    def blocks(self) -> Sequence[nn.Module]:
        """The repeated blocks of the encoder, in their order."""
        return find_blocks(self.network)

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
        # Neither modules beside the weights nor kernels from the hub run, whatever config.json names.
        trust_remote_code=False,
        attn_implementation="eager",
        **labels,
    )
