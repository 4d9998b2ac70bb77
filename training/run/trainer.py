"""The loop: epochs, steps, evaluation, checkpoints. A single step is in ``step.py``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from training.checkpointing.resume import find_resume_point
from training.config import TrainConfig
from training.distributed.ranks import Ranks
from training.evaluation.evaluator import EvaluationStopped
from training.fault_tolerance.interruption import Interruption
from training.fault_tolerance.watchdog import Watchdog
from training.model.own import Own
from training.monitoring.events import RunEnded, RunStarted, StepDone, StepStarted, Subscriber
from training.monitoring.monitors import Monitors
from training.quiet import quiet_libraries
from training.run.agreement import Agreement
from training.run.assemble import distribute, make_context
from training.run.bad_steps import BadStep, BadSteps
from training.run.checkpoints import Checkpoints, make_saver
from training.run.describe import describe_run
from training.run.finish import finish_run
from training.run.settle import check_run, settle
from training.run.step import train_step
from training.run.subscribers import make_subscribers
from training.run.validation import validate


@dataclass(frozen=True)
class _Due:
    """What is to be done after a step, the same on all ranks; ``rollback``: the bad step that is
    one too many.
    """

    rollback: BadStep | None = None
    save: bool = False
    stop: bool = False
    validation: bool = False


class Trainer:
    """Trains, evaluates and writes one model; every rank creates one and calls :meth:`fit`.

    Raises:
        UserError: the run cannot start as asked; nothing has been written.
    """

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        interruption: Interruption | None = None,
        own: Own | None = None,
        subscribers: Sequence[Subscriber] = (),
    ) -> None:
        quiet_libraries()
        asked = interruption or Interruption(config.not_saved_exit_code, is_first=ranks.is_first)
        storage = check_run(config, ranks)
        monitors = Monitors.of(config, ranks)
        # Before data and model, which take minutes, because its process group may fail to form.
        saver = make_saver(config, storage, monitors, asked)

        settled = settle(config, ranks, storage, monitors.say, own)
        settled, strategy, rows_that_fit = distribute(settled, monitors)
        # The last of the checks, because it may move an earlier run aside.
        resumed = find_resume_point(
            settled.config, ranks, strategy.data_shard, storage, settled.sources, monitors.say
        )
        self.context = make_context(
            settled, strategy, rows_that_fit, resumed, storage, monitors, asked
        )
        self.checkpoints = Checkpoints(self.context, saver)
        self.watchdog, self.subscribers = Watchdog(settled.config, monitors, asked), subscribers
        if resumed:
            self.checkpoints.resume(resumed)
        if self.context.budget:
            self.context.end_in(ranks.broadcast(self.context.steps_left()))

    def fit(self) -> Path | None:
        """Train to the end and write the model, or stop at a checkpoint when asked to.

        Returns:
            The model folder; None if the run was stopped and can be resumed.

        Raises:
            TrainingFailure: a non-finite loss, no memory, a lost rank, a full disk.
        """
        context = self.context
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(context.exporter))
            context.ranks.run_on_all_ranks(lambda: self.checkpoints.open_folders(stack))
            stack.enter_context(context.events.recording())
            # From here on a stop signal means: save, then stop.
            stack.enter_context(context.interruption.saving())
            stack.enter_context(self.checkpoints.saver)
            context.events.subscribers += make_subscribers(context, self.watchdog)
            context.events.subscribers += self.subscribers
            stack.enter_context(contextlib.closing(context.events))
            # Entered last, so that a failing rank reports itself before it waits for anything else.
            stack.enter_context(context.status)
            stack.enter_context(self.watchdog)
            context.events.publish(
                RunStarted(context.state.step, context.plan.total_steps, context.state.epochs)
            )
            if context.console:
                context.console.banner(describe_run(context))
            model_folder = self._train_and_finish()
            if model_folder is None:
                context.say(
                    f"Stopped at step {context.state.step}; everything is saved. To resume, "
                    f"{context.config.how_to_resume}."
                )
            context.events.publish(RunEnded(finished=model_folder is not None))
            return model_folder

    def _train_and_finish(self) -> Path | None:
        """Run the steps that are left; returns the model folder, or None when asked to stop."""
        context, state, plan = self.context, self.context.state, self.context.plan
        validated = {evaluation.step for evaluation in state.epochs}
        # A stop may have come between the last step of an epoch and the end of its validation.
        is_pending = context.validates_at(state.step) and state.step not in validated
        if (state.step < plan.total_steps or is_pending) and not self._train(is_pending):
            return None
        if state.best and state.step < plan.total_steps:
            config = context.config
            best = state.first_best(config.best_metric).epoch
            context.say(
                f"Stopping after epoch {state.epochs[-1].epoch} of {config.epochs}: the last "
                f"{config.early_stopping} evaluations had no better {config.best_metric} than "
                f"epoch {best}"
            )
        try:
            with context.phases("finish"):
                return finish_run(context)
        except EvaluationStopped:
            return None  # tested again when the run is resumed

    def _train(self, validation_is_pending: bool) -> bool:
        """Run the steps that are left, after a pending validation; returns whether all of it was
        done.
        """
        context, state, plan = self.context, self.context.state, self.context.plan
        self.agreement = Agreement(context, self.checkpoints)
        self.bad_steps = BadSteps(context)
        with contextlib.ExitStack() as stack:
            if context.console and plan.total_steps:
                bar = context.console.progress(
                    total_steps=plan.total_steps,
                    first_step=state.step,
                    samples_done=context.samples_done,
                )
                context.events.subscribers.append(stack.enter_context(bar))
            done = not validation_is_pending or self._validate()
            while done and not self._is_at_end():
                done = self._train_epoch(epoch=state.step // plan.steps_per_epoch + 1)
            # What comes next loads the best weights: the last save's copies are not needed beside
            # them.
            self.checkpoints.wait()
            self.checkpoints.saver.release()
        return done

    def _is_at_end(self) -> bool:
        state = self.context.state
        is_last = state.step >= self.context.plan.total_steps
        return is_last or state.no_longer_improves(self.context.config)

    def _train_epoch(self, epoch: int) -> bool:
        """Run what is left of an epoch; returns whether the run continues, which it also does after
        a rollback.
        """
        context, state, sampler = self.context, self.context.state, self.context.sampler
        sampler.set_epoch(epoch)
        steps_done, began = state.step % context.plan.steps_per_epoch, time.perf_counter()
        if not steps_done:
            state.begin_epoch()
        seconds_before, self.agreement.next_step = state.epoch_seconds, state.step + 1
        # The order of an epoch's batches is a function of seed and epoch, so a resumed run skips
        # those it has seen.
        for batch in islice(sampler, steps_done, None):
            self._train_step(epoch, self._remaining(context.data.epoch_index[batch]))
            state.epoch_seconds = seconds_before + time.perf_counter() - began
            due = self._agree_on_what_is_due()
            if due.rollback:
                self.bad_steps.roll_back(due.rollback, self.checkpoints)
                self.agreement.log.restart_clock()
                return True  # the caller continues in the epoch of the restored step
            if due.save:
                self._save()
            if due.stop:
                return False
            if due.validation:
                seconds = time.perf_counter()
                if not self._validate():
                    return False
                began += time.perf_counter() - seconds  # an evaluation is no training time
                if self._is_at_end():
                    return True
        return True

    def _remaining(self, rows: np.ndarray) -> np.ndarray:
        """Without what the run leaves out, and its rough copies."""
        suspects = self.context.suspects
        originals = self.context.data.tokens.read_in_training.originals(rows)
        is_left = self.bad_steps.is_left(originals)
        return rows[is_left & suspects.is_left(originals)] if suspects else rows[is_left]

    def _train_step(self, epoch: int, batch: np.ndarray) -> None:
        context, step = self.context, self.context.state.step + 1
        if len(batch):
            context.events.publish(StepStarted(step))
            record, micro_batches = train_step(context, epoch, batch)
            context.events.publish(StepDone(step, micro_batches))
            self.agreement.add(record)
        # If all rows of the batch are left out, the schedule advances without an update.
        context.state.step = context.phases.step = step

    def _agree_on_what_is_due(self) -> _Due:
        """Without an agreement after this step nothing is due: each of these forces one, or comes
        from one.
        """
        context, step = self.context, self.context.state.step
        if not (context.validates_at(step) or self.agreement.is_due(step)):
            return _Due()
        synced = self.agreement.reach()
        if too_many := self.bad_steps.count(synced.steps, synced.bad):
            return _Due(rollback=too_many)
        stop, save = synced.flags["stop"] > 0, synced.flags["save"] > 0
        # Asked again, because this is the last step if the agreement says that time is up.
        validation = context.validates_at(step)
        # A validation saves, too. Consecutive bad steps left the weights unchanged, and a rollback
        # must go back past them: save none of these.
        save = save and not validation and not context.state.bad.in_a_row
        return _Due(save=stop or save, stop=stop, validation=validation)

    def _validate(self) -> bool:
        """Validate and save; returns whether it was completed. After a stop the validation is still
        pending.
        """
        context, state = self.context, self.context.state
        if state.step == 0 and (start := context.plan.start):
            state.epoch_loss.update(start.loss)
        try:
            metrics = validate(context)
        except EvaluationStopped:
            self._save()
            return False
        state.epochs.append(metrics)
        context.events.publish(metrics)
        if context.suspects and state.step and state.step % context.plan.steps_per_epoch == 0:
            context.suspects.merge(context.ranks)
            context.suspects.end_epoch()
        self._save()
        return True

    def _save(self) -> None:
        self.checkpoints.save()
        self.agreement.log.restart_clock()
