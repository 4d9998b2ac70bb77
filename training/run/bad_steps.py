"""Bad steps: loss or gradient norm is not finite. Each is skipped; too many roll the run back.

The update is skipped on all ranks in a bad step, so its effect never reaches a checkpoint. Here the
steps are counted. Beyond ``--bad_steps`` consecutive ones, the run restores its newest checkpoint
and leaves the bad rows out from then on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from common.errors import TrainingFailure, UserError
from training.monitoring.events import JsonLines, RolledBack
from training.monitoring.records import StepMetrics
from training.run.checkpoints import Checkpoints
from training.run.context import RunContext

BAD_ROWS_FILE = "bad_rows.jsonl"


@dataclass(frozen=True)
class BadStep:
    """A step that all ranks skipped because its loss or gradient norm is not finite.

    ``batch``: row numbers of the global batch; ``found``: by rank, the rows whose own loss is not
    finite.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    batch: np.ndarray
    found: Mapping[int, Sequence[int]]

    @property
    def rows(self) -> list[int]:
        return [row for rows in self.found.values() for row in rows]

    @property
    def suspects(self) -> list[int]:
        """The rows to blame: those whose own loss is not finite, or else the whole batch."""
        # If each row alone has a finite loss, their sum or the gradient overflowed, and no single
        # row can be blamed for that.
        return self.rows or self.batch.tolist()

    @property
    def what(self) -> str:
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        return f"the gradient norm is {self.grad_norm}"

    def __str__(self) -> str:
        where = "; ".join(
            f"rank {rank}, training rows {_listed(rows)}" for rank, rows in self.found.items()
        )
        where = where or "every row has a finite loss, the gradient overflowed"
        return f"step {self.step}: {self.what} ({where})"


class BadSteps:
    """Counts bad steps and reports their rows; every rank has one and counts the same steps."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.budget = context.config.bad_steps
        self.file = JsonLines(context.config.run_dir / BAD_ROWS_FILE)
        texts = context.data.texts
        # What the data left out comes first in the file, once: a resumed run finds it there.
        if context.ranks.is_first and texts.left_out and not context.state.step:
            self.file.write({"step": 0, "rows_left_out": texts.left_out, "what": texts.notes[-1]})
            context.events.write_on_rank0(
                "bad_rows", rows_left_out=texts.left_out, what=texts.notes[-1]
            )

    def is_left(self, rows: np.ndarray) -> np.ndarray:
        """Whether each of these rows is still trained on; bool, (rows,)."""
        return ~np.isin(rows, self.context.state.bad.excluded_rows)

    def count(self, steps: Sequence[StepMetrics], bad: Mapping[int, BadStep]) -> BadStep | None:
        """Count the steps just synchronized; returns the bad step that exceeds the budget."""
        count = self.context.state.bad
        for metrics in steps:
            if metrics.step in bad:
                self._record(bad[metrics.step])
                count.add(bad[metrics.step].suspects)
                if count.in_a_row > self.budget:
                    return bad[metrics.step]
            # A step that only the loss scale skipped (fp16) is neither good nor bad.
            elif not metrics.skipped:
                count.end_row(last_good=metrics.step)
        return None

    def roll_back(self, last: BadStep, checkpoints: Checkpoints) -> None:
        """Restore the newest checkpoint, and leave out the rows of the bad steps from then on.

        The bad steps did not change the weights, so only the rows differ the second time.

        Raises:
            TrainingFailure: there is no checkpoint, or a rollback has not helped before.
        """
        # Before the state is restored: the checkpoint brings its own counts, which know nothing of
        # these steps.
        rows, context = self._rows_to_leave_out(last), self.context
        # The newest checkpoint may still be on its way to the disk.
        checkpoints.wait()
        try:
            path = checkpoints.go_back(last.step)
        except UserError as error:
            self._fail(last, f"There is no way back ({error}); lower --learning_rate")
        if path is None:
            self._fail(
                last,
                "There is no checkpoint yet to return to; lower --learning_rate or fix the rows",
            )
        context.state.bad.leave_out(rows, last.step)
        context.events.publish(RolledBack(context.state.step, last.step, sorted(rows)))
        context.say(
            f"Went back from step {last.step} to {path} after {self.budget + 1} bad steps in a "
            f"row; from here on {len(rows)} rows are left out: {_listed(sorted(rows))}"
        )

    def _rows_to_leave_out(self, last: BadStep) -> set[int]:
        """The rows to leave out after a rollback from step ``last``.

        Raises:
            TrainingFailure: rollbacks are off; or the last rollback did not get past the step that
                caused it, so leaving out more rows will not help.
        """
        count = self.context.state.bad
        if not self.budget:
            self._fail(
                last,
                "The last checkpoint is good and is kept; lower --learning_rate or fix the rows",
            )
        # No step has succeeded beyond the one that caused the last rollback: the rows were not to
        # blame.
        if count.last_good < count.went_back_from:
            self._fail(
                last,
                f"Going back from step {count.went_back_from} and leaving out "
                f"{len(count.excluded_rows)} rows did not help: lower --learning_rate",
            )
        return {*count.excluded_rows, *count.suspects}

    def _fail(self, last: BadStep, advice: str) -> NoReturn:
        message = f"{last}{self._shown(last)}. {advice}, then {self.context.config.how_to_resume}"
        raise TrainingFailure(
            message, quiet=not self.context.ranks.is_first, code="loss-not-finite"
        )

    def _record(self, bad: BadStep) -> None:
        self.context.exporter.bad_steps.inc()
        self.context.events.write_on_rank0(
            "skipped_step", step=bad.step, what=bad.what, rows=bad.rows
        )
        if self.context.ranks.is_first:
            fields = {"step": bad.step, "epoch": bad.epoch, "ranks": list(bad.found)}
            fields |= {"rows": bad.rows, "loss": bad.loss, "norm": bad.grad_norm, "what": bad.what}
            self.file.write(fields)
        if self.budget:
            self.context.say(f"Skipped {bad}{self._shown(bad)}")

    def _shown(self, bad: BadStep) -> str:
        return self.context.describe_row(bad.rows[0]) if bad.rows else ""


def _listed(rows: Sequence[int], most: int = 8) -> str:
    more = f" and {len(rows) - most} more" if len(rows) > most else ""
    return ", ".join(map(str, rows[:most])) + more
