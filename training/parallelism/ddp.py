"""DDP: a whole copy of the model on each rank; gradients averaged bucket by bucket during the backward pass.

The same class serves a run on one process, without a group. Source: Li et al., "PyTorch Distributed", arXiv 2006.15704.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.data.batching import MicroBatch
from training.model.classifier import NewsClassifier, widen
from training.parallelism.base import BaseStrategy
from training.parallelism.blocks import apply_to_blocks
from training.parallelism.compression import build_compression
from training.parallelism.state import SavedState, StrategyState
from training.parallelism.strategy import StepResult


class DDPStrategy(BaseStrategy):
    """``DistributedDataParallel`` over all ranks; on one process without a group, the bare model.

    ``static_graph`` is off: it spares a search for unused parameters that is not made here, and forbids that the number
    of micro-batches ever changes.
    """

    def lay_out(self, model: NewsClassifier) -> list[nn.Module]:
        """A copy on each rank."""
        model.to(self.ranks.device).train()
        widen(model)
        apply_to_blocks(model, self.config, model.dropout_stream)
        self.pass_model = model  # gradients are awaited after the last of them is there
        self.replica: nn.Module = model
        if self.ranks.is_distributed:
            on_gpu = self.ranks.device.type == "cuda"
            self.replica = DistributedDataParallel(
                model, device_ids=[self.ranks.device] if on_gpu else None, gradient_as_bucket_view=True
            )
            # They are constants, such as the positions' numbers. The argument for it changed its name in torch 2.13.
            self.replica.broadcast_buffers = False
        self.compression = build_compression(self.config.compress) if self.ranks.is_distributed else None
        if self.config.deterministic or self.compression:
            self._settle_buckets(model)
        if self.compression:
            self.compression.attach(self.replica)
        return [model]

    def _settle_buckets(self, model: nn.Module) -> None:
        """Run one backward pass that counts for nothing.

        DDP orders its buckets anew after the first one, which changes the order in which more than two ranks sum; so
        that a resumed run adds up like one never stopped, that must be behind it before the first step that counts.
        """
        token = torch.ones(1, 1, dtype=torch.int64, device=self.ranks.device)
        (self.replica(token, token).sum() * 0).backward()
        model.zero_grad()

    def describe(self) -> str:
        """How many copies."""
        if not self.ranks.is_distributed:
            return "one process"
        copies = f"ddp: a copy on each of {self.ranks.world_size} rank{'s' * (self.ranks.world_size > 1)}"
        return (
            f"{copies}, gradients as {self.config.compress}{self.compression.traffic}" if self.compression else copies
        )

    def step(self, micro_batches: Sequence[MicroBatch], step: int, learning_rate: float) -> StepResult:
        """As every strategy's; compression hears of the loss scale."""
        if not self.compression:
            return super().step(micro_batches, step, learning_rate)
        self.compression.begin_step(self.loss_scale.scale if self.loss_scale.enabled else None)
        result = super().step(micro_batches, step, learning_rate)
        self.compression.end_step(result.grad_norm.isfinite())
        return result

    def state_dict(self) -> StrategyState:
        """As every strategy's, with the state of the compression."""
        state = super().state_dict()
        own = self.compression.state_dict(self.ranks) if self.compression else StrategyState({}, {})
        return StrategyState(state.tensors | own.tensors, state.plain | own.plain)

    def load_state_dict(self, saved: SavedState) -> None:
        """Take a state of any strategy; compression starts anew unless its own is there."""
        super().load_state_dict(saved)
        if self.compression:
            self.compression.load_state_dict(saved, self.ranks)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Logits of the copy."""
        return self.replica(input_ids, attention_mask)

    def no_sync(self) -> Any:
        """Without the all-reduce, forward pass included."""
        return self.replica.no_sync() if self.ranks.is_distributed else torch.enable_grad()
