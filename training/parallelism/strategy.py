"""What every strategy gives to a training step: where the model is, how a forward pass runs, who
communicates what.

The step itself is in ``training/run/step.py``. Most strategies only say in
:meth:`Strategy.parallelize` how the model is distributed over the ranks; checkpoints and evaluation
then work on the parts that this rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from common.memory import keep_freed_memory
from training.config import TrainConfig
from training.data.batching import DataShard, MicroBatch
from training.distributed.ranks import Ranks
from training.model.architectures import mask_of
from training.model.average import WeightAverage
from training.model.classifier import NewsClassifier
from training.model.optimizer import build_optimizer, make_moments
from training.model.precision import LossScale, autocast
from training.monitoring.phases import Phases
from training.parallelism.blocks import length_multiple
from training.parallelism.float8 import check_float8
from training.parallelism.state import (
    SavedState,
    StrategyState,
    full_model,
    model_tensors,
    optimizer_tensors,
    read_optimizer,
)
from training.tasks import Task


@dataclass(frozen=True)
class StepResult:
    """One optimizer step; its tensors are still on the device.

    ``loss``: this rank's share of the global mean loss, (); 0 on a rank that is not its replica's
    leader. ``row_losses``: the loss of each of this rank's rows, (rows,); 0 on such a rank.
    ``checks``: of each of this rank's rows, (rows, 3), see :meth:`Task.label_logprobs`; None on
    such a rank, or if the task has none. ``right``: how many of these rows were answered right, and
    how many there are, (2,). ``grad_norm``: the global gradient norm before clipping, (). If it is
    not finite, weights and moments are unchanged. ``scaler_skipped``: the step was skipped because
    the loss scale was too high, which is normal in fp16.
    """

    loss: torch.Tensor
    row_losses: torch.Tensor
    grad_norm: torch.Tensor
    scaler_skipped: bool
    checks: torch.Tensor | None
    right: torch.Tensor


class Strategy:
    """One rank's part of a model and its optimizer.

    Args:
        model: whole, on the CPU; it is changed in place.
        precision: of the training steps.
        phases: of the run, which records how long communication takes; unset = those of this
            strategy alone.

    Raises:
        UserError: the degrees, the model or the machine do not allow this strategy.
    """

    def __init__(
        self,
        model: NewsClassifier,
        config: TrainConfig,
        ranks: Ranks,
        precision: str,
        phases: Phases | None = None,
    ) -> None:
        if ranks.device.type == "cpu":
            keep_freed_memory()
        self.config = config
        self.ranks = ranks
        self.precision = precision
        if config.float8:
            ranks.run_on_all_ranks(lambda: check_float8(config, ranks.device, precision))
        self.data_shard = DataShard(ranks.rank, ranks.world_size)
        self.phases = phases or Phases()
        self.loss_scale = LossScale(enabled=precision == "fp16")
        self.task, self.head = model.task, model.head
        self.gradient_checks_left = config.check_gradient_sync
        # Why rows are padded while training; empty if they are joined (``training.model.packing``).
        self.why_padded = "only --strategy ddp and zero1 join rows"
        # Set by the strategies that have one.
        self.pipeline: Any = None  # its schedule runs forward and backward over all micro-batches
        # The ranks that hold the other stages of the pipeline.
        self.stage_group: dist.ProcessGroup | None = None
        self.engine: Any = None  # DeepSpeed's
        # A module whose forward pass waits for no other rank, so that timing it shows how fast this
        # rank is.
        self.unsynchronized_model: nn.Module | None = None

        self.parts = self.parallelize(model)
        self.parameters: Mapping[str, nn.Parameter] = {
            name: parameter
            for part in self.parts
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        }
        self.buffers: Mapping[str, torch.Tensor] = _running_statistics(self.parts)
        self.optimizer = self.build_optimizer()
        self.average = self._average_of_weights() if config.ema else None

    def _average_of_weights(self) -> WeightAverage:
        # Running statistics are averaged like weights; their counters, which are integers, cannot
        # be.
        floats = {
            name: tensor for name, tensor in self.buffers.items() if tensor.is_floating_point()
        }
        return WeightAverage({**self.parameters, **floats}, self.config.ema)

    def parallelize(self, model: NewsClassifier) -> list[nn.Module]:
        """Distribute the model over the ranks; returns the parts whose parameters this rank trains."""
        raise NotImplementedError

    def build_optimizer(self) -> torch.optim.Optimizer:
        """AdamW over this rank's parameters, its moments already allocated: too little memory shows at the start."""
        optimizer = build_optimizer(self.parts[0], self.parameters, self.config)
        make_moments(optimizer)
        return optimizer

    def describe(self) -> str:
        raise NotImplementedError

    def notes(self) -> Iterator[str]:
        """What the report says about the layout."""
        if self.test_precision != "fp32":
            yield f"The test ran in {self.test_precision}, in which sharded weights are gathered."
        yield f"Layout: {self.describe()}."

    # What a step asks for

    def begin_step(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_factor"]

    def to_device(self, batch: MicroBatch) -> MicroBatch:
        """A micro-batch where :meth:`forward` takes it."""
        return batch.to(self.ranks.device)

    def seed_dropout(self, step: int, first_row: int) -> None:
        """Make dropout a function of seed, step and row, so that it is the same on any number of ranks."""
        for part in self.parts:
            part.seed_dropout(self.config.seed, step, first_row)

    def autocast(self) -> AbstractContextManager[object]:
        return autocast(self.precision, self.ranks.device)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Logits with dropout: (batch, num_labels)."""
        raise NotImplementedError

    @property
    def loss_factor(self) -> float:
        """What the loss is multiplied by before the backward pass.

        DDP and FSDP average gradients over the data-parallel ranks, but the shares of the loss are
        to be added up.
        """
        return self.data_shard.size * self.loss_scale.scale

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def no_sync(self) -> AbstractContextManager[object]:
        """Within it, forward and backward passes communicate no gradients: for all micro-batches but the last."""
        raise NotImplementedError

    def finish_gradients(self) -> None:
        """Average what the last backward pass does not: nothing, for most strategies."""

    def broadcast_buffers(self) -> None:
        """Give all ranks rank 0's running statistics, as plain DDP does; each rank computed them
        from its own rows.

        Once per step, after its forward passes, so that evaluation, checkpoints and comparisons
        find equal ones.
        """
        if self.ranks.is_distributed:
            for buffer in self.buffers.values():
                dist.broadcast(buffer, src=0)

    def engine_update(self) -> tuple[torch.Tensor, bool]:
        """Clip and update by ``engine``; returns the gradient norm, (), and whether its loss scale skipped the step."""
        raise NotImplementedError

    def end_step(self, norm: torch.Tensor) -> None: ...

    # Evaluation

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        for part in self.parts:
            part.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for part in self.parts:
                part.train()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, the weights are their moving average, if the run keeps one; nothing is trained or saved there."""
        self._swap_average()
        try:
            yield
        finally:
            self._swap_average()

    def _swap_average(self) -> None:
        if self.average:
            # Asked for its state, FSDP also frees weights that it has gathered, which would be the
            # old ones.
            self.average.swap(model_tensors(self.parts))

    def logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        precision: str,
        finish: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores,
    ) -> torch.Tensor:
        """``finish`` of the logits without dropout: (batch, :attr:`Task.num_scores`), on every
        rank.

        All ranks call it equally often; ranks of the same replica give the same batch.
        """
        with self.evaluating(), autocast(precision, self.ranks.device):
            return finish(self.parts[0](*self.padded(input_ids, attention_mask)))

    def padded(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A batch padded to one of the lengths that training has, so that compiled code need not be compiled again."""
        length, multiple = input_ids.shape[1], length_multiple(self.config, self.ranks.device.type)
        missing = max(0, min(-(-length // multiple) * multiple, self.config.max_length) - length)
        if not missing:
            return input_ids, attention_mask
        return F.pad(input_ids, (0, missing)), F.pad(
            mask_of(input_ids, attention_mask), (0, missing)
        )

    @property
    def test_precision(self) -> str:
        """The most exact precision that :meth:`logits` can compute in."""
        return "fp32"

    # State: names and meaning are the same for all strategies, so a checkpoint of one resumes under
    # another

    @property
    def holds_full_weights(self) -> bool:
        """Whether this rank keeps whole tensors when state is gathered: rank 0, and the first rank of each stage."""
        return self.ranks.is_first

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that holds the moments of ``local_parameters``."""
        return self.optimizer

    @property
    def local_parameters(self) -> Mapping[str, nn.Parameter]:
        return self.parameters

    def saved_weights(self) -> dict[str, torch.Tensor]:
        """What this rank holds of the weights that a checkpoint has; with LoRA only those that
        change.

        The others come from the model itself, and a resumed run checks that they are the same.
        """
        weights = model_tensors(self.parts)
        if not self.config.lora:
            return weights
        changed = {*self.parameters, *self.buffers}
        return {
            name: tensor
            for name, tensor in weights.items()
            if name.removeprefix("model/") in changed
        }

    def state_dict(self) -> StrategyState:
        """What this rank holds of model, optimizer and loss scale; every rank calls it."""
        tensors = self.saved_weights() | optimizer_tensors(
            self.local_parameters, self.local_optimizer
        )
        average = self.average.tensors if self.average else {}
        return StrategyState(tensors | average, {"loss_scale": self.loss_scale.state_dict()})

    def load_state_dict(self, saved: SavedState) -> None:
        """Read this rank's part of a state of any strategy, from any number of ranks."""
        self.load_weights(saved)
        read_optimizer(self.local_parameters, self.local_optimizer, saved)
        self.loss_scale.load_state_dict(saved.plain["loss_scale"])

    def full_weights(self) -> dict[str, torch.Tensor]:
        return full_model(self.parts, keep=self.holds_full_weights, stages=self.stage_group)

    def load_weights(self, saved: SavedState) -> None:
        """Read only this rank's weights and their average, for evaluation."""
        saved.read(self.saved_weights())
        if self.average:
            saved.read(self.average.tensors)


def row_losses(
    task: Task, scores: torch.Tensor, batch: MicroBatch, config: TrainConfig
) -> torch.Tensor:
    """The loss of each row of a micro-batch, (rows,), by its label and, with ``--distill``, the teacher's answer."""
    by_labels = task.loss(scores, batch.labels, config.label_smoothing)
    if batch.teacher is None:
        return by_labels
    by_teacher = task.teacher_losses(scores, batch.teacher)
    mixed = torch.lerp(by_labels, by_teacher, config.distill_share)
    # Not a product with 0: the loss of a label that is not there may be infinite.
    return torch.where(batch.is_labelled, mixed, by_teacher)


def loss_share(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A micro-batch's share of the global mean loss, ().

    Each row's weight is 1 / rows of the global batch, so the shares of all ranks and micro-batches
    add up to the mean.

    A loss that is not finite makes every gradient NaN. Cross-entropy does not do that by itself (a
    logit of minus infinity at the label gives an infinite loss with finite gradients), and it tells
    all ranks of a bad row on any of them, because they all know the global gradient norm.
    """
    return (losses * torch.where(losses.isfinite(), weights, math.nan)).sum()


def _running_statistics(parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """What training changes besides the weights, by name: the running statistics of BatchNorm and
    its kind.

    Encoders of transformers have none; their constants, such as rotary frequencies, are not in the
    state dict.
    """
    names = {name for part in parts for name, _ in part.named_buffers()}
    kept = {
        name: tensor
        for part in parts
        for name, tensor in part.state_dict().items()
        if name in names
    }
    return kept if any(tensor.is_floating_point() for tensor in kept.values()) else {}
