"""Bad steps: loss or gradient norm not finite. Each is skipped and named; too many in a row, and the run goes back.

A strategy leaves weights and moments alone in a bad step, on all ranks, so that no checkpoint holds what it did. Here
the steps are counted; over the budget the run goes back to its newest checkpoint and leaves the bad rows out from then
on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from common.errors import TrainingFailure, UserError
from training.checkpointing.resume import move_later_aside, newest_checkpoint, open_checkpoint
from training.fault_tolerance.failures import explained
from training.monitoring.json_lines import JsonLines
from training.monitoring.records import StepMetrics

if TYPE_CHECKING:
    from training.run.trainer import Trainer

BAD_ROWS_FILE = "bad_rows.jsonl"


@dataclass(frozen=True)
class BadStep:
    """A step that all ranks skipped, since its loss or gradient norm is not finite.

    ``batch``: row numbers of the global batch; ``found``: by rank, the rows whose own loss is not finite.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    batch: np.ndarray
    found: Mapping[int, Sequence[int]]

    @property
    def rows(self) -> list[int]:
        """The rows whose own loss is not finite."""
        return [row for rows in self.found.values() for row in rows]

    @property
    def suspects(self) -> list[int]:
        """The rows to blame: where none has a loss of its own that is not finite, all of the batch."""
        return self.rows or self.batch.tolist()

    @property
    def what(self) -> str:
        """What is not finite."""
        return f"the gradient norm is {self.grad_norm}" if math.isfinite(self.loss) else f"the loss is {self.loss}"

    def __str__(self) -> str:
        where = "; ".join(f"rank {rank}, training rows {_listed(rows)}" for rank, rows in self.found.items())
        return f"step {self.step}: {self.what} ({where or 'every row has a finite loss, the gradient overflowed'})"


class BadSteps:
    """Counts bad steps and goes back over them; every rank has one and takes the same steps.

    Args:
        trainer: of this rank, not yet in its first step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.budget = trainer.config.bad_steps
        self.file = JsonLines(trainer.config.run_dir / BAD_ROWS_FILE)
        texts = trainer.news.texts
        if trainer.ranks.is_first and texts.left_out and not trainer.state.step:
            self.file.write({"step": 0, "rows_left_out": texts.left_out, "what": texts.notes[-1]})
            trainer.events.agreed("bad_rows", rows_left_out=texts.left_out, what=texts.notes[-1])

    def remaining(self, batch: np.ndarray) -> np.ndarray:
        """The rows of a global batch that are not left out, in their order."""
        excluded = self.trainer.state.bad.excluded_rows
        return batch[~np.isin(batch, excluded)] if excluded else batch

    def take(self, steps: Sequence[StepMetrics], bad: Mapping[int, BadStep]) -> bool:
        """Count the steps just agreed upon; returns whether the run went back to a checkpoint.

        Raises:
            TrainingFailure: the budget is spent, and going back is of no use.
        """
        count = self.trainer.state.bad
        for metrics in steps:
            if metrics.step in bad:
                self._record(bad[metrics.step])
                count.add(bad[metrics.step].suspects)
                if count.in_a_row > self.budget:
                    self._go_back(bad[metrics.step])
                    return True
            elif not metrics.skipped:
                count.end_row(last_good=metrics.step)
        return False

    def _record(self, bad: BadStep) -> None:
        self.trainer.exporter.bad_steps.inc()
        self.trainer.events.agreed("skipped_step", step=bad.step, what=bad.what, rows=bad.rows)
        if self.trainer.ranks.is_first:
            fields = {"step": bad.step, "epoch": bad.epoch, "ranks": list(bad.found), "rows": bad.rows}
            self.file.write({**fields, "loss": bad.loss, "norm": bad.grad_norm, "what": bad.what})
        if self.budget:
            self.trainer.say(f"Skipped {bad}{self._shown(bad)}")

    def _shown(self, bad: BadStep) -> str:
        return self.trainer.describe_row(bad.rows[0]) if bad.rows else ""

    def _go_back(self, last: BadStep) -> None:
        """Restore the newest checkpoint and leave the rows of the bad steps out from then on.

        They left the weights as they were, so that only the rows differ the second time. A run that spends its budget
        again before it has got beyond the step at which it did so before is not helped by leaving out more of them.
        """
        trainer, count = self.trainer, self.trainer.state.bad
        if not self.budget:
            self._fail(last, "The last checkpoint is good and stays; lower --learning_rate or mend the rows")
        if count.last_good < count.went_back_from:
            self._fail(
                last,
                f"Going back from step {count.went_back_from} and leaving out {len(count.excluded_rows)} rows did not "
                "help: lower --learning_rate",
            )
        rows = {*count.excluded_rows, *count.suspects}
        path = self._restore_newest(last)
        trainer.state.bad.leave_out(rows, last.step)
        trainer.step_log.restart_clock()
        trainer.observers.rolled_back(trainer.state.step)
        trainer.events.agreed("rolled_back", from_step=last.step, rows=sorted(rows))
        trainer.say(
            f"Went back from step {last.step} to {path} after {self.budget + 1} bad steps in a row; from "
            f"here on {len(rows)} rows are left out: {_listed(sorted(rows))}"
        )

    def _restore_newest(self, last: BadStep) -> str:
        trainer, ranks = self.trainer, self.trainer.ranks
        trainer.hear_of_saves(trainer.saver.wait)
        try:
            path = newest_checkpoint(ranks, trainer.storage, trainer.say)
            if path is None:
                self._fail(last, "There is no checkpoint yet to go back to; lower --learning_rate or mend the rows")
            with explained(ranks, last.step):
                trainer.restore(open_checkpoint(path, ranks))
            move_later_aside(ranks, trainer.storage, trainer.state.step, trainer.say)
        except UserError as error:
            self._fail(last, f"There is no way back ({error}); lower --learning_rate")
        return path

    def _fail(self, last: BadStep, advice: str) -> NoReturn:
        message = f"{last}{self._shown(last)}. {advice}, then start again"
        raise TrainingFailure(message, quiet=not self.trainer.ranks.is_first)


def _listed(rows: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, rows[:most])) + (f" and {len(rows) - most} more" if len(rows) > most else "")
