"""What every strategy gives the Trainer, which knows none of them by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from training.batching import DataPlace, MicroBatch
from training.config import TrainConfig
from training.distributed import Ranks
from training.model import NewsClassifier
from training.phases import Phases


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, its tensors still on the device.

    ``loss``: this rank's share of the global mean loss, (), 0 on ranks that do not lead their replica;
    ``row_losses``: the loss of each of this rank's rows, 0 on such ranks; ``grad_norm``: the global gradient norm
    before clipping, (); ``scaler_skipped``: a loss scale explains a norm that is not finite, and the weights were left
    alone.
    """

    loss: torch.Tensor
    row_losses: torch.Tensor
    grad_norm: torch.Tensor
    scaler_skipped: bool


class Strategy(Protocol):
    """A way to lay a model over the ranks."""

    place: DataPlace
    phases: Phases  # which it enters in a step: forward, backward, optimizer; the Trainer gives it its own
    parameters: Mapping[str, nn.Parameter]  # that are trained, this rank's by their names
    pass_model: nn.Module | None  # that whose forward and backward passes wait for no other rank, if there is one
    test_precision: str  # the most exact that :meth:`logits` can compute in

    def __init__(self, model: NewsClassifier, config: TrainConfig, ranks: Ranks, precision: str) -> None:
        """Lay the model out over the ranks and make its optimizer.

        Raises:
            UserError: the degrees, the model or the machine do not allow it.
        """

    def describe(self) -> str:
        """How the model lies over the ranks, in a few words."""

    def step(self, micro_batches: Sequence[MicroBatch], step: int, learning_rate: float) -> StepResult:
        """Run optimizer step number ``step`` over this rank's micro-batches of one global batch."""

    def logits(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, precision: str) -> torch.Tensor:
        """Logits with dropout off, (batch, num_labels), on every rank.

        Ranks of one replica give the same batch; every rank calls as often as every other.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything that a checkpoint must hold to go on, whole on rank 0: tensors and plain values.

        The form is one for all strategies, so that a checkpoint of one resumes under another: ``model`` {name: tensor},
        ``optimizer`` {name: {``exp_avg``, ``exp_avg_sq``, ``step``}}, ``loss_scale``, and ``extra`` for what only
        this strategy has and can do without.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state that any strategy's :meth:`state_dict` gave, on any number of ranks."""

    def full_weights(self) -> dict[str, torch.Tensor]:
        """The whole model's weights, on the CPU of rank 0."""

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Take whole weights, for evaluation."""


def row_losses(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Cross-entropy of each row in fp32: (rows,)."""
    return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=label_smoothing)
