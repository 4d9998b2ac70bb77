"""The loop: epochs, steps, evaluation, checkpoints. It knows no strategy by name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import only_run_in, write_whole
from training.checkpointing import SaveSchedule, check_storage, open_storage
from training.checkpointing.export import check_output, check_shared
from training.checkpointing.resume import (
    Resumed,
    cleaning_of_run,
    find_resume_point,
    global_batch_size,
    move_later_aside,
    newest_checkpoint,
    open_checkpoint,
)
from training.checkpointing.saver import Saver
from training.config import TrainConfig
from training.data.balance import Balance
from training.data.batching import LengthBucketSampler, rank_share
from training.data.prepare import prepare_model, prepare_news
from training.evaluation.evaluator import EvaluationStopped
from training.fault_tolerance.bad_steps import BadStep, BadSteps
from training.fault_tolerance.failures import translate_errors
from training.fault_tolerance.interruption import Interruption
from training.fault_tolerance.watchdog import Watchdog
from training.model.optimizer import learning_rate_at, scaled_learning_rate
from training.model.precision import allow_tf32, choose_precision
from training.monitoring import Console, EventStream, Exporter, SavedCheckpoint
from training.monitoring.events import (
    CheckpointFailed,
    CheckpointStarted,
    RolledBack,
    RunEnded,
    RunStarted,
    StepDone,
    StepsAgreed,
    StepStarted,
)
from training.monitoring.status import StatusFile
from training.monitoring.trackers import check_trackers
from training.parallelism.blocks import length_multiple
from training.parallelism.distributed import Ranks, seed_everything
from training.parallelism.registry import STRATEGIES
from training.run.context import RunContext, StepPlan
from training.run.describe import describe_run
from training.run.finish import finish_run
from training.run.phases import Phases
from training.run.quiet import quiet_libraries
from training.run.state import AverageMeter, RunState
from training.run.step_log import Agreed, StepLog, StepRecord, rows_of
from training.run.subscribers import make_subscribers
from training.run.validation import validate_epoch

# A stop is obeyed within two seconds: half of that is for steps that take longer than the last ones did.
AGREE_SECONDS = 1.0


class Trainer:
    """Trains, evaluates and writes one model; every rank makes one and calls :meth:`fit`.

    Args:
        config: the run.
        ranks: this process's place in it.
        interruption: for one that catches signals already.

    Raises:
        UserError: the run cannot start as asked; nothing has been written.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, interruption: Interruption | None = None) -> None:
        quiet_libraries()
        console, phases = Console() if ranks.is_first else None, Phases()
        say = console.say if console else _say_nothing
        events = EventStream(config.run_dir, ranks, phases, config.log_every)

        # What can be refused is looked at first, the cheapest before the dearest, on all ranks: nothing is written yet.
        storage = ranks.run_on_all_ranks(lambda: open_storage(config))
        ranks.run_on_all_ranks(lambda: check_output(config.output_dir) if ranks.is_first else None)
        ranks.run_on_all_ranks(lambda: check_trackers(config.tracker_names) if ranks.is_first else None)
        check_shared(config.output_dir, ranks)
        check_storage(storage, ranks)
        # Before data and model, which take minutes: its process group may not form.
        self.saver = Saver(config, ranks, storage, say, lambda: self.context.stop_agreed())
        # Rank 0's choice: it is timed on CPUs.
        precision = ranks.broadcast(ranks.run_on_all_ranks(lambda: choose_precision(config.precision, ranks.device)))
        exporter = ranks.run_on_all_ranks(lambda: Exporter(config, ranks, phases))
        seed_everything(config.seed, deterministic=config.deterministic)
        allow_tf32(wanted=config.tf32, device=ranks.device)

        # Data, then the model that fits it, then the model distributed over the ranks.
        config = config.model_copy(update={"clean": cleaning_of_run(config, ranks, storage)})
        news = prepare_news(config, ranks, say)
        config = config.model_copy(update={"clean": news.cleaning})
        model = prepare_model(config, ranks, news.tokens, say)
        with translate_errors(ranks, step=1):
            strategy = ranks.run_on_all_ranks(lambda: STRATEGIES[config.strategy](model, config, ranks, precision))
        strategy.phases = phases

        # Last of what can be refused: it may move an earlier run aside.
        resumed = find_resume_point(config, ranks, strategy.place, storage, news.tokens.key, say)
        global_batch, accumulation = global_batch_size(config, strategy.place, resumed)
        self.sampler = LengthBucketSampler(news.tokens.train.lengths[news.train_index], global_batch, config.seed)
        timed = model if config.balance == "auto" else None
        self.balance = Balance(timed, ranks, strategy.place, accumulation / global_batch, say)
        self.context = RunContext(
            config=config,
            ranks=ranks,
            news=news,
            strategy=strategy,
            plan=StepPlan(
                global_batch_size=global_batch,
                accumulation=accumulation,
                steps_per_epoch=len(self.sampler),
                total_steps=config.epochs * len(self.sampler),
                peak_learning_rate=resumed.state["peak_learning_rate"]
                if resumed
                else scaled_learning_rate(config, strategy.place.size),
            ),
            precision=precision,
            model_config=model.network.config,
            num_parameters=model.network.num_parameters(),
            state=RunState(),
            storage=storage,
            phases=phases,
            events=events,
            exporter=exporter,
            status=StatusFile(config.run_dir, ranks, phases),
            interruption=interruption or Interruption(config.not_saved_exit_code, is_first=ranks.is_first),
            console=console,
            say=say,
        )
        self.watchdog = Watchdog(self.context)
        if resumed:
            with translate_errors(ranks, step=1):
                self.restore(resumed)

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
            if ranks.is_first:
                config.run_dir.mkdir(parents=True, exist_ok=True)
            for lock in (lambda: only_run_in(config.run_dir), context.storage.alone):
                ranks.run_on_all_ranks(lambda lock=lock: stack.enter_context(lock()) if ranks.is_first else None)
            for part in (context.events.recording(), context.interruption.saving(), self.saver):
                stack.enter_context(part)
            self.save_schedule = SaveSchedule(config.save_every, config.save_minutes, time.monotonic())
            if ranks.is_first:
                write_whole(config.run_dir / "config.yaml", config.to_yaml().encode())
            context.events.subscribers += make_subscribers(context, self.watchdog)
            stack.enter_context(contextlib.closing(context.events))
            # Last, so that a rank that fails says so before it waits for anything else.
            for part in (context.status, self.watchdog):
                stack.enter_context(part)
            context.events.publish(RunStarted(context.state.step, context.plan.total_steps, context.state.epochs))
            if context.console:
                context.console.banner(describe_run(context))
            model_folder = self._train_and_finish()
            if model_folder is None:
                step = context.state.step
                context.say(f"Stopped at step {step}, all saved. To go on, start the same command again.")
            context.events.publish(RunEnded(finished=model_folder is not None))
            return model_folder

    def _train_and_finish(self) -> Path | None:
        """Run what is left; returns the model folder, or None when asked to stop."""
        state, plan = self.context.state, self.context.plan
        owes_validation = len(state.epochs) < state.step // plan.steps_per_epoch
        if (state.step < plan.total_steps or owes_validation) and not self._train(owes_validation):
            return None
        try:
            with self.context.phases("finish"):
                return finish_run(self.context)
        except EvaluationStopped:
            return None  # tested again when the run is resumed

    def _train(self, owes_validation: bool) -> bool:
        """Validate the last epoch if that is owed, and run the steps that are left; returns whether all was done."""
        context, state, plan = self.context, self.context.state, self.context.plan
        self.step_log, self.bad_steps = StepLog(context.ranks), BadSteps(context)
        epochs_done, steps_into_epoch = divmod(state.step, plan.steps_per_epoch)
        samples_done = epochs_done * len(context.news.train_index) + steps_into_epoch * plan.global_batch_size
        progress = (
            context.console.progress(total_steps=plan.total_steps, first_step=state.step, samples_done=samples_done)
            if context.console
            else contextlib.nullcontext()
        )
        with progress as bar:
            if bar:
                context.events.subscribers.append(bar)
            done = not owes_validation or self._end_epoch(epoch=epochs_done)
            while done and state.step < plan.total_steps:
                done = self._train_epoch(epoch=state.step // plan.steps_per_epoch + 1)
            self.report_saves(self.saver.wait)
        return done

    def _train_epoch(self, epoch: int) -> bool:
        """Run what is left of an epoch; returns whether the run continues, as it also does after a rollback."""
        state, config, steps_per_epoch = self.context.state, self.context.config, self.context.plan.steps_per_epoch
        self.sampler.set_epoch(epoch)
        resumed_at, began = state.step % steps_per_epoch, time.perf_counter()
        seconds_before = state.epoch_seconds if resumed_at else 0.0
        if not resumed_at:
            state.epoch_loss = AverageMeter()
        agrees_at = state.step + 1
        for batch in islice(self.sampler, resumed_at, None):
            self._train_step(epoch, self.bad_steps.remaining(self.context.news.train_index[batch]))
            state.epoch_seconds = seconds_before + time.perf_counter() - began
            is_last = state.step % steps_per_epoch == 0
            saves = self.save_schedule.due_by_step(state.step)
            stop = False
            if is_last or saves or state.step >= agrees_at or state.step % config.log_every == 0:
                agreed = self._agree()
                agrees_at = state.step + self._steps_until_agreement(agreed)
                if too_many := self.bad_steps.count(agreed.steps, agreed.bad):
                    self._roll_back(too_many)
                    return True  # the loop over epochs finds the place again
                stop, saves = agreed.raised["stop"] > 0, agreed.raised["save"] > 0
            # While bad steps follow each other the weights have not changed, and a rollback must reach back past them.
            if stop or (saves and not is_last and not state.bad.in_a_row):
                self._save()
            if stop:
                return False
        return self._end_epoch(epoch)

    def _train_step(self, epoch: int, batch: np.ndarray) -> None:
        context, config, plan = self.context, self.context.config, self.context.plan
        tokens, step = context.news.tokens.train, context.state.step + 1
        if not len(batch):  # all its rows are excluded: the schedule advances without an update
            context.state.step = context.phases.step = step
            return
        context.events.publish(StepStarted(step))
        with context.phases("data"):
            micro_batches = rank_share(
                tokens,
                batch,
                context.strategy.place,
                plan.accumulation,
                pad_to_multiple_of=length_multiple(config, context.ranks.device.type),
                max_length=config.max_length,
                speeds=self.balance.speeds,
            )
            moved = [batch.to(context.ranks.device) for batch in micro_batches]
        learning_rate = learning_rate_at(
            step, plan.total_steps, plan.peak_learning_rate, config.warmup, config.schedule
        )
        with context.phases("step"), translate_errors(context.ranks, step, micro_batches[0].input_ids.shape):
            result = context.strategy.step(moved, step, learning_rate)
            self.balance.step_done(micro_batches)
        context.events.publish(StepDone(step, micro_batches))
        num_tokens = int(tokens.lengths[batch].sum())
        self.step_log.add(StepRecord(step, epoch, learning_rate, batch, num_tokens, rows_of(micro_batches), result))
        context.state.step = context.phases.step = step

    def _agree(self) -> Agreed:
        """Agree with all ranks on the last steps, and on what single ranks know."""
        context, state = self.context, self.context.state
        with context.phases("agree"), translate_errors(context.ranks, state.step + 1):
            agreed = self.step_log.flush(state.seconds, self._flags())
        for step in agreed.steps:
            if not step.bad:
                state.epoch_loss.update(step.loss, step.rows)
                state.skipped_steps += step.skipped
        context.events.publish(StepsAgreed(agreed.steps))
        if agreed.raised["saved"] == context.ranks.world_size:
            self.report_saves(self.saver.collect)
        if agreed.raised["retry"] and not agreed.raised["save"]:
            self.saver.retry()
        return agreed

    def _flags(self) -> dict[str, int]:
        """What this rank alone knows, and all must before anyone acts on it; the sums over ranks are agreed on."""
        return {
            "stop": self.context.interruption.asked,
            "save": self.context.ranks.is_first and self.save_schedule.due(self.context.state.step, time.monotonic()),
            "saved": self.saver.done,
            "retry": self.saver.retry_due,
            **({} if self._agrees_each_step else {"microseconds": round(self.step_log.step_seconds * 1e6)}),
        }

    @property
    def _agrees_each_step(self) -> bool:
        """On a CPU that costs nothing; to look at a GPU's numbers, the host waits for all work queued there."""
        return self.context.ranks.device.type == "cpu"

    def _steps_until_agreement(self, agreed: Agreed) -> int:
        """Steps that fit into AGREE_SECONDS, so that a stop is obeyed in time however rare the lines of the log are.

        All ranks must come to the same number, so it follows from numbers that were agreed on.
        """
        if self._agrees_each_step:
            return 1
        step_seconds = agreed.raised["microseconds"] / 1e6 / self.context.ranks.world_size
        return max(1, int(AGREE_SECONDS / step_seconds)) if step_seconds else 1

    def _end_epoch(self, epoch: int) -> bool:
        """Validate and save; returns whether that was done, not cut short by a stop: then the validation is owed."""
        try:
            metrics = validate_epoch(self.context, epoch)
        except EvaluationStopped:
            self._save()
            return False
        self.context.state.epochs.append(metrics)
        self.context.events.publish(metrics)
        self._save()
        return True

    def _save(self) -> None:
        context, state = self.context, self.context.state
        context.events.publish(CheckpointStarted(state.step))
        run = state.to_plain() | {
            "config": context.config.model_dump(mode="json"),
            "global_batch_size": context.plan.global_batch_size,
            "peak_learning_rate": context.plan.peak_learning_rate,
            "data_key": context.news.tokens.key,
        }
        best_step = state.best.step if state.best else None
        self.report_saves(lambda: self.saver.save(state.step, context.strategy.state_dict, run, best_step))
        self.save_schedule.saved(time.monotonic())
        self.step_log.restart_clock()

    def report_saves(self, call: Callable[[], list[SavedCheckpoint]]) -> None:
        """Ask the saver, and publish which checkpoints are complete or failed since."""
        step, failed = self.context.state.step, self.saver.num_failed
        with self.context.phases("save"), translate_errors(self.context.ranks, step + 1):
            saved = call()
        for _ in range(failed, self.saver.num_failed):
            self.context.events.publish(CheckpointFailed(step))
        for checkpoint in saved:
            self.context.events.publish(checkpoint)

    def restore(self, resumed: Resumed) -> None:
        """Continue from a checkpoint: its weights, moments and place in the data."""
        context = self.context
        context.state.take(resumed.state)
        context.phases.step = context.state.step
        context.ranks.run_on_all_ranks(lambda: context.strategy.load_state_dict(resumed.tensors))
        context.events.write_on_rank0("resumed", checkpoint=str(resumed.path))

    def _roll_back(self, last: BadStep) -> None:
        """Restore the newest checkpoint, and leave the rows of the bad steps out from then on.

        Those steps left the weights as they were, so that only the rows differ the second time.

        Raises:
            TrainingFailure: there is no checkpoint, or going back has not helped before.
        """
        context, ranks = self.context, self.context.ranks
        rows = self.bad_steps.rows_to_leave_out(last)
        self.report_saves(self.saver.wait)
        try:
            path = newest_checkpoint(ranks, context.storage, context.say)
            if path is None:
                self.bad_steps.fail(
                    last, "There is no checkpoint yet to go back to; lower --learning_rate or mend the rows"
                )
            with translate_errors(ranks, last.step):
                self.restore(open_checkpoint(path, ranks))
            move_later_aside(ranks, context.storage, context.state.step, context.say)
        except UserError as error:
            self.bad_steps.fail(last, f"There is no way back ({error}); lower --learning_rate")
        context.state.bad.leave_out(rows, last.step)
        self.step_log.restart_clock()
        context.events.publish(RolledBack(context.state.step, last.step, sorted(rows)))
        self.bad_steps.tell_rollback(last, str(path), rows)


def _say_nothing(text: str) -> None:
    """What all ranks but the first print."""
