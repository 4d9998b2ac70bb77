"""MeshStrategy: pipeline stages, tensor parallelism and sharded or replicated state, in any
combination, on one mesh.

Serves zero2, zero3, tp, pp and 3d, which only differ in their degrees. The order of steps is fixed:
stages, tensor parallelism, what is applied to each block, data parallelism. PyTorch cannot split
what is already sharded (a DTensor on one mesh cannot be distributed over another), and a split
after compilation would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import gcd

import torch
from torch import nn

from common.errors import UserError
from training.data.batching import DataShard, MicroBatch
from training.model.architectures import find_blocks
from training.model.classifier import NewsClassifier, to_fp32
from training.parallelism.blocks import apply_to_blocks
from training.parallelism.dims import ParallelDims
from training.parallelism.fsdp import apply_fsdp, set_gradient_sync
from training.parallelism.pipeline import Pipeline, check_pipeline
from training.parallelism.schedules import stages_of
from training.parallelism.stages import Stage, split_stages
from training.parallelism.strategy import Strategy, loss_share, row_losses
from training.parallelism.tensor_parallel import apply_tensor_parallel


class MeshStrategy(Strategy):
    def parallelize(self, model: NewsClassifier) -> list[nn.Module]:
        config, ranks = self.config, self.ranks
        if not ranks.is_distributed:
            raise UserError(
                f"--strategy {config.strategy}: needs a process group; start with torchrun, or "
                "use ddp",
                code="torchrun-needed",
            )
        # Machines may have different numbers of ranks: what divides all of these fits into each
        # machine.
        ranks_per_machine = gcd(*ranks.gather(ranks.local_world_size))
        self.dims = dims = ParallelDims.from_config(config, ranks.world_size, ranks_per_machine)
        self.mesh = dims.build_mesh(ranks.device.type)
        self.coordinates = dict(
            zip(self.mesh.mesh_dim_names, self.mesh.get_coordinate(), strict=True)
        )
        parts: list[nn.Module] = self._stages(model.train()) if dims.pp > 1 else [model.train()]
        is_replica_leader = self.coordinates["tp"] == 0 and (
            dims.pp == 1 or any(stage.is_last for stage in parts)
        )
        self.data_shard = DataShard(
            dims.data_rank(ranks.rank), dims.dp, is_replica_leader, stages=dims.pp
        )
        for part in parts:
            self._parallelize_part(part, model)
        return parts

    def _stages(self, model: NewsClassifier) -> list[Stage]:
        config, index, degree = self.config, self.coordinates["pp"], self.dims.pp
        check_pipeline(config, degree)
        where = f"--pp {degree} --pp_schedule {config.pp_schedule}"
        indices = stages_of(config.pp_schedule, index, degree)
        stages = split_stages(model, indices, degree * len(indices), where)
        self.stage_group = self.mesh["pp"].get_group()
        sequence_parts = self.dims.tp if config.sequence_parallel else 1
        self.pipeline = Pipeline(
            stages, self.stage_group, config.pp_schedule, self._loss, sequence_parts
        )
        return stages

    def _loss(
        self, logits: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        losses = row_losses(self.task, logits, batch, self.config)
        checks = self.task.label_logprobs(logits.detach(), batch.labels)
        return loss_share(losses, batch.weights) * self.loss_factor, losses, checks

    def logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        precision: str,
        finish: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores,
    ) -> torch.Tensor:
        if not self.pipeline:
            return super().logits(input_ids, attention_mask, precision, finish)
        with self.evaluating():
            ids, mask = self.padded(input_ids, attention_mask)
            return self.pipeline.logits(ids, mask, precision, finish, self.task.num_scores)

    def _parallelize_part(self, part: nn.Module, model: NewsClassifier) -> None:
        config, dims = self.config, self.dims
        if dims.tp > 1:
            self._split_tensors(part, model)
        apply_to_blocks(part, config, model.dropout_stream)
        if dims.dp > 1:
            apply_fsdp(
                part,
                find_blocks(part),
                self.mesh["dp_replicate", "dp_shard"]
                if dims.dp_replicate > 1
                else self.mesh["dp_shard"],
                # A stage sees many micro-batches per step, and gathering its weights for each of
                # them would cost too much.
                reshard_after_forward=config.strategy != "zero2" and dims.pp == 1,
                precision=self.precision,
                cpu_offload=config.cpu_offload,
            )
        if dims.dp == 1 or not config.cpu_offload:
            part.to(self.ranks.device)
        to_fp32(part)

    def _split_tensors(self, part: nn.Module, model: NewsClassifier) -> None:
        config, tp = self.config, self.dims.tp
        if config.sequence_parallel and config.max_length % tp:
            raise UserError(
                f"--max_length {config.max_length}: --sequence_parallel needs a multiple of --tp "
                f"{tp}",
                code="uneven-split",
            )
        frozen = [
            name for name, parameter in part.named_parameters() if not parameter.requires_grad
        ]
        apply_tensor_parallel(part, self.mesh["tp"], sequence_parallel=config.sequence_parallel)
        for name in frozen:  # not every style of torch keeps it
            part.get_parameter(name).requires_grad_(False)
        # Compiled blocks also draw from torch's generator, and what they draw must be alike on all
        # ranks.
        if not config.compile:
            model.dropout_stream.tensor_rank = self.coordinates["tp"]

    @property
    def test_precision(self) -> str:
        # FSDP gathers weights in the precision that trains.
        return self.precision if self.dims.dp > 1 else "fp32"

    def describe(self) -> str:
        return f"{self.config.strategy}: {self.dims}"

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.parts[0](input_ids, attention_mask)

    def no_sync(self) -> AbstractContextManager[None]:
        # Gradients accumulate in their shards, which spares the memory of whole ones, so only the
        # all-reduce between replicas can be left out.
        return self._without_sync() if self.dims.dp_replicate > 1 else nullcontext()

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        set_gradient_sync(self.parts, wanted=False, between_copies_only=self.dims.dp_shard > 1)
        yield
        set_gradient_sync(self.parts, wanted=True)

    @property
    def holds_full_weights(self) -> bool:
        return all(index == 0 for dim, index in self.coordinates.items() if dim != "pp")
