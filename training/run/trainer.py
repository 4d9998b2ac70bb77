"""The loop: epochs, steps, evaluation, checkpoints. A single step is in ``step.py``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import lock_run_folder, write_whole
from training.checkpointing import SaveSchedule, Storage, check_storage, open_storage
from training.checkpointing.export import check_output, check_shared
from training.checkpointing.resume import (
    Resumed,
    find_resume_point,
    global_batch_size,
    move_later_aside,
    newest_checkpoint,
    open_checkpoint,
)
from training.checkpointing.saver import Saver
from training.config import TrainConfig
from training.data.balance import Balance
from training.data.batching import LengthBucketSampler
from training.data.teacher import read_teachers
from training.distributed.failures import translate_errors
from training.distributed.ranks import Ranks, seed_everything
from training.evaluation.evaluator import EvaluationStopped
from training.fault_tolerance.interruption import Interruption
from training.fault_tolerance.watchdog import Watchdog
from training.model.lora import check_lora
from training.model.optimizer import scaled_learning_rate
from training.model.own import Own
from training.model.pooling import POOLING_KEY
from training.model.precision import allow_tf32
from training.monitoring import SavedCheckpoint
from training.monitoring.events import (
    CheckpointFailed,
    CheckpointStarted,
    Rescheduled,
    RolledBack,
    RunEnded,
    RunStarted,
    StepDone,
    StepsAgreed,
    StepStarted,
    Subscriber,
)
from training.monitoring.monitors import Monitors
from training.monitoring.phases import Phases
from training.monitoring.trackers import check_trackers
from training.parallelism.registry import STRATEGIES
from training.parallelism.state import StrategyState
from training.parallelism.strategy import Strategy
from training.quiet import quiet_libraries
from training.run.bad_steps import BadStep, BadSteps
from training.run.batch_size import settle_batch_size
from training.run.budget import start_budget
from training.run.context import RunContext, StepPlan, stop_agreed
from training.run.describe import describe_run
from training.run.finish import finish_run
from training.run.settle import Settled, settle
from training.run.state import AverageMeter, RunState
from training.run.step import StepLog, SyncedSteps, train_step
from training.run.subscribers import make_subscribers
from training.run.suspects import TENSOR, suspects_of
from training.run.validation import validate

# A run stops within two seconds of a signal; the other second is for steps that take longer than the last ones did.
SYNC_SECONDS = 1.0


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
        interruption = interruption or Interruption(
            config.not_saved_exit_code, is_first=ranks.is_first
        )
        storage = _check_run(config, ranks)
        monitors = Monitors.of(config, ranks)
        phases, say = monitors.phases, monitors.say
        # Before data and model, which take minutes, because its process group may fail to form.
        self.saver = Saver(
            config, ranks, storage, say, partial(stop_agreed, ranks, phases, interruption)
        )
        seed_everything(config.seed, deterministic=config.deterministic)
        allow_tf32(wanted=config.tf32, device=ranks.device)

        own = own or ranks.run_on_all_ranks(lambda: Own.of(config))
        settled = settle(config, ranks, storage, say, own)
        news, model = settled.news, settled.model
        strategy, config, rows_that_fit = _distribute(settled, ranks, phases, say)
        # The last of the checks, because it may move an earlier run aside.
        resumed = find_resume_point(
            config, ranks, strategy.data_shard, storage, settled.sources, say
        )

        global_batch, accumulation = global_batch_size(
            rows_that_fit, config, strategy.data_shard, resumed
        )
        train = news.tokens.read_in_training
        lengths = train.lengths[news.epoch_index]
        balanced = train.labels[news.epoch_index] if config.sampling == "balanced" else None
        self.sampler = LengthBucketSampler(lengths, global_batch, config.seed, balanced)
        self.suspects = suspects_of(
            config, news.tokens.train, news.train_index, len(news.tokens.label_names)
        )
        self.budget = start_budget(config, strategy, ranks, news, resumed.state if resumed else {})
        self.tokens_per_step = global_batch * float(lengths.mean())
        timed = model if config.balance == "auto" else None
        self.balance = Balance(timed, ranks, strategy.data_shard, accumulation / global_batch, say)
        parameters = list(model.network.parameters())
        self.context = RunContext(
            **vars(monitors),
            config=config,
            news=news,
            strategy=strategy,
            plan=StepPlan(
                global_batch_size=global_batch,
                accumulation=accumulation,
                steps_per_epoch=len(self.sampler),
                total_steps=0 if config.method == "head" else config.epochs * len(self.sampler),
                peak_learning_rate=resumed.state["peak_learning_rate"]
                if resumed
                else scaled_learning_rate(config, strategy.data_shard.size),
                class_weights=settled.class_weights,
                sources=settled.sources,
                ideal_seconds=settled.ideal_seconds,
                start=settled.start,
            ),
            precision=settled.precision,
            model_config=model.config,
            num_parameters=sum(parameter.numel() for parameter in parameters),
            num_trained=sum(
                parameter.numel() for parameter in parameters if parameter.requires_grad
            ),
            state=RunState(),
            storage=storage,
            interruption=interruption,
        )
        self.watchdog, self.subscribers = Watchdog(config, monitors, interruption), subscribers
        if resumed:
            self._resume(resumed)
        if self.budget:
            self.context.plan.total_steps = self._steps_that_fit(
                ranks.broadcast(self._steps_left())
            )

    def fit(self) -> Path | None:
        """Train to the end and write the model, or stop at a checkpoint when asked to.

        Returns:
            The model folder; None if the run was stopped and can be resumed.

        Raises:
            TrainingFailure: a non-finite loss, no memory, a lost rank, a full disk.
        """
        context, config, ranks = self.context, self.context.config, self.context.ranks
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(context.exporter))
            ranks.run_on_all_ranks(lambda: self._open_folders(stack))
            stack.enter_context(context.events.recording())
            stack.enter_context(
                context.interruption.saving()
            )  # from here on a stop signal means: save, then stop
            stack.enter_context(self.saver)
            self.save_schedule = SaveSchedule(
                config.save_every, config.save_minutes, time.monotonic()
            )
            context.events.subscribers += [
                *make_subscribers(context, self.watchdog),
                *self.subscribers,
            ]
            stack.enter_context(contextlib.closing(context.events))
            # Entered last, so that a failing rank reports itself before it waits for anything else.
            stack.enter_context(context.status)
            stack.enter_context(self.watchdog)
            context.events.publish(
                RunStarted(context.state.step, context.plan.total_steps, context.state.epochs)
            )
            if context.console:
                context.console.banner(describe_run(context, self.budget))
            model_folder = self._train_and_finish()
            if model_folder is None:
                step = context.state.step
                context.say(
                    f"Stopped at step {step}; everything is saved. To resume, {config.how_to_resume}."
                )
            context.events.publish(RunEnded(finished=model_folder is not None))
            return model_folder

    def _open_folders(self, stack: contextlib.ExitStack) -> None:
        """On rank 0, make the run folder and keep other runs out of it and of the checkpoint storage until ``stack`` is
        closed.
        """
        if not self.context.ranks.is_first:
            return
        config = self.context.config
        try:
            config.run_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_run_folder(config.run_dir))
            # A start from this file resumes the run, however this one began.
            later = config.model_copy(update={"resume": "auto"})
            write_whole(config.run_dir / "config.yaml", later.to_yaml().encode())
        except OSError as error:
            raise UserError(
                f"--output_dir {config.output_dir}: {config.run_dir} cannot be written ({error.strerror})",
                code="not-writable",
            ) from error
        stack.enter_context(self.context.storage.lock())

    def _train_and_finish(self) -> Path | None:
        """Run the steps that are left; returns the model folder, or None when asked to stop."""
        state, plan = self.context.state, self.context.plan
        validation_pending = self._validates_at(state.step) and state.step not in {
            one.step for one in state.epochs
        }
        if (state.step < plan.total_steps or validation_pending) and not self._train(
            validation_pending
        ):
            return None
        if state.best and state.step < plan.total_steps:
            config = self.context.config
            best = state.first_best(config.best_metric).epoch
            self.context.say(
                f"Stopping after epoch {state.epochs[-1].epoch} of {config.epochs}: the last {config.early_stopping} "
                f"evaluations had no better {config.best_metric} than epoch {best}"
            )
        try:
            with self.context.phases("finish"):
                return finish_run(self.context, self.suspects)
        except EvaluationStopped:
            return None  # tested again when the run is resumed

    def _train(self, validation_pending: bool) -> bool:
        """Run the steps that are left, after a pending validation; returns whether all of it was done."""
        context, state, plan = self.context, self.context.state, self.context.plan
        self.step_log = StepLog(context.ranks, plan.ideal_seconds, self.suspects)
        self.bad_steps = BadSteps(context)
        epochs_done, steps_into_epoch = divmod(state.step, plan.steps_per_epoch)
        samples_done = (
            epochs_done * len(context.news.epoch_index) + steps_into_epoch * plan.global_batch_size
        )
        progress = (
            context.console.progress(
                total_steps=plan.total_steps, first_step=state.step, samples_done=samples_done
            )
            if context.console and plan.total_steps
            else contextlib.nullcontext()
        )
        self.first_step = state.step + 1
        with progress as bar:
            if bar:
                context.events.subscribers.append(bar)
            done = not validation_pending or self._validate()
            while (
                done
                and state.step < plan.total_steps
                and not state.no_longer_improves(context.config)
            ):
                done = self._train_epoch(epoch=state.step // plan.steps_per_epoch + 1)
            self.report_saves(self.saver.wait)
            self.saver.release()
        return done

    def _train_epoch(self, epoch: int) -> bool:
        """Run what is left of an epoch; returns whether the run continues, which it also does after a rollback."""
        state, config, steps_per_epoch = (
            self.context.state,
            self.context.config,
            self.context.plan.steps_per_epoch,
        )
        self.sampler.set_epoch(epoch)
        resumed_at, began = state.step % steps_per_epoch, time.perf_counter()
        seconds_before = state.epoch_seconds if resumed_at else 0.0
        if not resumed_at:
            state.epoch_loss, state.epoch_accuracy = AverageMeter(), AverageMeter()
        next_sync, news = state.step + 1, self.context.news
        for batch in islice(self.sampler, resumed_at, None):
            self._train_step(epoch, self._remaining(news.epoch_index[batch]))
            state.epoch_seconds = seconds_before + time.perf_counter() - began
            validates = self._validates_at(state.step)
            saves = self.save_schedule.due_by_step(state.step)
            stop = False
            if validates or saves or state.step >= next_sync or state.step % config.log_every == 0:
                synced = self._sync()
                validates = self._validates_at(state.step)  # the last step, if time is up
                next_sync = state.step + self._steps_until_next_sync(synced)
                if too_many := self.bad_steps.count(synced.steps, synced.bad):
                    self._roll_back(too_many)
                    return True  # the caller continues in the epoch of the restored step
                stop, saves = synced.flags["stop"] > 0, synced.flags["save"] > 0
            # Consecutive bad steps left the weights unchanged, and a rollback must go back past them: save none of
            # these.
            if stop or (saves and not validates and not state.bad.in_a_row):
                self._save()
            if stop:
                return False
            if validates:
                seconds = time.perf_counter()
                if not self._validate():
                    return False
                began += time.perf_counter() - seconds  # an evaluation is no training time
                if state.no_longer_improves(config) or state.step >= self.context.plan.total_steps:
                    return True
        return True

    def _remaining(self, rows: np.ndarray) -> np.ndarray:
        """Without what the run leaves out, and its rough copies."""
        originals = self.context.news.tokens.read_in_training.originals(rows)
        is_left = self.bad_steps.is_left(originals)
        return rows[is_left & self.suspects.is_left(originals)] if self.suspects else rows[is_left]

    def _validates_at(self, step: int) -> bool:
        every, plan = self.context.config.evaluate_every, self.context.plan
        ends = step == plan.total_steps or (step % plan.steps_per_epoch == 0 and not self.budget)
        if step == 0:  # what the fitted head is worth without a step of training
            return self.context.plan.start is not None and not self.budget
        return ends or (every > 0 and step % every == 0)

    def _steps_left(self) -> int:
        """How many more steps this rank's clock allows."""
        assert self.budget
        return self.budget.steps_left(self.tokens_per_step)

    def _steps_that_fit(self, steps_left: int) -> int:
        plan, epochs = self.context.plan, self.context.config.epochs
        return max(
            1,
            self.context.state.step,
            min(self.context.state.step + steps_left, epochs * plan.steps_per_epoch),
        )

    def _train_step(self, epoch: int, batch: np.ndarray) -> None:
        context, step = self.context, self.context.state.step + 1
        if len(batch):
            context.events.publish(StepStarted(step))
            originals = context.news.tokens.read_in_training.originals(batch)
            weights = self.suspects.weights(originals) if self.suspects else None
            record, micro_batches = train_step(context, self.balance, epoch, batch, weights)
            context.events.publish(StepDone(step, micro_batches))
            self.step_log.add(record)
        # If all rows of the batch are left out, the schedule advances without an update.
        context.state.step = context.phases.step = step

    def _sync(self) -> SyncedSteps:
        """Exchange with all ranks the losses of the last steps, and what only single ranks know."""
        context, state = self.context, self.context.state
        with context.phases("agree"), translate_errors(context.ranks, state.step + 1):
            synced = self.step_log.sync(state.seconds, self._flags())
        for step in synced.steps:
            if not step.bad:
                state.epoch_loss.update(step.loss, step.rows)
                if step.accuracy is not None:
                    state.epoch_accuracy.update(step.accuracy, step.rows)
                state.skipped_steps += step.skipped
        context.events.publish(StepsAgreed(synced.steps))
        if self.budget:
            self._reschedule(synced)
        if synced.flags["saved"] == context.ranks.world_size:
            self.report_saves(self.saver.collect)
        if synced.flags["retry"] and not synced.flags["save"]:
            self.saver.retry()
        return synced

    def _reschedule(self, synced: SyncedSteps) -> None:
        """Let the run end where rank 0 says, which knows the pace of the steps before these."""
        assert self.budget
        if (
            total_steps := self._steps_that_fit(synced.flags["steps_left"])
        ) != self.context.plan.total_steps:
            self.context.plan.total_steps = total_steps
            self.context.events.publish(Rescheduled(total_steps))
        if (
            synced.steps and synced.steps[0].step > self.first_step
        ):  # the first one starts threads and allocates
            seconds = self.step_log.step_seconds * len(synced.steps)
            self.budget.observe(
                synced.steps[-1].tokens_per_second * seconds, seconds, self.tokens_per_step
            )

    def _flags(self) -> dict[str, int]:
        """What only this rank knows. All ranks act on the sums, so that they act alike."""
        return {
            "stop": self.context.interruption.asked,
            "save": self.context.ranks.is_first
            and self.save_schedule.due(self.context.state.step, time.monotonic()),
            "saved": self.saver.done,
            "retry": self.saver.retry_due,
            **(
                {"steps_left": self._steps_left() if self.context.ranks.is_first else 0}
                if self.budget
                else {}
            ),
            **(
                {}
                if self._syncs_each_step
                else {"microseconds": round(self.step_log.step_seconds * 1e6)}
            ),
        }

    @property
    def _syncs_each_step(self) -> bool:
        """On a CPU that costs nothing. On a GPU, reading a number makes the host wait for all queued work."""
        return self.context.ranks.device.type == "cpu"

    def _steps_until_next_sync(self, synced: SyncedSteps) -> int:
        """Steps that fit into SYNC_SECONDS, so that a stop is noticed in time however rarely the run logs.

        All ranks must compute the same number, so it is computed from synchronized numbers only.
        """
        if self._syncs_each_step:
            return 1
        step_seconds = synced.flags["microseconds"] / 1e6 / self.context.ranks.world_size
        return max(1, int(SYNC_SECONDS / step_seconds)) if step_seconds else 1

    def _validate(self) -> bool:
        """Validate and save; returns whether it was completed. After a stop the validation is still pending."""
        if self.context.state.step == 0 and (start := self.context.plan.start):
            self.context.state.epoch_loss.update(start.loss)
        try:
            metrics = validate(self.context)
        except EvaluationStopped:
            self._save()
            return False
        self.context.state.epochs.append(metrics)
        self.context.events.publish(metrics)
        state, plan = self.context.state, self.context.plan
        if self.suspects and state.step and state.step % plan.steps_per_epoch == 0:
            self.suspects.merge(self.context.ranks)
            self.suspects.end_epoch()
        self._save()
        return True

    def _save(self) -> None:
        context, state = self.context, self.context.state
        context.events.publish(CheckpointStarted(state.step))
        run = state.to_plain() | {
            "config": context.config.model_dump(mode="json"),
            "global_batch_size": context.plan.global_batch_size,
            "peak_learning_rate": context.plan.peak_learning_rate,
            "steps_per_epoch": context.plan.steps_per_epoch,
            # The file that they came from may have changed or gone by the time the run resumes.
            "class_weights": None
            if context.plan.class_weights is None
            else context.plan.class_weights.tolist(),
            "budget": self.budget.to_plain() if self.budget else None,
            "start": context.plan.start and asdict(context.plan.start),
            "pooling": getattr(context.model_config, POOLING_KEY, ""),
            **context.plan.sources,
        }
        if self.suspects:
            self.suspects.merge(context.ranks)
        best_step = state.best.step if state.best else None
        self.report_saves(lambda: self.saver.save(state.step, self._tensors, run, best_step))
        self.save_schedule.saved(time.monotonic())
        self.step_log.restart_clock()

    def _tensors(self) -> StrategyState:
        held = self.context.strategy.state_dict()
        return (
            replace(held, tensors=held.tensors | {TENSOR: self.suspects.tensor})
            if self.suspects
            else held
        )

    def report_saves(self, call: Callable[[], list[SavedCheckpoint]]) -> None:
        step, failed = self.context.state.step, self.saver.num_failed
        with self.context.phases("save"), translate_errors(self.context.ranks, step + 1):
            saved = call()
        for _ in range(failed, self.saver.num_failed):
            self.context.events.publish(CheckpointFailed(step))
        for checkpoint in saved:
            self.context.events.publish(checkpoint)

    def _resume(self, resumed: Resumed) -> None:
        """Begin where the checkpoint was saved."""
        before, now = resumed.state["config"]["epochs"], self.context.config.epochs
        if before != now and not self.budget:
            total_steps = self.context.plan.total_steps
            self.context.say(
                f"--epochs was {before} and is now {now}, so the schedule ends at step {total_steps:,}"
            )
        with translate_errors(self.context.ranks, step=1):
            self.restore(resumed)

    def restore(self, resumed: Resumed) -> None:
        context = self.context
        context.state.take(resumed.state)
        context.phases.step = context.state.step
        context.ranks.run_on_all_ranks(lambda: context.strategy.load_state_dict(resumed.tensors))
        if self.suspects:
            context.ranks.run_on_all_ranks(lambda: self.suspects.read(resumed.tensors))
        context.events.write_on_rank0("resumed", checkpoint=str(resumed.path))

    def _roll_back(self, last: BadStep) -> None:
        """Restore the newest checkpoint, and leave out the rows of the bad steps from then on.

        The bad steps did not change the weights, so only the rows differ the second time.

        Raises:
            TrainingFailure: there is no checkpoint, or a rollback has not helped before.
        """
        context, ranks = self.context, self.context.ranks
        rows = self.bad_steps.rows_to_leave_out(last)
        self.report_saves(self.saver.wait)
        try:
            path = newest_checkpoint(ranks, context.storage, context.say)
            if path is None:
                self.bad_steps.fail(
                    last,
                    "There is no checkpoint yet to return to; lower --learning_rate or fix the rows",
                )
            with translate_errors(ranks, last.step):
                self.restore(open_checkpoint(path, ranks))
            move_later_aside(ranks, context.storage, context.state.step, context.say)
        except UserError as error:
            self.bad_steps.fail(last, f"There is no way back ({error}); lower --learning_rate")
        context.state.bad.leave_out(rows, last.step)
        self.step_log.restart_clock()
        context.events.publish(RolledBack(context.state.step, last.step, sorted(rows)))
        self.bad_steps.report_rollback(last, str(path), rows)


def _check_run(config: TrainConfig, ranks: Ranks) -> Storage:
    """Check what can be refused before data and model are read, the cheapest first; nothing is written.

    Returns:
        Where the checkpoints are.
    """
    storage = ranks.run_on_all_ranks(lambda: open_storage(config))
    ranks.run_on_all_ranks(lambda: check_output(config.output_dir) if ranks.is_first else None)
    ranks.run_on_all_ranks(lambda: check_trackers(config.tracker_names) if ranks.is_first else None)
    ranks.run_on_all_ranks(lambda: check_lora(config))
    ranks.run_on_all_ranks(
        lambda: read_teachers(config) if config.is_distilled and ranks.is_first else None
    )
    check_shared(config.output_dir, ranks)
    check_storage(storage, ranks)
    return storage


def _distribute(
    settled: Settled, ranks: Ranks, phases: Phases, say: Callable[[str], None]
) -> tuple[Strategy, TrainConfig, int]:
    """Distribute the model over the ranks, and find with it the batch size that ``auto`` leaves open.

    Returns:
        The strategy, the configuration with a batch size, and how many rows a micro-batch may have here.
    """
    config, news = settled.config, settled.news
    make = partial(
        STRATEGIES[config.strategy], settled.model, config, ranks, settled.precision, phases
    )
    with translate_errors(ranks, step=1):
        strategy = ranks.run_on_all_ranks(make)
        targets = news.tokens.train.labels[news.train_index]
        return strategy, *settle_batch_size(strategy, ranks, targets, settled.earlier, say)
