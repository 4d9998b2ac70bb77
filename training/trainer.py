"""The loop: epochs, steps, evaluation, checkpoints. It knows no strategy by name."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from training.balance import Balance
from training.batching import LengthBucketSampler, rank_share
from training.checkpointing import CheckpointStore
from training.checkpointing.export import check_output, check_shared
from training.checkpointing.resume import Resumed, find_resume_point, global_batch_size
from training.config import TrainConfig
from training.describe import describe_run
from training.distributed import Ranks, seed_everything
from training.errors import TrainingFailure
from training.evaluation import evaluate
from training.finish import finish_run
from training.interruption import Interruption
from training.monitoring import Console, EpochMetrics, Exporter, RunLog
from training.optimization import learning_rate_at, scaled_learning_rate
from training.parallelism import STRATEGIES
from training.parallelism.blocks import length_multiple
from training.precision import choose_precision
from training.prepare import prepare_model, prepare_news
from training.quiet import quiet_libraries
from training.step_log import StepLog, StepRecord, rows_of
from training.utils import AverageMeter, only_run_in, write_whole


class Trainer:
    """Trains, evaluates and writes one model; every rank makes one and calls :meth:`fit`.

    Args:
        config: the run.
        ranks: this process's place in it.

    Raises:
        UserError: the run cannot start as asked; nothing has been written.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        quiet_libraries()
        self.config = config
        self.ranks = ranks
        self.console = Console() if ranks.is_first else None
        self.store = CheckpointStore(config.run_dir / "checkpoints", config.keep_last)
        ranks.together(lambda: check_output(config.output_dir) if ranks.is_first else None)
        check_shared(config.output_dir, ranks)
        self.precision = ranks.together(lambda: choose_precision(config.precision, ranks.device))
        self.exporter = ranks.together(lambda: Exporter(config, ranks))
        seed_everything(config.seed, deterministic=config.deterministic)
        self.news = prepare_news(config, ranks, self.say)
        model = prepare_model(config, ranks, self.news.tokens)
        self.architecture, self.num_parameters = model.network.config, model.network.num_parameters()
        self.step = 0
        with self._explained(None):
            self.strategy = ranks.together(lambda: STRATEGIES[config.strategy](model, config, ranks, self.precision))
        self.place = self.strategy.place
        # Last of what can be refused: it may move an earlier run aside.
        resumed = find_resume_point(config, ranks, self.place, self.store, self.news.tokens.key, self.say)
        self.global_batch_size, self.accumulation = global_batch_size(config, self.place, resumed)
        timed = model if config.balance == "auto" else None
        self.balance = Balance(timed, ranks, self.place, self.accumulation / self.global_batch_size, self.say)
        lengths = self.news.tokens.train.lengths[self.news.train_index]
        self.sampler = LengthBucketSampler(lengths, self.global_batch_size, config.seed)
        self.total_steps = config.epochs * len(self.sampler)
        self.peak_learning_rate = scaled_learning_rate(config, self.place.size)
        self.epochs: list[EpochMetrics] = []
        self.epoch_loss = AverageMeter()
        self.epoch_seconds = 0.0
        self.skipped_steps = 0
        self.seconds_before = 0.0
        self.started = time.perf_counter()
        self.interruption = Interruption()
        if resumed:
            with self._explained(None):
                self._restore(resumed)

    def fit(self) -> Path | None:
        """Train to the end and write the model, or stop at a checkpoint when asked to.

        Returns:
            The model folder; None if the run was stopped and can go on.

        Raises:
            TrainingFailure: a non-finite loss, no memory, a lost rank, a full disk.
        """
        with contextlib.ExitStack() as stack:
            if self.ranks.is_first:
                self.config.run_dir.mkdir(parents=True, exist_ok=True)
            self.ranks.together(
                lambda: stack.enter_context(only_run_in(self.config.run_dir)) if self.ranks.is_first else None
            )
            stack.enter_context(self.interruption)
            stack.enter_context(contextlib.closing(self.exporter))
            self.exporter.starts(self.step, self.total_steps, self.epochs)
            self.log = None
            if self.ranks.is_first:
                write_whole(self.config.run_dir / "config.yaml", self.config.to_yaml().encode())
                self.log = stack.enter_context(contextlib.closing(RunLog(self.config.run_dir, self.step)))
                self.console.banner(describe_run(self))
            if self.step < self.total_steps and not self._train():
                self.say(f"Stopped at step {self.step}, all saved. To go on, start the same command again.")
                return None
            return finish_run(self)

    def say(self, text: str) -> None:
        """Print one line on rank 0."""
        if self.console:
            self.console.say(text)

    @property
    def seconds(self) -> float:
        """Time spent on this run so far, earlier sessions included."""
        return self.seconds_before + time.perf_counter() - self.started

    @property
    def best(self) -> EpochMetrics:
        """The epoch with the best validation accuracy so far."""
        return [epoch for epoch in self.epochs if epoch.is_best][-1]

    def _train(self) -> bool:
        """Run the steps that are left; returns whether all were run."""
        self.step_log = StepLog(self.ranks, self._describe_row)
        samples_done = (self.step // len(self.sampler)) * len(self.news.train_index)
        samples_done += self.step % len(self.sampler) * self.global_batch_size
        progress = (
            self.console.progress(total_steps=self.total_steps, first_step=self.step, samples_done=samples_done)
            if self.console
            else contextlib.nullcontext()
        )
        with progress as self.bar:
            while self.step < self.total_steps:
                if not self._train_epoch(epoch=self.step // len(self.sampler) + 1):
                    return False
        return True

    def _train_epoch(self, epoch: int) -> bool:
        self.sampler.set_epoch(epoch)
        resumed_at, began = self.step % len(self.sampler), time.perf_counter()
        seconds_before = self.epoch_seconds if resumed_at else 0.0
        if not resumed_at:
            self.epoch_loss = AverageMeter()
        for batch in islice(self.sampler, resumed_at, None):
            self._train_step(epoch, self.news.train_index[batch])
            self.epoch_seconds = seconds_before + time.perf_counter() - began
            is_last = self.step % len(self.sampler) == 0
            saves = bool(self.config.save_every) and self.step % self.config.save_every == 0
            stop = False
            if is_last or saves or self.ranks.device.type == "cpu" or self.step % self.config.log_every == 0:
                stop = self._flush()
            if not is_last and (saves or stop):
                self._save()
            if stop and not is_last:
                return False
        self._end_epoch(epoch)
        return not stop or self.step == self.total_steps

    def _train_step(self, epoch: int, batch: np.ndarray) -> None:
        tokens = self.news.tokens.train
        micro_batches = rank_share(
            tokens,
            batch,
            self.place,
            self.accumulation,
            pad_to_multiple_of=length_multiple(self.config, self.ranks.device.type),
            max_length=self.config.max_length,
            speeds=self.balance.speeds,
        )
        step = self.step + 1
        learning_rate = learning_rate_at(
            step, self.total_steps, self.peak_learning_rate, self.config.warmup, self.config.schedule
        )
        with self._explained(micro_batches[0].input_ids.shape):
            moved = [batch.to(self.ranks.device) for batch in micro_batches]
            result = self.strategy.step(moved, step, learning_rate)
            self.balance.step_done(micro_batches)
        if self.place.leads:
            self.exporter.trained_on(micro_batches)
        num_tokens = int(tokens.lengths[batch].sum())
        self.step_log.add(
            StepRecord(step, epoch, learning_rate, len(batch), num_tokens, rows_of(micro_batches), result)
        )
        self.step = step

    def _flush(self) -> bool:
        """Agree with all ranks on the last steps; returns whether one was asked to stop."""
        rows = [record.rows for record in self.step_log.records]
        with self._explained(None):
            metrics, skipped, stop = self.step_log.flush(self.seconds, self.interruption.asked)
        self.skipped_steps += skipped
        self.exporter.skipped(skipped)
        for step, count in zip(metrics, rows, strict=True):
            self.epoch_loss.update(step.loss, count)
            self.exporter.step_done(step, seconds=count / step.samples_per_second)
            if self.log and (step.step % self.config.log_every == 0 or step.step in (1, self.total_steps)):
                self.log.step(step)
        if self.console and metrics:
            self.bar.update(metrics[-1])
        return stop

    def _end_epoch(self, epoch: int) -> None:
        tokens = self.news.tokens
        with self._explained(None):
            validation, _ = evaluate(
                partial(self.strategy.logits, precision=self.precision),
                tokens.train,
                self.ranks,
                tokens.label_names,
                self.place,
                self.news.validation_index,
            )
        if not math.isfinite(validation["loss"]):
            raise TrainingFailure(
                f"epoch {epoch}: the validation loss is {validation['loss']}. The last checkpoint is good and stays; "
                "lower --learning_rate, then start again",
                quiet=not self.ranks.is_first,
            )
        is_best = all(validation["accuracy"] > past.validation["accuracy"] for past in self.epochs)
        metrics = EpochMetrics(epoch, self.step, self.epoch_loss.average, self.epoch_seconds, validation, is_best)
        self.epochs.append(metrics)
        self.exporter.epoch_done(metrics)
        if self.log:
            self.log.epoch(metrics)
            self.bar.epoch_table([metrics])
        self._save()

    def _save(self) -> None:
        began = time.perf_counter()
        best_step = self.best.step if self.epochs else None
        strategy = self.strategy.state_dict()
        if self.ranks.is_first:
            state = {
                "step": self.step,
                "strategy": strategy,
                # Order of rows, dropout and learning rate are functions of seed and step: no generator's state is kept.
                "seed": self.config.seed,
                "config": self.config.model_dump(mode="json"),
                "global_batch_size": self.global_batch_size,
                "peak_learning_rate": self.peak_learning_rate,
                "data_key": self.news.tokens.key,
                "epochs": [asdict(epoch) for epoch in self.epochs],
                "epoch_loss": [self.epoch_loss.total, self.epoch_loss.count],
                "epoch_seconds": self.epoch_seconds,
                "skipped_steps": self.skipped_steps,
                "seconds": self.seconds,
            }
            self.store.save(self.step, state, best_step)
        self.exporter.saved(time.perf_counter() - began)
        self.step_log.restart_clock()

    def _restore(self, resumed: Resumed) -> None:
        state = resumed.state
        self.step = state["step"]
        self.strategy.load_state_dict(state["strategy"])
        self.peak_learning_rate = state["peak_learning_rate"]
        self.epochs = [EpochMetrics(**epoch) for epoch in state["epochs"]]
        self.epoch_loss.total, self.epoch_loss.count = state["epoch_loss"]
        self.epoch_seconds = state["epoch_seconds"]
        self.skipped_steps = state["skipped_steps"]
        self.seconds_before = state["seconds"]

    @contextlib.contextmanager
    def _explained(self, shape: torch.Size | None) -> Iterator[None]:
        """Turn the errors of a step that a person can act on into one line."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(shape) from error
        except RuntimeError as error:
            text = str(error)
            if "can't allocate memory" in text:
                raise self._out_of_memory(shape) from error
            if any(sign in text for sign in ("Connection closed by peer", "Connection reset", "gloo", "NCCL")):
                raise TrainingFailure(
                    f"rank {self.ranks.rank}: another rank went away at step {self.step + 1}; its own error says why. "
                    "The last checkpoint stays: start the same command again to go on"
                ) from error
            raise

    def _out_of_memory(self, shape: torch.Size | None) -> TrainingFailure:
        size = f" with a micro-batch of {shape[0]} rows of {shape[1]} tokens" if shape else ""
        return TrainingFailure(
            f"rank {self.ranks.rank}: out of memory at step {self.step + 1}{size}; lower --batch_size and raise "
            "--gradient_accumulation by the same factor, or use --activation_checkpointing full or --strategy zero3"
        )

    def _describe_row(self, row: int) -> str:
        return f'; row {row} reads "{self.news.texts.train.texts[row][:80]}"' if self.news.texts else ""
