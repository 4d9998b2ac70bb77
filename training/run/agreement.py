"""Agreement: after some steps the ranks exchange the losses and what only one of them knows, and so
all act alike.
"""

from __future__ import annotations

from training.distributed.failures import translate_errors
from training.monitoring.events import Rescheduled, StepsAgreed
from training.run.checkpoints import Checkpoints
from training.run.context import RunContext
from training.run.step import StepLog, StepRecord, SyncedSteps

# A run stops within two seconds of a signal; the other second is for steps that take longer than
# the last ones did.
SYNC_SECONDS = 1.0


class Agreement:
    """What the ranks last agreed on, and when they do so again; every rank has one and asks it at
    the same steps.
    """

    def __init__(self, context: RunContext, checkpoints: Checkpoints) -> None:
        self.context = context
        self.checkpoints = checkpoints
        self.log = StepLog(context.ranks, context.plan.ideal_seconds, context.suspects)
        self.first_step = self.next_step = context.state.step + 1

    def add(self, record: StepRecord) -> None:
        self.log.add(record)

    def is_due(self, step: int) -> bool:
        """Whether the ranks agree after this step; from numbers that all ranks have, so that none
        waits alone.
        """
        logs = step % self.context.config.log_every == 0
        return step >= self.next_step or logs or self.checkpoints.schedule.due_by_step(step)

    def reach(self) -> SyncedSteps:
        """A collective call."""
        context, state = self.context, self.context.state
        with context.phases("agree"), translate_errors(context.ranks, state.step + 1):
            synced = self.log.sync(state.seconds, self._flags())
        state.count(synced.steps)
        context.events.publish(StepsAgreed(synced.steps))
        if context.budget:
            self._reschedule(synced)
        self.checkpoints.follow(synced.flags)
        self.next_step = state.step + self._steps_until_next(synced)
        return synced

    def _flags(self) -> dict[str, int]:
        """What only this rank knows. All ranks act on the sums, so that they act alike."""
        context = self.context
        flags = {"stop": context.interruption.asked, **self.checkpoints.flags()}
        if context.budget:  # only rank 0's clock counts
            flags["steps_left"] = context.steps_left() if context.ranks.is_first else 0
        # In whole microseconds, because flags are integers: their sums are exact.
        if not self._syncs_each_step:
            flags["microseconds"] = round(self.log.step_seconds * 1e6)
        return flags

    def _reschedule(self, synced: SyncedSteps) -> None:
        """Let the run end where rank 0 says, which knows the pace of the steps before these."""
        context, steps = self.context, synced.steps
        if context.end_in(synced.flags["steps_left"]):
            context.events.publish(Rescheduled(context.plan.total_steps))
        # The first step starts threads and allocates, so its pace says nothing about others.
        if steps and steps[0].step > self.first_step:
            seconds = self.log.step_seconds * len(steps)
            tokens = steps[-1].tokens_per_second * seconds
            context.budget.observe(tokens, seconds, context.plan.tokens_per_step)

    @property
    def _syncs_each_step(self) -> bool:
        """On a CPU that costs nothing. On a GPU, reading a number makes the host wait for all
        queued work.
        """
        return self.context.ranks.device.type == "cpu"

    def _steps_until_next(self, synced: SyncedSteps) -> int:
        """Steps that fit into SYNC_SECONDS, so that a stop is noticed in time however rarely the
        run logs.

        All ranks must compute the same number, so it is computed from synchronized numbers only.
        """
        if self._syncs_each_step:
            return 1
        step_seconds = synced.flags["microseconds"] / 1e6 / self.context.ranks.world_size
        return max(1, int(SYNC_SECONDS / step_seconds)) if step_seconds else 1
