"""Pipeline parallelism: stages on different ranks work on different micro-batches at the same time.

The micro-batches of a step are those of gradient accumulation; ``schedules.py`` has the order in
which they run. Hidden states are sent to the next stage and their gradients to the previous one;
all stages know the attention mask. Sources: Huang et al., "GPipe", arXiv 1811.06965; Narayanan et
al., arXiv 2104.04473; docs.pytorch.org/docs/stable/distributed.pipelining.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from common.errors import UserError
from training.config import TrainConfig
from training.data.batching import MicroBatch
from training.model.architectures import mask_of
from training.parallelism.schedules import SCHEDULES, check_micro_batches, stages_of
from training.parallelism.stages import Stage

Shape = tuple[int, int, int]  # micro-batches, rows of each, padded length
# Schedules kept, by shape. Building one takes milliseconds, and messages through all stages that
# make the host wait for the GPU. Texts have a few hundred lengths at most, and the buffers, which
# take the memory, are shared.
MOST_SCHEDULES = 128
Loss = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def check_pipeline(config: TrainConfig, num_ranks: int) -> None:
    """Check that the flags work with a pipeline of ``num_ranks``."""
    schedule = config.pp_schedule
    check_micro_batches(
        schedule, num_ranks, config.gradient_accumulation, "--gradient_accumulation"
    )
    if not SCHEDULES[schedule].splits_backward:
        return
    if config.compile:
        raise UserError(
            f"--compile and --pp_schedule {schedule}: this schedule splits backward passes; use "
            "interleaved",
            code="flags-conflict",
        )
    if config.activation_checkpointing == "selective":
        raise UserError(
            f"--activation_checkpointing selective and --pp_schedule {schedule}: recomputed "
            "activations would be "
            "needed twice; use full, or --pp_schedule interleaved",
            code="flags-conflict",
        )


class Pipeline:
    """This rank's stages, running together with those of the other ranks.

    Args:
        stages: from ``split_stages``, possibly wrapped for other kinds of parallelism.
        loss: from logits and their micro-batch to the scalar that the backward pass starts from,
            (), each row's loss and, if the task has them, what ``label_logprobs`` returns.
        sequence_parts: over how many ranks the hidden states between stages are split (sequence
            parallelism).
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        group: dist.ProcessGroup,
        schedule: str,
        loss: Loss,
        sequence_parts: int = 1,
    ) -> None:
        self.stages = stages
        self.group = group
        self.schedule = SCHEDULES[schedule]
        self.loss = loss
        self.sequence_parts = sequence_parts
        ranks = group.size()
        # The rank in the group that holds each stage.
        self.rank_of = {
            stage: rank for rank in range(ranks) for stage in stages_of(schedule, rank, ranks)
        }
        self.config = stages[0].network.config
        self._schedules: OrderedDict[Shape, tuple[PipelineScheduleMulti, list[PipelineStage]]] = (
            OrderedDict()
        )
        # Receive buffers, flat, each as large as the largest shape so far needed.
        self._buffers: dict[tuple[str, int, int], torch.Tensor] = {}
        self._micro_batches: Sequence[MicroBatch] = ()
        self._row_losses: list[torch.Tensor] = []
        self._checks: dict[int, torch.Tensor] = {}

    def run(
        self, micro_batches: Sequence[MicroBatch], seed: int, step: int, precision: str
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Forward and backward over all micro-batches of a step, which have the same shape.

        Returns:
            The loss of each row of each micro-batch on the rank with the last stage, zeros
            elsewhere; and there their checks, nothing elsewhere.
        """
        # The schedule hands the loss function only tensors, so it is given each micro-batch's
        # number as its "target", and looks up labels and weights here.
        self._micro_batches = micro_batches
        self._row_losses = [torch.zeros_like(batch.weights) for batch in micro_batches]
        self._checks = {}
        for stage in self.stages:
            stage.precision = precision
            stage.positions = iter([(seed, step, batch.first_row) for batch in micro_batches])
        inputs = (
            [torch.cat([batch.input_ids for batch in micro_batches])]
            if self.stages[0].is_first
            else []
        )
        first = micro_batches[0].input_ids
        schedule, stages = self._schedule_for((len(micro_batches), *first.shape), first.device)
        self._attach_buffers(stages)
        schedule.step(
            *inputs,
            attention_mask=torch.cat(
                [mask_of(batch.input_ids, batch.attention_mask) for batch in micro_batches]
            ),
            target=torch.arange(len(micro_batches)),
            return_outputs=False,
        )
        # The next step may have another shape and so another schedule, which uses the same memory.
        self._detach_buffers(stages)
        return self._row_losses, [self._checks[number] for number in sorted(self._checks)]

    def _share_of_loss(self, logits: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        share, row_losses, checks = self.loss(logits, self._micro_batches[number.item()])
        self._row_losses[number.item()] = row_losses.detach()
        if checks is not None:
            self._checks[number.item()] = checks
        return share

    def _schedule_for(
        self, shape: Shape, device: torch.device
    ) -> tuple[PipelineScheduleMulti, list[PipelineStage]]:
        """The schedule of a shape, with its stages; the least recently used one makes room for a new one."""
        if shape not in self._schedules:
            if len(self._schedules) == MOST_SCHEDULES:
                self._schedules.popitem(last=False)
            self._schedules[shape] = self._build_schedule(shape, device)
        self._schedules.move_to_end(shape)
        return self._schedules[shape]

    def _build_schedule(
        self, shape: Shape, device: torch.device
    ) -> tuple[PipelineScheduleMulti, list[PipelineStage]]:
        count, rows, length = shape
        stages = [self._pipeline_stage(stage, rows, length, device) for stage in self.stages]
        make = get_schedule_class(self.schedule.torch_name)
        # Gradients are not divided by the number of micro-batches, because the rows' weights are
        # shares of the whole batch.
        schedule = make(
            stages if self.schedule.is_looped else stages[0],
            count,
            loss_fn=self._share_of_loss,
            scale_grads=False,
        )
        return schedule, stages

    def _attach_buffers(self, stages: Sequence[PipelineStage]) -> None:
        """Give the shared receive buffers to a schedule that has run before; a new one allocates its own."""
        for key, info in _received(stages):
            size = info.tensor_meta.shape.numel()
            info.buffer = self._buffers[key][:size].view(info.tensor_meta.shape)

    def _detach_buffers(self, stages: Sequence[PipelineStage]) -> None:
        """Take the buffers back for the next schedule, so that this one only holds its order of actions."""
        for stage in stages:
            stage.clear_runtime_states()
        for key, info in _received(stages):
            if key not in self._buffers or len(self._buffers[key]) < info.buffer.numel():
                self._buffers[key] = info.buffer.detach().flatten()
            info.buffer = None

    def _pipeline_stage(
        self, stage: Stage, rows: int, length: int, device: torch.device
    ) -> PipelineStage:
        # With the shapes given, torch does not need a trial run to find them, which would advance
        # the dropout masks.
        ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(self._hidden_shape(rows, length), device="meta", requires_grad=True)
        logits = torch.empty(
            stage.architecture.scores_shape(self.config, rows, length),
            device="meta",
            requires_grad=True,
        )
        return PipelineStage(
            stage,
            stage.index,
            len(self.rank_of),
            device=device,
            input_args=ids if stage.is_first else hidden,
            output_args=logits if stage.is_last else hidden,
            group=self.group,
        )

    def _hidden_shape(self, rows: int, length: int) -> tuple[int, int, int]:
        return rows, length // self.sequence_parts, self.config.hidden_size

    def logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        precision: str,
        finish: Callable[[torch.Tensor], torch.Tensor],
        num_scores: int,
    ) -> torch.Tensor:
        """``finish`` of the logits of a batch of any shape with the stages in eval mode, on every
        rank: (batch, num_scores).

        Called under ``torch.no_grad``, by every rank of the pipeline with the same batch.
        """
        # Stage after stage: a rank computes the stages that it has, and receives an input unless it
        # also has the stage before. Without backward passes there is nothing to overlap, and the
        # batches of an evaluation are large.
        here = {stage.index: stage for stage in self.stages}
        last = len(self.rank_of) - 1
        states, attention_mask = input_ids, mask_of(input_ids, attention_mask)
        for index in sorted(here):
            if index and index - 1 not in here:
                states = torch.empty(self._hidden_shape(*input_ids.shape), device=input_ids.device)
                dist.recv(states, group=self.group, group_src=self.rank_of[index - 1])
            here[index].precision = precision
            states = here[index](states, attention_mask=attention_mask)
            if index < last and index + 1 not in here:
                dist.send(states.contiguous(), group=self.group, group_dst=self.rank_of[index + 1])
        # The last stage finishes the logits, because those of a language model are too large to be
        # sent around.
        states = (
            finish(states)
            if last in here
            else torch.empty(len(input_ids), num_scores, device=input_ids.device)
        )
        dist.broadcast(states, group=self.group, group_src=self.rank_of[last])
        return states


def _received(stages: Sequence[PipelineStage]) -> Iterator[tuple[tuple[str, int, int], Any]]:
    """What stages receive in a step, by direction, stage and micro-batch; nothing before a
    schedule's first step.

    In torch 2.13 these two fields of a stage are the only way to its buffers.
    """
    for stage in stages:
        for direction, infos in (
            ("forward", stage.args_recv_info),
            ("backward", stage.grad_recv_info),
        ):
            for micro_batch, of_micro_batch in infos.items():
                for info in of_micro_batch:  # one tensor at most: a stage gives one
                    if info.source is not None:
                        yield (direction, stage.stage_index, micro_batch), info
