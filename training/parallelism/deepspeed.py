"""DeepSpeed's ZeRO, stages 0 to 3, behind the same interface and with the same numbers as the other strategies.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import ModuleType

import torch
from torch.nn.utils import get_total_norm

from common.errors import UserError
from training.config import TrainConfig
from training.data.batching import DataPlace, MicroBatch
from training.model.classifier import NewsClassifier, widen
from training.model.optimizer import build_optimizer, parameter_groups
from training.parallelism.blocks import apply_to_blocks
from training.parallelism.deepspeed_settings import Settings, deepspeed_settings
from training.parallelism.deepspeed_state import ShardedState
from training.parallelism.distributed import Ranks, name_accelerator
from training.parallelism.state import SavedState, StrategyState
from training.parallelism.strategy import StepResult, row_losses, weighted_loss
from training.run.phases import Phases


class DeepSpeedStrategy:
    """A DeepSpeed engine over all ranks; stage 0 is data parallelism, 3 shares out the weights too."""

    def __init__(self, model: NewsClassifier, config: TrainConfig, ranks: Ranks, precision: str) -> None:
        self.config = config
        self.ranks = ranks
        self.precision = self.test_precision = precision
        self.place = DataPlace(ranks.rank, ranks.world_size)
        self.phases = Phases()
        deepspeed, settings = ranks.run_on_all_ranks(lambda: self._prepare(model))
        self.model = model.to(ranks.device).train()
        widen(model)
        apply_to_blocks(model, config, model.dropout_stream)
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.pass_model = None  # its backward pass reduces as it goes
        # A file may name an optimizer of DeepSpeed's own, which then takes the groups.
        own = "optimizer" in settings
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=None if own else build_optimizer(model.parameters(), config.weight_decay),
            model_parameters=parameter_groups(model.parameters(), config.weight_decay) if own else None,
            config=settings,
            dist_init_required=False,
        )
        self.state = ShardedState(self.engine, model)

    def _prepare(self, model: NewsClassifier) -> tuple[ModuleType, Settings]:
        if not self.ranks.is_distributed:
            raise UserError(
                "--strategy deepspeed: needs a process group, also for one process; start with "
                "torchrun --nproc_per_node=N training/train_ddp.py",
                code="torchrun-needed",
            )
        if self.config.float8:
            raise UserError(
                "--float8 with --strategy deepspeed: not supported; use --strategy zero2 or zero3",
                code="flags-conflict",
            )
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        settings = deepspeed_settings(self.config, self.precision, self.ranks.world_size, num_parameters)
        deepspeed = import_deepspeed(self.ranks.device)
        # Takes the group that stands; the settings are checked against its size.
        deepspeed.init_distributed(self.ranks.backend, auto_mpi_discovery=False, verbose=False)
        try:
            deepspeed.DeepSpeedConfig(settings)
        except (ValueError, TypeError, AssertionError, deepspeed.DeepSpeedConfigError) as error:
            where = self.config.deepspeed_config or "made from the flags"
            raise UserError(
                f"--deepspeed_config {where}: DeepSpeed refuses it: {' '.join(str(error).split())}",
                code="deepspeed-config",
            ) from error
        return deepspeed, settings

    def describe(self) -> str:
        """The stage and what it shares out."""
        shared = ("nothing", "optimizer", "optimizer and gradients", "optimizer, gradients and weights")
        offload = ", in the machine's memory" if self.config.cpu_offload else ""
        stage = self.config.deepspeed_stage
        return f"deepspeed: stage {stage}, {shared[stage]} shared out over {self.ranks.world_size} ranks{offload}"

    def step(self, micro_batches: Sequence[MicroBatch], step: int, learning_rate: float) -> StepResult:
        """Forward and backward over all micro-batches, clip, and one optimizer step."""
        losses = [
            self._backward(batch, step, is_last=i == len(micro_batches) - 1) for i, batch in enumerate(micro_batches)
        ]
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        with self.phases("optimizer"):
            norm = self._update()
        share = sum((loss * batch.weights).sum() for loss, batch in zip(losses, micro_batches, strict=True))
        skipped = self.precision == "fp16" and bool(self.engine.optimizer.overflow)
        return StepResult(share, torch.cat(losses), norm, skipped)

    def _backward(self, batch: MicroBatch, step: int, *, is_last: bool) -> torch.Tensor:
        self.model.seed_dropout(self.config.seed, step, batch.first_row)
        # Told, not counted: a resumed run may have more micro-batches than the flags say.
        self.engine.set_gradient_accumulation_boundary(is_last)
        with self.phases("forward"):
            logits = self.engine(batch.input_ids, batch.attention_mask)
            losses = row_losses(logits, batch.labels, self.config.label_smoothing)
        with self.phases("backward"):
            # The engine averages over ranks what is to be summed: the weights already divide by the global rows.
            share = weighted_loss(losses, batch.weights) * self.ranks.world_size
            self.engine.backward(share, scale_wrt_gas=False)
        return losses.detach()

    def _update(self) -> torch.Tensor:
        """Clip and step unless the norm is not finite, at which DeepSpeed looks itself; returns it, ()."""
        if self.config.deepspeed_stage > 0:
            self.engine.step()
            if self.config.deepspeed_stage == 3 and self.engine.optimizer.overflow:
                # Small parameters that stay whole were cut up, and are put together again only after a step that is
                # made; the next forward pass would do it in bf16.
                self.engine.optimizer.checkpoint_event_epilogue()
            return torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=self.ranks.device)
        # Stage 0 clips as it steps, but tells no norm and looks at none.
        norm = get_total_norm([parameter.grad for parameter in self.model.parameters() if parameter.grad is not None])
        if math.isfinite(norm):
            self.engine.step()
        self.engine.zero_grad()
        return norm

    def logits(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, precision: str) -> torch.Tensor:
        """Logits with dropout off, in the precision that the engine trains in: (batch, num_labels)."""
        self.engine.eval()
        try:
            with torch.no_grad():
                return self.engine(input_ids, attention_mask)
        finally:
            self.engine.train()

    def state_dict(self) -> StrategyState:
        """Model, optimizer and loss scale; each tensor is gathered and kept by one rank."""
        return StrategyState(self.state.shared_tensors(self.ranks), {"loss_scale": self.state.loss_scale()})

    def load_state_dict(self, saved: SavedState) -> None:
        """Take this rank's part of a state of any strategy."""
        self.load_weights(saved)
        self.state.load_moments(saved)
        self.state.load_loss_scale(saved.plain["loss_scale"])

    def full_weights(self) -> dict[str, torch.Tensor]:
        """The model's weights on the CPU of rank 0."""
        return self.state.weights(keep=self.ranks.is_first)

    def load_weights(self, saved: SavedState) -> None:
        """Take this rank's part of the weights of a state."""
        self.state.load_weights(saved)


def import_deepspeed(device: torch.device) -> ModuleType:
    """DeepSpeed for the kind of device that the run is on.

    Raises:
        UserError: it is not installed.
    """
    name_accelerator(device)
    # DeepSpeed calls collectives by names that newer PyTorch warns of.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f'--strategy deepspeed: DeepSpeed is not installed ({error}); pip install "distrinews[deepspeed]"',
            code="package-missing",
        ) from error
    # For inference on CPUs alone; to build it takes a compiler and most of a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
