"""What every strategy gives the Trainer, which knows none of them by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from training.batching import MicroBatch
from training.config import TrainConfig
from training.distributed import Ranks
from training.model import NewsClassifier


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, its tensors still on the device.

    ``loss``: this rank's share of the global mean loss, (); ``row_losses``: the loss of each of this rank's rows;
    ``grad_norm``: the global gradient norm before clipping, (); ``scaler_skipped``: a gradient scaler explains a
    norm that is not finite, and the weights were left alone.
    """

    loss: torch.Tensor
    row_losses: torch.Tensor
    grad_norm: torch.Tensor
    scaler_skipped: bool


class Strategy(Protocol):
    """A way to lay a model over the ranks."""

    model: NewsClassifier

    def __init__(self, model: NewsClassifier, config: TrainConfig, ranks: Ranks, precision: str) -> None:
        """Lay the model out over the ranks and make its optimizer."""

    def step(self, micro_batches: Sequence[MicroBatch], step: int, learning_rate: float) -> StepResult:
        """Run optimizer step number ``step`` over this rank's micro-batches of one global batch."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that a checkpoint must hold to go on: tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state that :meth:`state_dict` gave, on any number of ranks."""

    def full_weights(self) -> dict[str, torch.Tensor]:
        """The whole model's weights on rank 0, on the CPU."""

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Take whole weights, for evaluation."""


def row_losses(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Cross-entropy of each row in fp32: (rows,)."""
    return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=label_smoothing)
