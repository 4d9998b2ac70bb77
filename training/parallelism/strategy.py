"""What every strategy gives the Trainer, which knows none of them by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from training.config import TrainConfig
from training.data.batching import DataPlace, MicroBatch
from training.model.classifier import NewsClassifier
from training.parallelism.distributed import Ranks
from training.parallelism.state import SavedState, StrategyState
from training.run.phases import Phases


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, its tensors still on the device.

    ``loss``: this rank's share of the global mean loss, (), 0 on ranks that do not lead their replica;
    ``row_losses``: the loss of each of this rank's rows, 0 on such ranks; ``grad_norm``: the global gradient norm
    before clipping, (): where it is not finite, weights and moments were left alone; ``scaler_skipped``: a loss scale
    explains that.
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

    def logits(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, precision: str) -> torch.Tensor:
        """Logits with dropout off, (batch, num_labels), on every rank.

        Ranks of one replica give the same batch; every rank calls as often as every other.
        """

    def state_dict(self) -> StrategyState:
        """What this rank holds of all that a checkpoint must hold to go on; every rank calls it.

        The names are the same for all strategies, so that a checkpoint of one resumes under another.
        """

    def load_state_dict(self, saved: SavedState) -> None:
        """Read what this rank holds from a state of any strategy, on any number of ranks."""

    def full_weights(self) -> dict[str, torch.Tensor]:
        """The whole model's weights, on the CPU of rank 0."""

    def load_weights(self, saved: SavedState) -> None:
        """Read this rank's weights alone, for evaluation."""


def weighted_loss(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of a micro-batch's losses by their weights, (), which makes every gradient NaN if a loss is not finite.

    Cross-entropy alone does not: a logit of minus infinity at the label gives an infinite loss and finite gradients. So
    the global gradient norm, which all ranks know, tells each of them of a bad row on any.
    """
    return (losses * torch.where(losses.isfinite(), weights, math.nan)).sum()


def row_losses(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Cross-entropy of each row in fp32: (rows,)."""
    return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=label_smoothing)
