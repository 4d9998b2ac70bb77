"""DeepSpeed's ZeRO, stages 0 to 3, behind the same interface and with the same numbers as the other
strategies.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from common.errors import UserError
from training.model.classifier import NewsClassifier, to_fp32
from training.model.optimizer import build_optimizer, parameter_groups
from training.model.precision import LossScale
from training.parallelism.blocks import apply_to_blocks
from training.parallelism.deepspeed_settings import Settings, deepspeed_settings
from training.parallelism.deepspeed_state import ShardedState
from training.parallelism.state import SavedState, StrategyState
from training.parallelism.strategy import Strategy


class DeepSpeedStrategy(Strategy):
    """An engine over all ranks. Stage 0 is data parallelism; stage 3 also shards the weights."""

    def parallelize(self, model: NewsClassifier) -> list[nn.Module]:
        deepspeed, settings = self.ranks.run_on_all_ranks(lambda: self._prepare(model))
        self.model = model.to(self.ranks.device).train()
        to_fp32(model)
        apply_to_blocks(model, self.config, model.dropout_stream)
        # A file may name one of DeepSpeed's own optimizers, which is then built from the groups.
        own, parameters = "optimizer" in settings, dict(model.named_parameters())
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=None if own else build_optimizer(model, parameters, self.config),
            model_parameters=parameter_groups(model, parameters, self.config) if own else None,
            config=settings,
            dist_init_required=False,
        )
        self.loss_scale = LossScale(enabled=False)  # the engine has its own
        self.state = ShardedState(self.engine, model)
        return [model]

    def build_optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer

    @property
    def test_precision(self) -> str:
        return self.precision

    def _prepare(self, model: NewsClassifier) -> tuple[ModuleType, Settings]:
        if not self.ranks.is_distributed:
            raise UserError(
                "--strategy deepspeed: needs a process group, even for one process; start with "
                "torchrun --nproc_per_node=N training/train_ddp.py",
                code="torchrun-needed",
            )
        if self.config.float8:
            raise UserError(
                "--float8 with --strategy deepspeed: not supported; use --strategy zero2 or zero3",
                code="flags-conflict",
            )
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        settings = deepspeed_settings(
            self.config, self.precision, self.ranks.world_size, num_parameters
        )
        deepspeed = import_deepspeed(self.ranks.device)
        # Uses the existing process group; DeepSpeed checks the settings against its size.
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
        shared = (
            "nothing",
            "optimizer",
            "optimizer and gradients",
            "optimizer, gradients and weights",
        )
        offload = ", in the machine's memory" if self.config.cpu_offload else ""
        stage = self.config.deepspeed_stage
        return (
            f"deepspeed: stage {stage}, {shared[stage]} sharded over {self.ranks.world_size} "
            f"ranks{offload}"
        )

    def begin_step(self, learning_rate: float) -> None:
        super().begin_step(learning_rate)
        # Set instead of counted by the engine, because a resumed run may have more micro-batches
        # than the flags say.
        self.engine.set_gradient_accumulation_boundary(True)

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext()  # the engine has converted the weights

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.engine(input_ids, attention_mask)

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(False)
        yield
        self.engine.set_gradient_accumulation_boundary(True)

    def engine_update(self) -> tuple[torch.Tensor, bool]:
        with self.phases("optimizer"):
            if self.config.deepspeed_stage > 0:
                self.engine.step()  # unless the norm is not finite, which DeepSpeed checks itself
                if self.config.deepspeed_stage == 3 and self.engine.optimizer.overflow:
                    # Small parameters that are kept whole were split, and are only put together
                    # again after an update; otherwise the next forward pass would do it, in bf16.
                    self.engine.optimizer.checkpoint_event_epilogue()
                norm = torch.as_tensor(
                    self.engine.get_global_grad_norm(),
                    dtype=torch.float32,
                    device=self.ranks.device,
                )
            else:
                # Stage 0 clips when it updates, but does not report a norm, nor check it.
                norm = get_total_norm(
                    [p.grad for p in self.model.parameters() if p.grad is not None]
                )
                if math.isfinite(norm):
                    self.engine.step()
                self.engine.zero_grad()
        return norm, self.precision == "fp16" and bool(self.engine.optimizer.overflow)

    def logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        precision: str,
        finish: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores,
    ) -> torch.Tensor:
        self.engine.eval()
        try:
            with torch.no_grad():
                return finish(self.engine(input_ids, attention_mask))
        finally:
            self.engine.train()

    def state_dict(self) -> StrategyState:
        """Each tensor is gathered, and kept by one rank."""
        return StrategyState(
            self.state.shared_tensors(self.ranks), {"loss_scale": self.state.loss_scale()}
        )

    def load_state_dict(self, saved: SavedState) -> None:
        self.load_weights(saved)
        self.state.load_moments(saved)
        self.state.load_loss_scale(saved.plain["loss_scale"])

    def full_weights(self) -> dict[str, torch.Tensor]:
        return self.state.weights(keep=self.ranks.is_first)

    def load_weights(self, saved: SavedState) -> None:
        self.state.load_weights(saved)


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed for this kind of device."""
    # Otherwise it looks for a device when it is imported, and prints that it does.
    os.environ["DS_ACCELERATOR"] = device.type
    # DeepSpeed still calls collectives by names that newer PyTorch warns about.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f"--strategy deepspeed: DeepSpeed is not installed ({error}); pip install "
            '"distrinews[deepspeed]"',
            code="package-missing",
        ) from error
    # Only for inference on CPUs; building it takes a compiler and most of a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
