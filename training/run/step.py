"""The steps between two looks at the device: their losses, agreed over ranks, and those that are not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from training.data.batching import MicroBatch
from training.fault_tolerance.bad_steps import BadStep
from training.monitoring import StepMetrics
from training.parallelism.distributed import Ranks
from training.parallelism.strategy import StepResult


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step: row numbers and ``tokens`` of the global batch, ``mine`` this rank's row numbers."""

    step: int
    epoch: int
    learning_rate: float
    batch: np.ndarray
    tokens: int
    mine: np.ndarray
    result: StepResult


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of the last steps.

    ``steps``: each one's metrics; ``raised``: the sum of each flag over the ranks; ``bad``: by number, the steps that
    were skipped since loss or gradient norm is not finite, and no loss scale explains it.
    """

    steps: list[StepMetrics]
    raised: dict[str, int]
    bad: dict[int, BadStep]


class StepLog:
    """Collects steps and turns them into metrics with one look at the device and one all-reduce.

    Args:
        ranks: all of them flush after the same steps.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.records: list[StepRecord] = []
        self.since = time.perf_counter()
        self.step_seconds = 0.0  # mean of the steps of the last flush

    def add(self, record: StepRecord) -> None:
        """Keep a step until the next flush."""
        self.records.append(record)

    def restart_clock(self) -> None:
        """Leave out of the throughput and the pace what was no training: an evaluation, a save."""
        self.since, self.step_seconds = time.perf_counter(), 0.0

    def flush(self, seconds: float, flags: Mapping[str, int]) -> Agreed:
        """Agree on the steps since the last flush.

        Args:
            seconds: since the run's start.
            flags: what this rank alone knows, as whole numbers of the same names on all ranks.
        """
        records, self.records = self.records, []
        losses = [record.result.loss.double() for record in records]
        raised = torch.tensor([float(flag) for flag in flags.values()], dtype=torch.float64, device=self.ranks.device)
        agreed = self.ranks.sum_(torch.cat([torch.stack(losses), raised]) if losses else raised).tolist()
        losses, counts = agreed[: len(losses)], dict(zip(flags, map(round, agreed[len(losses) :]), strict=True))
        norms = torch.stack([record.result.grad_norm for record in records]).tolist() if records else []
        bad = {
            record.step: self._bad_step(record, loss, norm)
            for record, loss, norm in zip(records, losses, norms, strict=True)
            if not (math.isfinite(loss) and (math.isfinite(norm) or record.result.scaler_skipped))
        }
        elapsed = max(time.perf_counter() - self.since, 1e-9)
        self.since = time.perf_counter()
        self.step_seconds = elapsed / len(records) if records else 0.0
        rows, tokens = sum(len(r.batch) for r in records) / elapsed, sum(r.tokens for r in records) / elapsed
        metrics = [
            StepMetrics(
                *(r.step, r.epoch, loss, r.learning_rate, norm, rows, tokens, seconds, len(r.batch)),
                skipped=r.step in bad or r.result.scaler_skipped,
                bad=r.step in bad,
            )
            for r, loss, norm in zip(records, losses, norms, strict=True)
        ]
        return Agreed(metrics, counts, bad)

    def _bad_step(self, record: StepRecord, loss: float, norm: float) -> BadStep:
        mine = record.mine[~record.result.row_losses.isfinite().cpu().numpy()]
        found = self.ranks.gather(mine[mine >= 0].tolist())
        by_rank = {rank: rows for rank, rows in enumerate(found) if rows}
        return BadStep(record.step, record.epoch, loss, norm, record.batch, by_rank)


def rows_of(micro_batches: Sequence[MicroBatch]) -> np.ndarray:
    """The row numbers of a rank's micro-batches, in the order of their losses; stand-ins count as row -1."""
    return np.concatenate([batch.rows for batch in micro_batches])
