"""One optimizer step, from the rows of its batch to its line in the log.

Read :func:`train_step` first: it is what every rank does, step after step, under every strategy. A
strategy only answers where they differ: how a forward pass runs, and how gradients get from rank to
rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import TrainingFailure
from training.data.batching import MicroBatch, Padding, Targets, micro_batches_of_rank
from training.distributed.failures import translate_errors
from training.distributed.ranks import Ranks
from training.model.optimizer import learning_rate_at
from training.model.precision import LossScale
from training.model.window_attention import pool_windows
from training.monitoring import StepMetrics
from training.monitoring.replicas import check_gradient_sync
from training.parallelism.blocks import length_multiple
from training.parallelism.gradients import clip_divisor, global_norm, reduce_partial_gradients
from training.parallelism.strategy import StepResult, Strategy, loss_share, row_losses
from training.run.bad_steps import BadStep
from training.run.context import RunContext
from training.run.suspects import Suspects
from training.run.utilization import gpu_utilization


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    ``batch``: row numbers of the global batch, ``num_tokens`` of which it has, without padding;
    ``local_rows``: this rank's row numbers in the order of its losses, -1 for a padding row.
    """

    step: int
    epoch: int
    learning_rate: float
    batch: np.ndarray
    num_tokens: int
    local_rows: np.ndarray
    result: StepResult


def train_step(
    context: RunContext, epoch: int, batch: np.ndarray
) -> tuple[StepRecord, Sequence[MicroBatch]]:
    """Train on one global batch; every rank calls this with the same row numbers.

    Returns:
        The step for the log, and the micro-batches that this rank computed.

    Raises:
        TrainingFailure: no memory, a lost rank, an fp16 overflow at the smallest loss scale.
    """
    config, plan, strategy, ranks = context.config, context.plan, context.strategy, context.ranks
    tokens, step = context.data.tokens.read_in_training, context.state.step + 1
    originals, suspects = tokens.originals(batch), context.suspects

    # This rank's share of the batch, cut into micro-batches. All ranks pad to the same length, so
    # all have equal work.
    with context.phases("data"):
        micro_batches = micro_batches_of_rank(
            tokens,
            batch,
            strategy.data_shard,
            plan.accumulation,
            padding=Padding(length_multiple(config, ranks.device.type), config.max_length),
            speeds=context.balance.speeds,
            targets=Targets(
                task=strategy.task,
                seed=(config.seed, 4, step),
                class_weights=plan.class_weights,
                row_weights=suspects.weights(originals) if suspects else None,
                teacher=context.data.teacher,
            ),
        )
        on_device = [strategy.to_device(micro_batch) for micro_batch in micro_batches]

    # A function of the step alone, so a resumed run needs no scheduler state.
    learning_rate = learning_rate_at(
        step, plan.total_steps, plan.peak_learning_rate, config.warmup, config.schedule
    )
    with context.phases("step"), translate_errors(ranks, step, micro_batches[0].input_ids.shape):
        result = optimizer_step(strategy, on_device, step, learning_rate)
        context.balance.step_done(micro_batches)
    num_tokens = int(tokens.lengths[batch].sum())
    local_rows = np.concatenate([micro_batch.rows for micro_batch in micro_batches])
    record = StepRecord(step, epoch, learning_rate, originals, num_tokens, local_rows, result)
    return record, micro_batches


def optimizer_step(
    strategy: Strategy, micro_batches: Sequence[MicroBatch], step: int, learning_rate: float
) -> StepResult:
    """Forward, backward, gradient synchronization, clipping and update over this rank's
    micro-batches.

    Nothing here waits for a GPU, except with fp16: its loss scale has to know whether the gradients
    overflowed.
    """
    config, phases, scale = strategy.config, strategy.phases, strategy.loss_scale
    strategy.begin_step(learning_rate)

    losses, checks = forward_backward(strategy, micro_batches, step)
    strategy.finish_gradients()
    strategy.broadcast_buffers()

    if strategy.engine:
        # DeepSpeed keeps gradients in buffers of its own, so it clips and updates by itself.
        norm, scaler_skipped = strategy.engine_update()
    else:
        # What is still partial over tensor-parallel ranks: the gradients of norms, each from a part
        # of the sequence.
        parameters = strategy.parameters.values()
        reduce_partial_gradients(parameters)
        if strategy.gradient_checks_left:
            strategy.gradient_checks_left -= 1
            check_gradient_sync(strategy.parameters, strategy.ranks, f"step {step}")

        # One norm over all shards and stages, the same number on every rank, so that all clip
        # alike. Gradients still carry the loss scale: the norm is divided by it here, the gradients
        # by fused AdamW as it reads them.
        norm = global_norm(parameters, strategy.stage_group) / scale.scale
        strategy.local_optimizer.grad_scale = clip_divisor(
            norm, config.clip_norm or math.inf, scale.scale
        )

        # If the norm is not finite, fused AdamW finds `found_inf` set and leaves weights, moments
        # and its step count as they are. The flag stays on the device; the host reads the norm a
        # few steps later, with the losses.
        strategy.local_optimizer.found_inf = (~norm.isfinite()).float()
        with phases("optimizer"):
            strategy.optimizer.step()
            if strategy.average:
                strategy.average.update(step, norm.isfinite())
        strategy.optimizer.zero_grad()
        scaler_skipped = scale.enabled and not math.isfinite(norm)
        scale.update(finite=not scaler_skipped)
        if scale.enabled and scale.scale < LossScale.LEAST:
            raise TrainingFailure(
                f"step {step}: the gradients overflow in fp16 even with a loss scale of "
                f"{LossScale.LEAST:.0e}; use "
                f"--precision bf16 or fp32, or lower --learning_rate, then {config.how_to_resume}",
                code="loss-not-finite",
                quiet=not strategy.ranks.is_first,
            )
    strategy.end_step(norm)

    return _result_of(strategy, micro_batches, losses, checks, norm, skipped=scaler_skipped)


def _result_of(
    strategy: Strategy,
    micro_batches: Sequence[MicroBatch],
    losses: Sequence[torch.Tensor],
    checks: Sequence[torch.Tensor],
    norm: torch.Tensor,
    *,
    skipped: bool,
) -> StepResult:
    """What this rank adds to the log of a step; losses and checks as :func:`forward_backward` returns them."""
    share = sum(
        (loss * batch.weights).sum() for loss, batch in zip(losses, micro_batches, strict=True)
    )
    # Ranks that hold parts of the same replica computed the same losses: only one of them may
    # count.
    if not strategy.data_shard.is_replica_leader:
        share, checks = torch.zeros_like(share), []
        losses = [torch.zeros_like(loss) for loss in losses]
    joined, right = torch.cat(checks) if checks else None, torch.zeros(2, device=share.device)
    if joined is not None:
        is_real = torch.cat([batch.weights for batch in micro_batches]) > 0  # no dummy row
        if micro_batches[0].is_labelled is not None:
            is_real &= torch.cat([batch.is_labelled for batch in micro_batches])
        right = torch.stack([((joined[:, 2] > 0) & is_real).sum(), is_real.sum()])
    return StepResult(share, torch.cat(losses), norm, skipped, joined, right)


def forward_backward(
    strategy: Strategy, micro_batches: Sequence[MicroBatch], step: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Forward and backward over all micro-batches.

    Returns:
        For each micro-batch the losses of its rows, (rows,), and their checks, (rows, 3), if this
        rank and the task have any. The gradients are in ``parameter.grad``, synchronized.
    """
    config, phases = strategy.config, strategy.phases
    if strategy.pipeline:  # whose schedule interleaves the micro-batches of all stages
        return strategy.pipeline.run(micro_batches, config.seed, step, strategy.precision)

    # One micro-batch after the other; their gradients add up in `parameter.grad`. Communicating the
    # sum is enough, so only the last backward pass synchronizes: DDP averages a bucket of gradients
    # while the next ones are still being computed, FSDP reduces and scatters them block by block.
    losses, checks = [], []
    for number, batch in enumerate(micro_batches, start=1):
        with nullcontext() if number == len(micro_batches) else strategy.no_sync():
            strategy.seed_dropout(step, batch.first_row)
            with phases("forward"):
                with strategy.autocast():
                    # (rows, labels)
                    logits = strategy.forward(batch.input_ids, batch.attention_mask)
                if batch.windows is not None:
                    logits = pool_windows(logits, batch.windows)  # (inputs, labels + 1) before
                losses.append(row_losses(strategy.task, logits, batch, config))  # (rows,)
            with phases("backward"):
                strategy.backward(loss_share(losses[-1], batch.weights) * strategy.loss_factor)
            losses[-1] = losses[-1].detach()
            if (
                of_batch := strategy.task.label_logprobs(logits.detach(), batch.labels)
            ) is not None:
                checks.append(of_batch)
    return losses, checks


@dataclass(frozen=True)
class SyncedSteps:
    """What all ranks know about the last steps.

    ``steps``: the metrics of each; ``flags``: the sum of each flag over the ranks; ``bad``: by
    step, those that were skipped because loss or gradient norm is not finite, unless the loss scale
    explains it.
    """

    steps: list[StepMetrics]
    flags: dict[str, int]
    bad: dict[int, BadStep]


class StepLog:
    """Collects steps and turns them into metrics with one read from the device and one all-reduce."""

    def __init__(
        self, ranks: Ranks, ideal_seconds: float | None = None, suspects: Suspects | None = None
    ) -> None:
        self.ranks = ranks
        self.ideal_seconds = ideal_seconds  # see StepPlan
        self.suspects = suspects
        self.records: list[StepRecord] = []
        self.since = time.perf_counter()
        self.step_seconds = 0.0  # mean of the steps last synchronized

    def add(self, record: StepRecord) -> None:
        self.records.append(record)

    def restart_clock(self) -> None:
        """Leave time that was not training, such as an evaluation or a save, out of throughput and step time."""
        self.since, self.step_seconds = time.perf_counter(), 0.0

    def sync(self, seconds: float, flags: Mapping[str, int]) -> SyncedSteps:
        """Exchange the steps since the last call with all ranks.

        ``seconds``: since the run began; ``flags``: what only this rank knows, as integers under
        the same names on all ranks.
        """
        records, self.records = self.records, []

        losses, flag_sums, right = self._exchange(records, flags)
        # The norms are equal on all ranks already.
        norms = (
            torch.stack([record.result.grad_norm for record in records]).tolist() if records else []
        )

        # Read after the exchange, which has waited for the device: these steps are computed.
        now = time.perf_counter()
        elapsed, self.since = max(now - self.since, 1e-9), now
        self.step_seconds = elapsed / len(records) if records else 0.0
        tokens_per_second = sum(record.num_tokens for record in records) / elapsed
        ideal = self.ideal_seconds
        # The same for all of these steps: they are timed together.
        together = {
            "samples_per_second": sum(len(record.batch) for record in records) / elapsed,
            "tokens_per_second": tokens_per_second,
            "seconds": seconds,
            "gpu_utilization": gpu_utilization(self.ranks.device),
            "mfu": None if ideal is None else tokens_per_second * ideal,
        }
        metrics, bad = [], {}
        for record, loss, norm, (num_right, num_rows) in zip(
            records, losses, norms, right, strict=True
        ):
            skipped = record.result.scaler_skipped
            if not (math.isfinite(loss) and (math.isfinite(norm) or skipped)):
                bad[record.step] = self._find_bad_rows(record, loss, norm)
            elif self.suspects and record.result.checks is not None:
                # The device has nothing left to do, so this copy does not make it wait.
                self.suspects.add(
                    record.step, record.local_rows, record.result.checks.cpu().numpy()
                )
            metrics.append(
                StepMetrics(
                    step=record.step,
                    epoch=record.epoch,
                    loss=loss,
                    learning_rate=record.learning_rate,
                    grad_norm=norm,
                    rows=len(record.batch),
                    skipped=record.step in bad or skipped,
                    bad=record.step in bad,
                    accuracy=num_right / num_rows if num_rows else None,
                    **together,
                )
            )
        return SyncedSteps(metrics, flag_sums, bad)

    def _exchange(
        self, records: Sequence[StepRecord], flags: Mapping[str, int]
    ) -> tuple[list[float], dict[str, int], list[list[float]]]:
        """The sums over all ranks: each step's loss, each flag, and of each step the rows answered right and all."""
        # All travel in one tensor, the losses first: a second all-reduce would cost another round
        # trip.
        values = [float(flag) for flag in flags.values()]
        local = [torch.tensor(values, dtype=torch.float64, device=self.ranks.device)]
        if records:
            local.insert(0, torch.stack([record.result.loss.double() for record in records]))
            local.append(torch.cat([record.result.right.double() for record in records]))
        summed = self.ranks.sum_(torch.cat(local)).tolist()
        losses, rest = summed[: len(records)], summed[len(records) :]
        flag_sums = map(round, rest[: len(flags)])
        right = rest[len(flags) :]
        return (
            losses,
            dict(zip(flags, flag_sums, strict=True)),
            [right[at : at + 2] for at in range(0, len(right), 2)],
        )

    def _find_bad_rows(self, record: StepRecord, loss: float, norm: float) -> BadStep:
        local_rows = record.local_rows[~record.result.row_losses.isfinite().cpu().numpy()]
        # Collective within the loop over steps: loss and norm are equal on all ranks, so all of
        # them come here for the same steps.
        per_rank = self.ranks.gather(local_rows[local_rows >= 0].tolist())
        by_rank = {rank: rows for rank, rows in enumerate(per_rank) if rows}
        return BadStep(record.step, record.epoch, loss, norm, record.batch, by_rank)
