"""The loop: epochs, steps, evaluation, checkpoints. It knows no strategy by name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np

from common.files import AverageMeter, only_run_in, write_whole
from training.checkpointing import SaveSchedule, check_storage, open_storage
from training.checkpointing.export import check_output, check_shared
from training.checkpointing.resume import Resumed, cleaning_of_run, find_resume_point, global_batch_size
from training.checkpointing.saver import Saver
from training.config import TrainConfig
from training.data.balance import Balance
from training.data.batching import LengthBucketSampler, rank_share
from training.data.prepare import prepare_model, prepare_news
from training.evaluation.evaluator import EvaluationStopped
from training.fault_tolerance.bad_steps import BadSteps
from training.fault_tolerance.failures import explained
from training.fault_tolerance.interruption import Interruption
from training.fault_tolerance.watchdog import Watchdog
from training.model.optimizer import learning_rate_at, scaled_learning_rate
from training.model.precision import allow_tf32, choose_precision
from training.monitoring import Console, EventLog, Exporter, RunLog, SavedCheckpoint
from training.monitoring.status import StatusFile
from training.monitoring.trackers import check_trackers
from training.parallelism.blocks import length_multiple
from training.parallelism.distributed import Ranks, seed_everything
from training.parallelism.registry import STRATEGIES
from training.run.describe import describe_run
from training.run.finish import finish_run
from training.run.observers import build_observers
from training.run.phases import Phases
from training.run.quiet import quiet_libraries
from training.run.state import RunState
from training.run.step_log import Agreed, StepLog, StepRecord, rows_of
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
        self.config = config
        self.ranks = ranks
        self.console = Console() if ranks.is_first else None
        self.phases = Phases()
        self.events = EventLog(config.run_dir, ranks, self.phases, config.log_every)
        self.storage = ranks.together(lambda: open_storage(config))
        ranks.together(lambda: check_output(config.output_dir) if ranks.is_first else None)
        ranks.together(lambda: check_trackers(config.tracker_names) if ranks.is_first else None)
        check_shared(config.output_dir, ranks)
        check_storage(self.storage, ranks)
        # Before data and model, which take minutes: its process group may not form.
        self.saver = Saver(config, ranks, self.storage, self.say, self.stop_agreed)
        # Rank 0's choice: it is timed on CPUs.
        self.precision = ranks.broadcast(ranks.together(lambda: choose_precision(config.precision, ranks.device)))
        self.exporter = ranks.together(lambda: Exporter(config, ranks, self.phases))
        seed_everything(config.seed, deterministic=config.deterministic)
        allow_tf32(wanted=config.tf32, device=ranks.device)
        config = config.model_copy(update={"clean": cleaning_of_run(config, ranks, self.storage)})
        self.news = prepare_news(config, ranks, self.say)
        config = self.config = config.model_copy(update={"clean": self.news.cleaning})
        model = prepare_model(config, ranks, self.news.tokens, self.say)
        self.architecture, self.num_parameters = model.network.config, model.network.num_parameters()
        with explained(ranks, step=1):
            self.strategy = ranks.together(lambda: STRATEGIES[config.strategy](model, config, ranks, self.precision))
        self.strategy.phases = self.phases
        self.place = self.strategy.place
        # Last of what can be refused: it may move an earlier run aside.
        resumed = find_resume_point(config, ranks, self.place, self.storage, self.news.tokens.key, self.say)
        self.global_batch_size, self.accumulation = global_batch_size(config, self.place, resumed)
        timed = model if config.balance == "auto" else None
        self.balance = Balance(timed, ranks, self.place, self.accumulation / self.global_batch_size, self.say)
        lengths = self.news.tokens.train.lengths[self.news.train_index]
        self.sampler = LengthBucketSampler(lengths, self.global_batch_size, config.seed)
        self.total_steps = config.epochs * len(self.sampler)
        self.peak_learning_rate = scaled_learning_rate(config, self.place.size)
        self.state = RunState()
        self.interruption = interruption or Interruption(config.not_saved_exit_code, is_first=ranks.is_first)
        self.status = StatusFile(config.run_dir, ranks, self.phases)
        self.watchdog = Watchdog(self)
        if resumed:
            with explained(ranks, step=1):
                self.restore(resumed)

    def fit(self) -> Path | None:
        """Train to the end and write the model, or stop at a checkpoint when asked to.

        Returns:
            The model folder; None if the run was stopped and can go on.

        Raises:
            TrainingFailure: a non-finite loss, no memory, a lost rank, a full disk.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(self.exporter))
            if self.ranks.is_first:
                self.config.run_dir.mkdir(parents=True, exist_ok=True)
            for held in (lambda: only_run_in(self.config.run_dir), self.storage.alone):
                self.ranks.together(lambda held=held: stack.enter_context(held()) if self.ranks.is_first else None)
            for context in (self.events.writing(), self.interruption.saving(), self.saver):
                stack.enter_context(context)
            self.save_schedule = SaveSchedule(self.config.save_every, self.config.save_minutes, time.monotonic())
            self.log = None
            if self.ranks.is_first:
                write_whole(self.config.run_dir / "config.yaml", self.config.to_yaml().encode())
                self.log = RunLog.of(self.config, self.state.step, self.say)
            self.observers = stack.enter_context(contextlib.closing(build_observers(self)))
            # Last, so that a rank that fails says so before it waits for anything else.
            for context in (self.status, self.watchdog):
                stack.enter_context(context)
            self.observers.run_starts(self.state.step, self.total_steps, self.state.epochs)
            if self.console:
                self.console.banner(describe_run(self))
            model_folder = self._train_and_finish()
            if model_folder is None:
                self.say(f"Stopped at step {self.state.step}, all saved. To go on, start the same command again.")
                self.status.stopped()
            self.events.agreed("finished" if model_folder else "stopped")
            return model_folder

    def say(self, text: str) -> None:
        """Print one line on rank 0."""
        if self.console:
            self.console.say(text)

    def describe_row(self, row: int) -> str:
        """How a training row begins, where this rank has its text; else nothing."""
        return f'; row {row} reads "{self.news.texts.train.texts[row][:80]}"' if self.news.texts else ""

    def stop_agreed(self) -> bool:
        """Whether any rank was asked to stop; in a long phase, where all ranks ask at the same place."""
        self.phases.beat()
        return self.ranks.any(self.interruption.asked)

    def _train_and_finish(self) -> Path | None:
        """Run what is left; returns the model folder, or None when asked to stop."""
        owes_validation = len(self.state.epochs) < self.state.step // len(self.sampler)
        if (self.state.step < self.total_steps or owes_validation) and not self._train(owes_validation):
            return None
        try:
            with self.phases("finish"):
                return finish_run(self)
        except EvaluationStopped:
            return None  # tested anew when the run goes on

    def _train(self, owes_validation: bool) -> bool:
        """Validate the last epoch if that is owed, and run the steps that are left; returns whether all was done."""
        self.step_log, self.bad_steps = StepLog(self.ranks), BadSteps(self)
        step, steps_an_epoch = self.state.step, len(self.sampler)
        samples_done = step // steps_an_epoch * len(self.news.train_index)
        samples_done += step % steps_an_epoch * self.global_batch_size
        progress = (
            self.console.progress(total_steps=self.total_steps, first_step=step, samples_done=samples_done)
            if self.console
            else contextlib.nullcontext()
        )
        with progress as self.bar:
            done = not owes_validation or self._end_epoch(epoch=step // steps_an_epoch)
            while done and self.state.step < self.total_steps:
                done = self._train_epoch(epoch=self.state.step // steps_an_epoch + 1)
            self.hear_of_saves(self.saver.wait)
        return done

    def _train_epoch(self, epoch: int) -> bool:
        state, config = self.state, self.config
        self.sampler.set_epoch(epoch)
        resumed_at, began = state.step % len(self.sampler), time.perf_counter()
        seconds_before = state.epoch_seconds if resumed_at else 0.0
        if not resumed_at:
            state.epoch_loss = AverageMeter()
        agrees_at = state.step + 1
        for batch in islice(self.sampler, resumed_at, None):
            self._train_step(epoch, self.bad_steps.remaining(self.news.train_index[batch]))
            state.epoch_seconds = seconds_before + time.perf_counter() - began
            is_last = state.step % len(self.sampler) == 0
            saves = self.save_schedule.due_by_step(state.step)
            stop = False
            if is_last or saves or state.step >= agrees_at or state.step % config.log_every == 0:
                agreed = self._agree()
                agrees_at = state.step + self._steps_until_agreement(agreed)
                if self.bad_steps.take(agreed.steps, agreed.bad):
                    return True
                stop, saves = agreed.raised["stop"] > 0, agreed.raised["save"] > 0
            # A row of bad steps has changed no weight, and going back is to reach to before it.
            if stop or (saves and not is_last and not state.bad.in_a_row):
                self._save()
            if stop:
                return False
        return self._end_epoch(epoch)

    def _train_step(self, epoch: int, batch: np.ndarray) -> None:
        tokens, step = self.news.tokens.train, self.state.step + 1
        if not len(batch):  # all its rows are left out: the schedule goes on without an update
            self.state.step = self.phases.step = step
            return
        self.observers.step_begins(step)
        with self.phases("data"):
            micro_batches = rank_share(
                tokens,
                batch,
                self.place,
                self.accumulation,
                pad_to_multiple_of=length_multiple(self.config, self.ranks.device.type),
                max_length=self.config.max_length,
                speeds=self.balance.speeds,
            )
            moved = [batch.to(self.ranks.device) for batch in micro_batches]
        learning_rate = learning_rate_at(
            step, self.total_steps, self.peak_learning_rate, self.config.warmup, self.config.schedule
        )
        with self.phases("step"), explained(self.ranks, step, micro_batches[0].input_ids.shape):
            result = self.strategy.step(moved, step, learning_rate)
            self.balance.step_done(micro_batches)
        self.observers.step_ends(step, micro_batches, result)
        num_tokens = int(tokens.lengths[batch].sum())
        self.step_log.add(StepRecord(step, epoch, learning_rate, batch, num_tokens, rows_of(micro_batches), result))
        self.state.step = self.phases.step = step

    def _agree(self) -> Agreed:
        """Agree with all ranks on the last steps, and on what single ranks know."""
        with self.phases("agree"), explained(self.ranks, self.state.step + 1):
            agreed = self.step_log.flush(self.state.seconds, self._flags())
        for step in agreed.steps:
            if not step.bad:
                self.state.epoch_loss.update(step.loss, step.rows)
                self.state.skipped_steps += step.skipped
        self.observers.steps_agreed(agreed.steps)
        if self.console and agreed.steps:
            self.bar.update(agreed.steps[-1])
        if agreed.raised["saved"] == self.ranks.world_size:
            self.hear_of_saves(self.saver.collect)
        if agreed.raised["retry"] and not agreed.raised["save"]:
            self.saver.retry()
        return agreed

    def _flags(self) -> dict[str, int]:
        """What this rank alone knows, and all must before anyone acts on it; the sums over ranks are agreed on."""
        return {
            "stop": self.interruption.asked,
            "save": self.ranks.is_first and self.save_schedule.due(self.state.step, time.monotonic()),
            "saved": self.saver.done,
            "retry": self.saver.retry_due,
            **({} if self._agrees_each_step else {"microseconds": round(self.step_log.step_seconds * 1e6)}),
        }

    @property
    def _agrees_each_step(self) -> bool:
        """On a CPU that costs nothing; to look at a GPU's numbers, the host waits for all work queued there."""
        return self.ranks.device.type == "cpu"

    def _steps_until_agreement(self, agreed: Agreed) -> int:
        """Steps that fit into AGREE_SECONDS, so that a stop is obeyed in time however rare the lines of the log are.

        All ranks must come to the same number, so it follows from numbers that were agreed on.
        """
        if self._agrees_each_step:
            return 1
        step_seconds = agreed.raised["microseconds"] / 1e6 / self.ranks.world_size
        return max(1, int(AGREE_SECONDS / step_seconds)) if step_seconds else 1

    def _end_epoch(self, epoch: int) -> bool:
        """Validate and save; returns whether that was done, not cut short by a stop: then the validation is owed."""
        try:
            metrics = validate_epoch(self, epoch)
        except EvaluationStopped:
            self._save()
            return False
        self.state.epochs.append(metrics)
        self.observers.epoch_ends(metrics)
        if self.console:
            self.bar.epoch_table([metrics])
        self._save()
        return True

    def _save(self) -> None:
        self.observers.checkpoint_begins(self.state.step)
        state = self.state
        run = state.to_plain() | {
            "config": self.config.model_dump(mode="json"),
            "global_batch_size": self.global_batch_size,
            "peak_learning_rate": self.peak_learning_rate,
            "data_key": self.news.tokens.key,
        }
        best_step = state.best.step if state.best else None
        self.hear_of_saves(lambda: self.saver.save(state.step, self.strategy.state_dict, run, best_step))
        self.save_schedule.saved(time.monotonic())
        self.step_log.restart_clock()

    def hear_of_saves(self, call: Callable[[], list[SavedCheckpoint]]) -> None:
        """Ask the saver, and tell the observers what stands since."""
        failed = self.saver.num_failed
        with self.phases("save"), explained(self.ranks, self.state.step + 1):
            saved = call()
        for _ in range(failed, self.saver.num_failed):
            self.observers.checkpoint_failed(self.state.step)
        for checkpoint in saved:
            self.observers.checkpoint_saved(checkpoint)

    def restore(self, resumed: Resumed) -> None:
        """Stand where a checkpoint was written."""
        self.state.take(resumed.state)
        self.phases.step = self.state.step
        self.ranks.together(lambda: self.strategy.load_state_dict(resumed.tensors))
        self.peak_learning_rate = resumed.state["peak_learning_rate"]
        self.events.agreed("resumed", checkpoint=str(resumed.path))
