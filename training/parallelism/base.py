"""The step that our own strategies share: micro-batches, the true global norm, clipping, the update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from common.errors import TrainingFailure
from training.config import TrainConfig
from training.data.batching import DataPlace, MicroBatch
from training.model.architectures import mask_of
from training.model.classifier import NewsClassifier
from training.model.optimizer import build_optimizer, make_moments
from training.model.precision import LossScale, autocast
from training.monitoring.replicas import check_gradient_sync
from training.parallelism.blocks import length_multiple
from training.parallelism.distributed import Ranks
from training.parallelism.float8 import check_float8
from training.parallelism.gradients import clip_gradients, global_norm, reduce_partial_gradients
from training.parallelism.state import (
    SavedState,
    StrategyState,
    full_model,
    model_tensors,
    optimizer_tensors,
    read_model,
    read_optimizer,
)
from training.parallelism.strategy import StepResult, row_losses, weighted_loss
from training.run.phases import Phases


class BaseStrategy:
    """One process's part of a model and its optimizer.

    A strategy says in :meth:`lay_out` how the model lies over the ranks; what it holds of it afterwards is ``parts``.
    """

    def __init__(self, model: NewsClassifier, config: TrainConfig, ranks: Ranks, precision: str) -> None:
        self.config = config
        self.ranks = ranks
        self.precision = precision
        if config.float8:
            ranks.run_on_all_ranks(lambda: check_float8(config, ranks.device, precision))
        self.place = DataPlace(ranks.rank, ranks.world_size)
        self.pass_model: nn.Module | None = None
        self.stage_group: dist.ProcessGroup | None = None  # the ranks that hold the other stages of a pipeline
        self.phases = Phases()
        self.loss_scale = LossScale(enabled=precision == "fp16")
        self.gradient_checks = config.check_gradient_sync  # that are left
        self.parts: list[nn.Module] = self.lay_out(model)
        self.parameters = {
            name: parameter
            for part in self.parts
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        }
        self.optimizer = self.build_optimizer()
        make_moments(self.own_moments()[1])

    def lay_out(self, model: NewsClassifier) -> list[nn.Module]:
        """Lay the model over the ranks; returns this rank's parts of it, whose parameters are trained."""
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Logits on the way that is trained: (batch, num_labels)."""
        raise NotImplementedError

    def build_optimizer(self) -> torch.optim.Optimizer:
        """AdamW over this rank's parameters."""
        return build_optimizer(self.parameters.values(), self.config.weight_decay)

    def no_sync(self) -> Any:
        """The context of a micro-batch that is not the last: no gradient leaves the rank."""
        raise NotImplementedError

    def step(self, micro_batches: Sequence[MicroBatch], step: int, learning_rate: float) -> StepResult:
        """Forward and backward over all micro-batches, clip, and one optimizer step."""
        losses = self.run(micro_batches, step)
        reduce_partial_gradients(self.parameters.values())
        if self.gradient_checks:
            self.gradient_checks -= 1
            check_gradient_sync(self.parameters, self.ranks, f"step {step}")
        norm = global_norm(self.parameters.values(), self.stage_group) / self.loss_scale.scale
        clip_gradients(
            self.parameters.values(), norm, limit=self.config.clip_norm or math.inf, scale=self.loss_scale.scale
        )
        scaler_skipped = self._update(norm, step, learning_rate)
        share = sum((loss * batch.weights).sum() for loss, batch in zip(losses, micro_batches, strict=True))
        if not self.place.leads:
            share, losses = torch.zeros_like(share), [torch.zeros_like(loss) for loss in losses]
        return StepResult(share, torch.cat(losses), norm, scaler_skipped)

    def run(self, micro_batches: Sequence[MicroBatch], step: int) -> list[torch.Tensor]:
        """Forward and backward over all micro-batches; returns the loss of each row of each."""
        losses = []
        for batch in micro_batches[:-1]:
            with self.no_sync():
                losses.append(self._backward(batch, step))
        return [*losses, self._backward(micro_batches[-1], step)]

    def _backward(self, batch: MicroBatch, step: int) -> torch.Tensor:
        for part in self.parts:
            part.seed_dropout(self.config.seed, step, batch.first_row)
        with self.phases("forward"):
            with autocast(self.precision, self.ranks.device):
                logits = self.forward(batch.input_ids, batch.attention_mask)
            losses = row_losses(logits, batch.labels, self.config.label_smoothing)
        with self.phases("backward"):
            self.share_of_loss(losses, batch.weights).backward()
        return losses.detach()

    def share_of_loss(self, losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What a micro-batch's backward pass starts from, ().

        Gradients are averaged over the data ranks and are to be summed: the weights already divide by the global rows.
        """
        return weighted_loss(losses, weights) * (self.place.size * self.loss_scale.scale)

    def _update(self, norm: torch.Tensor, step: int, learning_rate: float) -> bool:
        """Step the optimizer unless the norm is not finite; returns whether the loss scale explains that.

        Raises:
            TrainingFailure: the gradients overflow in fp16 at the least loss scale too.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        # Where it is 1, fused AdamW leaves weights, moments and its count of steps alone: on a GPU nobody waits for
        # the norm, at which the Trainer looks a few steps later.
        self.own_moments()[1].found_inf = (~norm.isfinite()).float()
        with self.phases("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        if not self.loss_scale.enabled:
            return False
        finite = math.isfinite(norm)
        self.loss_scale.update(finite=finite)
        if self.loss_scale.scale < LossScale.LEAST:
            raise TrainingFailure(
                f"step {step}: the gradients overflow in fp16 even with a loss scale of {LossScale.LEAST:.0e}; use "
                "--precision bf16 or fp32, or lower --learning_rate, then start the same command again",
                quiet=not self.ranks.is_first,
            )
        return not finite

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Dropout off, and no gradients."""
        for part in self.parts:
            part.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for part in self.parts:
                part.train()

    def logits(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, precision: str) -> torch.Tensor:
        """Logits with dropout off: (batch, num_labels)."""
        with self.evaluating(), autocast(precision, self.ranks.device):
            return self.parts[0](*self.padded(input_ids, attention_mask))

    def padded(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A batch of an evaluation, of one of the lengths that training has."""
        length, multiple = input_ids.shape[1], length_multiple(self.config, self.ranks.device.type)
        missing = max(0, min(-(-length // multiple) * multiple, self.config.max_length) - length)
        if not missing:
            return input_ids, attention_mask
        return F.pad(input_ids, (0, missing)), F.pad(mask_of(input_ids, attention_mask), (0, missing))

    @property
    def test_precision(self) -> str:
        """What the last test can compute in: as the model will be served, if that is in its power."""
        return "fp32"

    @property
    def holds_full_weights(self) -> bool:
        """Whether this rank keeps whole tensors when the state is gathered: rank 0, and the first of each stage."""
        return self.ranks.is_first

    def own_moments(self) -> tuple[Mapping[str, nn.Parameter], torch.optim.Optimizer]:
        """The parameters whose moments this rank holds, and the optimizer that holds them."""
        return self.parameters, self.optimizer

    def state_dict(self) -> StrategyState:
        """Model, optimizer and loss scale, as far as this rank holds them."""
        tensors = model_tensors(self.parts) | optimizer_tensors(*self.own_moments())
        return StrategyState(tensors, {"loss_scale": self.loss_scale.state_dict()})

    def load_state_dict(self, saved: SavedState) -> None:
        """Take this rank's part of a state of any strategy."""
        self.load_weights(saved)
        read_optimizer(*self.own_moments(), saved)
        self.loss_scale.load_state_dict(saved.plain["loss_scale"])

    def full_weights(self) -> dict[str, torch.Tensor]:
        """The model's weights on the CPU of rank 0."""
        return full_model(self.parts, keep=self.holds_full_weights, stages=self.stage_group)

    def load_weights(self, saved: SavedState) -> None:
        """Take this rank's part of the weights of a state."""
        read_model(self.parts, saved)
