"""The steps between two looks at the device: their losses, agreed over ranks, and the check that they are finite."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from training.batching import MicroBatch
from training.distributed import Ranks
from training.errors import TrainingFailure
from training.monitoring import StepMetrics
from training.parallelism import StepResult


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step: ``rows`` and ``tokens`` of the global batch, ``mine`` this rank's row numbers."""

    step: int
    epoch: int
    learning_rate: float
    rows: int
    tokens: int
    mine: np.ndarray
    result: StepResult


class StepLog:
    """Collects steps and turns them into metrics with one look at the device and one all-reduce.

    Args:
        ranks: all of them flush after the same steps.
        describe_row: a row number to the text that an error shows.
    """

    def __init__(self, ranks: Ranks, describe_row: Callable[[int], str]) -> None:
        self.ranks = ranks
        self.describe_row = describe_row
        self.records: list[StepRecord] = []
        self.since = time.perf_counter()

    def add(self, record: StepRecord) -> None:
        """Keep a step until the next flush."""
        self.records.append(record)

    def restart_clock(self) -> None:
        """Leave out of the throughput what was no training: an evaluation, a save."""
        self.since = time.perf_counter()

    def flush(self, seconds: float, flags: Mapping[str, bool]) -> tuple[list[StepMetrics], dict[str, int]]:
        """Agree on the steps since the last flush.

        Args:
            seconds: since the run's start.
            flags: what this rank alone knows; of the same names on all ranks.

        Returns:
            Metrics of each step, and how many ranks raise each flag.

        Raises:
            TrainingFailure: a loss or a gradient is not finite and no scaler explains it.
        """
        records, self.records = self.records, []
        losses = [record.result.loss.double() for record in records]
        raised = torch.tensor([float(flag) for flag in flags.values()], dtype=torch.float64, device=self.ranks.device)
        agreed = self.ranks.sum_(torch.cat([torch.stack(losses), raised]) if losses else raised).tolist()
        losses, counts = agreed[: len(losses)], dict(zip(flags, map(round, agreed[len(losses) :]), strict=True))
        norms = torch.stack([record.result.grad_norm for record in records]).tolist() if records else []
        for record, loss, norm in zip(records, losses, norms, strict=True):
            explained = record.result.scaler_skipped and math.isfinite(loss)
            if not explained and not (math.isfinite(loss) and math.isfinite(norm)):
                self._fail(record, loss, norm)
        elapsed = max(time.perf_counter() - self.since, 1e-9)
        self.since = time.perf_counter()
        rows, tokens = sum(r.rows for r in records) / elapsed, sum(r.tokens for r in records) / elapsed
        metrics = [
            StepMetrics(
                *(r.step, r.epoch, loss, r.learning_rate, norm, rows, tokens, seconds, r.rows, r.result.scaler_skipped)
            )
            for r, loss, norm in zip(records, losses, norms, strict=True)
        ]
        return metrics, counts

    def _fail(self, record: StepRecord, loss: float, norm: float) -> None:
        bad = ~record.result.row_losses.isfinite().cpu().numpy()
        mine = [row for row in record.mine[bad].tolist() if row >= 0]
        found = [(rank, rows) for rank, rows in enumerate(self.ranks.gather(mine)) if rows]
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        where = "; ".join(f"rank {rank}, training rows {_listed(rows)}" for rank, rows in found)
        where = where or "every row's own loss is finite, the gradient overflowed"
        shown = self.describe_row(found[0][1][0]) if found else ""
        raise TrainingFailure(
            f"step {record.step}: {what} ({where}){shown}. The last checkpoint is good and stays; "
            "lower --learning_rate or mend the rows, then start again",
            quiet=not self.ranks.is_first,
        )


def _listed(rows: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, rows[:most])) + (f" and {len(rows) - most} more" if len(rows) > most else "")


def rows_of(micro_batches: Sequence[MicroBatch]) -> np.ndarray:
    """The row numbers of a rank's micro-batches, in the order of their losses; stand-ins count as row -1."""
    return np.concatenate([batch.rows for batch in micro_batches])
