"""DDP: a whole copy of the model on each rank; gradients averaged bucket by bucket during the
backward pass.

The same class serves a run on one process, without a group. Source: Li et al., "PyTorch
Distributed", arXiv 2006.15704.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.data.batching import MicroBatch
from training.model.attention import why_no_flash_attention
from training.model.classifier import NewsClassifier, to_fp32
from training.parallelism.blocks import apply_to_blocks
from training.parallelism.compression import build_compression
from training.parallelism.embedding_rows import EmbeddingRows, large_tables
from training.parallelism.state import SavedState, StrategyState
from training.parallelism.strategy import Strategy


class DDPStrategy(Strategy):
    """``DistributedDataParallel`` over all ranks; on one process without a group, the bare model.

    ``static_graph`` is off: it spares a search for unused parameters that is not made here, and
    forbids that the number of micro-batches ever changes.
    """

    def parallelize(self, model: NewsClassifier) -> list[nn.Module]:
        model.to(self.ranks.device).train()
        to_fp32(model)
        apply_to_blocks(model, self.config, model.dropout_stream)
        self.why_padded = self._why_padded(model)
        model.packs_rows = not self.why_padded
        self.unsynchronized_model = model  # only the backward pass waits for other ranks
        self.replica: nn.Module = model
        self.embedding_rows: EmbeddingRows | None = None
        if self.ranks.is_distributed:
            on_gpu = self.ranks.device.type == "cuda"
            # A GPU would have to tell the host which rows there are. Compression counts on having
            # all gradients.
            if not on_gpu and self.config.compress == "none" and (tables := large_tables(model)):
                self.embedding_rows = EmbeddingRows(tables)
                # Private, but DDP has no other way to leave a parameter out (torch 2.11 to 2.13).
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                    model, self.embedding_rows.names
                )
            # Without device_ids, with which it would move the mask to the GPU: see `to_device`.
            self.replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
            # A step does it itself, under every strategy (Strategy.broadcast_buffers). DDP would
            # also send constants. The argument for it was renamed in torch 2.13.
            self.replica.broadcast_buffers = False
        self.compression = (
            build_compression(self.config.compress) if self.ranks.is_distributed else None
        )
        if self.config.deterministic or self.compression:
            self._fix_bucket_order(model)
        if self.compression:
            self.compression.attach(self.replica)
        return [model]

    def _why_padded(self, model: NewsClassifier) -> str:
        """Why rows are not joined without padding; empty if they are."""
        device = self.ranks.device
        if self.config.compile:
            return "--compile would compile each new number of tokens"
        if device.type == "cpu":
            return ""  # the model decides, by its dropout
        if not (model.architecture and model.architecture.can_pack(model.network, device)):
            return "only the rows of DistilBERT and BERT are joined"
        heads = model.config.num_attention_heads
        size = model.config.hidden_size // heads
        return why_no_flash_attention(device, self.precision, heads, size)

    def to_device(self, batch: MicroBatch) -> MicroBatch:
        if self.why_padded:
            return super().to_device(batch)
        # The lengths of joined rows are read from the mask, which therefore stays on the CPU.
        moved = super().to_device(replace(batch, attention_mask=None))
        return replace(moved, attention_mask=batch.attention_mask)

    def _fix_bucket_order(self, model: nn.Module) -> None:
        """Run one backward pass and discard its gradients.

        DDP rebuilds its buckets after the first backward pass, in the order in which gradients
        became ready. With more than two ranks that changes the order of additions, and so the last
        bits. A resumed run must not differ from one that was never stopped, so both have the
        rebuild behind them before their first real step.
        """
        token = torch.ones(1, 1, dtype=torch.int64, device=self.ranks.device)
        model.eval()  # BatchNorm would neither take a single row nor forget it
        (self.replica(token, token).sum() * 0).backward()
        model.train().zero_grad()

    def describe(self) -> str:
        if not self.ranks.is_distributed:
            return "one process"
        copies = (
            f"ddp: a copy on each of {self.ranks.world_size} "
            f"rank{'s' * (self.ranks.world_size > 1)}"
        )
        return (
            f"{copies}, gradients as {self.config.compress}{self.compression.traffic}"
            if self.compression
            else copies
        )

    def begin_step(self, learning_rate: float) -> None:
        super().begin_step(learning_rate)
        if self.compression:
            self.compression.begin_step(self.loss_scale.scale if self.loss_scale.enabled else None)

    def finish_gradients(self) -> None:
        if self.embedding_rows:
            self.embedding_rows.average()

    def end_step(self, norm: torch.Tensor) -> None:
        if self.compression:
            self.compression.end_step(norm.isfinite())

    def state_dict(self) -> StrategyState:
        state = super().state_dict()
        own = self.compression.state_dict(self.ranks) if self.compression else StrategyState({}, {})
        return StrategyState(state.tensors | own.tensors, state.plain | own.plain)

    def load_state_dict(self, saved: SavedState) -> None:
        super().load_state_dict(saved)
        if self.compression:
            self.compression.load_state_dict(saved, self.ranks)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.replica(input_ids, attention_mask)

    def no_sync(self) -> Any:
        # DDP decides in the forward pass already whether the backward pass will all-reduce.
        return self.replica.no_sync() if self.ranks.is_distributed else torch.enable_grad()
