"""Data parallelism: a whole copy of the model on each rank, gradients averaged while the backward pass runs.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.batching import MicroBatch
from training.config import TrainConfig
from training.distributed import Ranks
from training.model import NewsClassifier
from training.optimization import build_optimizer
from training.parallelism.strategy import StepResult, row_losses
from training.precision import autocast


class DDPStrategy:
    """``DistributedDataParallel`` over all ranks; on one process without a group, the bare model."""

    def __init__(self, model: NewsClassifier, config: TrainConfig, ranks: Ranks, precision: str) -> None:
        self.config = config
        self.ranks = ranks
        self.precision = precision
        self.model = model.to(ranks.device).train()
        self.optimizer = build_optimizer(self.model, config.weight_decay)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=precision == "fp16")
        self.replica: nn.Module = self._replicate()
        if config.deterministic:
            self._settle_buckets()
        if config.compile:
            self.replica = torch.compile(self.replica, dynamic=True)

    def _replicate(self) -> nn.Module:
        if not self.ranks.is_distributed:
            return self.model
        on_gpu = self.ranks.device.type == "cuda"
        return DistributedDataParallel(
            self.model,
            device_ids=[self.ranks.local_rank] if on_gpu else None,
            gradient_as_bucket_view=True,
        )

    def _settle_buckets(self) -> None:
        """Run one backward pass that counts for nothing.

        DDP orders its buckets anew after the first one, which changes the order in which four ranks sum; so that a
        resumed run adds up like one never stopped, that must be behind it before the first step that counts.
        """
        token = torch.ones(1, 1, dtype=torch.int64, device=self.ranks.device)
        (self.replica(token, token).sum() * 0).backward()
        self.optimizer.zero_grad()

    def step(self, micro_batches: Sequence[MicroBatch], step: int, learning_rate: float) -> StepResult:
        """Forward and backward over all micro-batches, clip, and one optimizer step."""
        losses = [
            self._backward(batch, step, is_last=i == len(micro_batches) - 1) for i, batch in enumerate(micro_batches)
        ]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.unscale_(self.optimizer)
        limit = self.config.clip_norm or math.inf
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        scaler_skipped = self._update(grad_norm)
        self.optimizer.zero_grad()
        weighted = sum((loss * batch.weights).sum() for loss, batch in zip(losses, micro_batches, strict=True))
        return StepResult(weighted, torch.cat(losses), grad_norm.detach(), scaler_skipped)

    def _backward(self, batch: MicroBatch, step: int, *, is_last: bool) -> torch.Tensor:
        self.model.seed_dropout(self.config.seed, step, batch.first_row)
        hold_sync = self.ranks.is_distributed and not is_last
        with self.replica.no_sync() if hold_sync else nullcontext():
            with autocast(self.precision, self.ranks.device):
                logits = self.replica(batch.input_ids, batch.attention_mask)
            losses = row_losses(logits, batch.labels, self.config.label_smoothing)
            # DDP averages over ranks what is to be summed: the weights already divide by the global rows.
            self.scaler.scale((losses * batch.weights).sum() * self.ranks.world_size).backward()
        return losses.detach()

    def _update(self, grad_norm: torch.Tensor) -> bool:
        """Step the optimizer; returns whether the scaler skipped it."""
        if not self.scaler.is_enabled():
            # On the CPU the look is free, and spares the weights; on a GPU the Trainer looks a few steps later.
            if grad_norm.device.type == "cuda" or math.isfinite(grad_norm):
                self.optimizer.step()
            return False
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() < scale

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and scaler."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state of any number of ranks: all of it is the same on each."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def full_weights(self) -> dict[str, torch.Tensor]:
        """The model's weights on the CPU."""
        return {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Take whole weights."""
        self.model.load_state_dict(weights)
