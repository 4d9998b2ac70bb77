"""The checkpoints of a run: what is saved, how a save is reported, and the way back to one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from common.errors import UserError
from common.files import lock_run_folder, write_whole
from training.checkpointing import SaveSchedule, Storage
from training.checkpointing.resume import (
    Resumed,
    move_later_aside,
    newest_checkpoint,
    open_checkpoint,
)
from training.checkpointing.saver import Saver
from training.config import TrainConfig
from training.distributed.failures import translate_errors
from training.fault_tolerance.interruption import Interruption
from training.model.pooling import POOLING_KEY
from training.monitoring import SavedCheckpoint
from training.monitoring.events import CheckpointFailed, CheckpointStarted
from training.monitoring.monitors import Monitors
from training.parallelism.state import StrategyState
from training.run.context import RunContext, stop_agreed
from training.run.suspects import TENSOR


def make_saver(
    config: TrainConfig, storage: Storage, monitors: Monitors, interruption: Interruption
) -> Saver:
    """A collective call, because it forms a process group for the thread that saves."""
    ranks = monitors.ranks
    stops = partial(stop_agreed, ranks, monitors.phases, interruption)
    return Saver(config, ranks, storage, monitors.say, stops)


class Checkpoints:
    """Those of one run; ``with`` it, saves are written, in a thread.

    All methods but :meth:`flags` are collective calls.
    """

    def __init__(self, context: RunContext, saver: Saver) -> None:
        self.context = context
        self.saver = saver
        config = context.config
        self.schedule = SaveSchedule(config.save_every, config.save_minutes, time.monotonic())

    def open_folders(self, stack: contextlib.ExitStack) -> None:
        """On rank 0, make the run folder and keep other runs out of it and of the checkpoint
        storage until ``stack`` is closed.
        """
        if not self.context.ranks.is_first:
            return
        config = self.context.config
        try:
            config.run_dir.mkdir(parents=True, exist_ok=True)
            # The lock comes before the first file is written, or this would replace another run's.
            stack.enter_context(lock_run_folder(config.run_dir))
            # A start from this file resumes the run, however this one began.
            later = config.model_copy(update={"resume": "auto"})
            write_whole(config.run_dir / "config.yaml", later.to_yaml().encode())
        except OSError as error:
            raise UserError(
                f"--output_dir {config.output_dir}: {config.run_dir} cannot be written "
                f"({error.strerror})",
                code="not-writable",
            ) from error
        stack.enter_context(self.context.storage.lock())

    def flags(self) -> dict[str, int]:
        """What only this rank knows, for the next agreement; rank 0's clock decides when a save is
        due.
        """
        step, ranks = self.context.state.step, self.context.ranks
        return {
            "save": ranks.is_first and self.schedule.due(step, time.monotonic()),
            "saved": self.saver.done,
            "retry": self.saver.retry_due,
        }

    def follow(self, flags: dict[str, int]) -> None:
        """Act on the sums of the ranks' :meth:`flags`: report a save that is complete on all, retry
        one that failed.
        """
        # Taking the outcome is a collective call, so no rank may begin before the thread of each is
        # done. A new save that is due is newer than what has failed, and takes its place.
        if flags["saved"] == self.context.ranks.world_size:
            self._report(self.saver.collect)
        if flags["retry"] and not flags["save"]:
            self.saver.retry()

    def save(self) -> None:
        """Copy the state; a thread writes it while training goes on."""
        context, state = self.context, self.context.state
        context.events.publish(CheckpointStarted(state.step))
        run = self._plain_values()
        # Each rank knows about its own rows only. Merged, a checkpoint fits any number of ranks.
        if context.suspects:
            context.suspects.merge(context.ranks)
        best_step = state.best.step if state.best else None
        self._report(lambda: self.saver.save(state.step, self._tensors, run, best_step))
        self.schedule.saved(time.monotonic())

    def wait(self) -> None:
        """Until the last save is complete."""
        self._report(self.saver.wait)

    def resume(self, resumed: Resumed) -> None:
        """Begin the run where the checkpoint was saved."""
        context, config = self.context, self.context.config
        before = resumed.state["config"]["epochs"]
        if before != config.epochs and not context.budget:
            context.say(
                f"--epochs was {before} and is now {config.epochs}, so the schedule ends at step "
                f"{context.plan.total_steps:,}"
            )
        with translate_errors(context.ranks, step=1):
            self.restore(resumed)

    def restore(self, resumed: Resumed) -> None:
        """Take weights, optimizer state and position from a checkpoint, this rank its parts of
        them.
        """
        context = self.context
        # The state is changed in place, because all parts of the run hold this object.
        context.state.take(resumed.state)
        context.phases.step = context.state.step
        context.ranks.run_on_all_ranks(lambda: context.strategy.load_state_dict(resumed.tensors))
        if (suspects := context.suspects) is not None:
            context.ranks.run_on_all_ranks(lambda: suspects.read(resumed.tensors))
        context.events.write_on_rank0("resumed", checkpoint=str(resumed.path))

    def go_back(self, from_step: int) -> str | None:
        """Restore the newest checkpoint in the middle of a run; returns its path, None if there is
        none yet.

        Raises:
            UserError: there are checkpoints, but none is complete.
        """
        context, ranks = self.context, self.context.ranks
        path = newest_checkpoint(ranks, context.storage, context.say)
        if path is not None:
            with translate_errors(ranks, from_step):
                self.restore(open_checkpoint(path, ranks))
            move_later_aside(ranks, context.storage, context.state.step, context.say)
        return path

    def _plain_values(self) -> dict[str, Any]:
        context, plan = self.context, self.context.plan
        weights = plan.class_weights
        return context.state.to_plain() | {
            "config": context.config.model_dump(mode="json"),
            "global_batch_size": plan.global_batch_size,
            "peak_learning_rate": plan.peak_learning_rate,
            "steps_per_epoch": plan.steps_per_epoch,
            # The file that they came from may have changed or gone by the time the run resumes.
            "class_weights": None if weights is None else weights.tolist(),
            "budget": context.budget.to_plain() if context.budget else None,
            "start": plan.start and asdict(plan.start),
            "pooling": getattr(context.model_config, POOLING_KEY, ""),
            **plan.sources,
        }

    def _tensors(self) -> StrategyState:
        held, suspects = self.context.strategy.state_dict(), self.context.suspects
        if suspects is None:
            return held
        return replace(held, tensors=held.tensors | {TENSOR: suspects.tensor})

    def _report(self, call: Callable[[], list[SavedCheckpoint]]) -> None:
        context, failed = self.context, self.saver.num_failed
        step = context.state.step
        with context.phases("save"), translate_errors(context.ranks, step + 1):
            saved = call()
        # One call may fail several times before it succeeds, if the run waits for it: count each.
        for _ in range(failed, self.saver.num_failed):
            context.events.publish(CheckpointFailed(step))
        for checkpoint in saved:
            context.events.publish(checkpoint)
