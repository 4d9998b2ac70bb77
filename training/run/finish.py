"""After the last step: the best epoch is tested once, and written for serving and for reading."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import TrainingFailure, UserError
from training.checkpointing import write_model
from training.checkpointing.resume import find_shared_damage, list_checkpoints, open_checkpoint
from training.evaluation.evaluator import evaluate
from training.evaluation.metrics import log_softmax
from training.monitoring import EpochMetrics, ReportData, WrongText, write_report
from training.publishing.model_card import recorded_name
from training.run.describe import describe_environment

if TYPE_CHECKING:
    from training.run.trainer import Trainer

MOST_WRONG = 20


def finish_run(trainer: Trainer) -> Path:
    """Test the best epoch's weights, in fp32 where the strategy can, and write the model folder and the report.

    Returns:
        The model folder.
    """
    config, tokens = trainer.config, trainer.news.tokens
    if trainer.console:
        trainer.console.rest_of_epochs(trainer.state.epochs)
    if config.compress != "none":
        trainer.say(f"Layout: {trainer.strategy.describe()}")
    best = _take_best(trainer)
    trainer.say(f"Testing epoch {best.epoch} on {len(tokens.test):,} rows ...")
    console, place = trainer.console, trainer.strategy.place
    counting = console.counting("testing", len(tokens.test)) if console else nullcontext(lambda rows: None)
    with counting as count, trainer.phases("evaluate"):
        test, logits = evaluate(
            partial(trainer.strategy.logits, precision=trainer.strategy.test_precision),
            tokens.test,
            trainer.ranks,
            tokens.label_names,
            place,
            on_batch=lambda rows: count(rows * place.size),
            stops=trainer.stop_agreed,
        )
    weights = trainer.strategy.full_weights()
    if trainer.ranks.is_first:
        trainer.log.test(test)
        metrics = {
            "dataset": recorded_name(tokens.name),
            "text_column": config.text_column,
            "label_column": config.label_column,
            "base_model": recorded_name(config.model),
            "max_length": config.max_length,
            "best_epoch": best.epoch,
            "created": datetime.now(UTC).date().isoformat(),
            "train_rows": len(trainer.news.train_index),
            "rows_left_out": trainer.news.texts.left_out + len(trainer.state.bad.excluded_rows),
            "test": test,
            "test_precision": trainer.strategy.test_precision,
            "validation": best.validation,
        }
        try:
            write_model(
                trainer.architecture,
                weights,
                trainer.news.tokenizer,
                metrics,
                config.output_dir,
                config.checkpoint_file,
                config.clean,
            )
            report = write_report(config.run_dir, _report_data(trainer, test, logits))
        except OSError as error:
            raise TrainingFailure(
                f"the model could not be written ({error}); nothing is lost: the checkpoints in {config.run_dir} are "
                "whole, make room and start the same command again"
            ) from error
        trainer.console.finish(
            seconds=trainer.state.seconds,
            best_epoch=best.epoch,
            validation_accuracy=best.validation["accuracy"],
            test=test,
            model_folder=config.output_dir,
            checkpoint_file=config.checkpoint_file,
            report=report,
        )
    trainer.ranks.barrier()
    return config.output_dir


def _take_best(trainer: Trainer) -> EpochMetrics:
    try:
        return _load_best(trainer)
    except UserError as error:  # the flags were right until here: a launcher may try again
        raise TrainingFailure(str(error), quiet=error.quiet) from error


def _load_best(trainer: Trainer) -> EpochMetrics:
    """Take the weights of the best epoch that can be had; a checkpoint may have suffered, or be gone."""
    ranks, state = trainer.ranks, trainer.state
    paths = list_checkpoints(ranks, trainer.storage)
    for epoch in sorted(state.epochs, key=lambda epoch: -epoch.validation["accuracy"]):
        if epoch.step == state.step:
            break
        path = paths.get(epoch.step)
        damage = find_shared_damage(path, ranks) if path else "is gone"
        if damage is None:
            saved = open_checkpoint(path, ranks).tensors
            ranks.together(lambda saved=saved: trainer.strategy.load_weights(saved))
            break
        trainer.say(f"Passing over epoch {epoch.epoch}, as good as it was: {path or 'its checkpoint'} {damage}")
    return epoch


def _report_data(trainer: Trainer, test: dict[str, Any], logits: np.ndarray) -> ReportData:
    tokens = trainer.news.tokens
    cut = f"{tokens.num_cut:,} of {tokens.num_texts:,} texts were cut at {trainer.config.max_length} tokens."
    notes = [*tokens.notes, cut]
    if trainer.strategy.test_precision != "fp32":
        notes.append(f"The test ran in {trainer.strategy.test_precision}, in which shared-out weights are gathered.")
    notes.append(f"Layout: {trainer.strategy.describe()}.")
    if trainer.state.skipped_steps:
        notes.append(f"The loss scale skipped {trainer.state.skipped_steps} steps.")
    if trainer.state.bad.total:
        notes.append(f"{trainer.state.bad.total} steps were skipped, since loss or gradient was not finite.")
    if excluded := trainer.state.bad.excluded_rows:
        notes.append(f"After too many such steps in a row, {len(excluded)} training rows were left out.")
    return ReportData(
        title=trainer.config.output_dir.name,
        configuration=trainer.config.model_dump(mode="json"),
        environment=describe_environment(trainer.ranks),
        test=test,
        wrong_texts=_most_wrong(trainer, logits),
        notes=notes,
        seconds=trainer.state.seconds,
        model_folder=str(trainer.config.output_dir),
    )


def _most_wrong(trainer: Trainer, logits: np.ndarray) -> list[WrongText]:
    """The texts whose wrong answer the model was surest of, surest first."""
    tokens, texts = trainer.news.tokens, trainer.news.texts
    probabilities = np.exp(log_softmax(logits))
    predicted = probabilities.argmax(axis=1)
    confidence = probabilities.max(axis=1)
    wrong = np.flatnonzero(predicted != tokens.test.labels)
    surest = wrong[np.argsort(-confidence[wrong], kind="stable")][:MOST_WRONG]
    names = tokens.label_names
    return [
        WrongText(texts.test.texts[i], names[tokens.test.labels[i]], names[predicted[i]], float(confidence[i]))
        for i in surest
    ]
