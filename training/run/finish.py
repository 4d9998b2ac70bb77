"""After the last step: test the best epoch once, write the model folder for serving and the report for people."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.commands import run_module
from common.errors import TrainingFailure, UserError, first_line
from common.files import write_csv
from common.model_folder import CLEANING_KEY
from common.problem_types import MULTI_LABEL, SINGLE_LABEL
from common.text import counted, in_one_line
from training.checkpointing import FinishedModel, write_model
from training.checkpointing.resume import find_shared_damage, list_checkpoints, open_checkpoint
from training.config import TrainConfig
from training.data.earlier import read_earlier, sources_of
from training.data.report import run_lengths
from training.data.teacher import notes_on_teachers
from training.evaluation.baseline import Baseline, measure_baseline, seconds_for_baseline
from training.evaluation.evaluator import ModelOnRanks, evaluate
from training.model.lora import merge_adapters
from training.model.window_attention import split_head
from training.monitoring import EpochMetrics
from training.monitoring.console import Outcome
from training.monitoring.events import RunTested
from training.monitoring.records import score_of
from training.monitoring.report import DoubtedText, ReportData, WrongText, write_report
from training.parallelism.strategy import Strategy
from training.publishing.model_card import recorded_name
from training.run.context import RunContext
from training.run.describe import describe_command, describe_environment
from training.run.extend import Change, measure_change
from training.run.hints import Evidence, hints_of, trust_in
from training.run.suspects import notes_on_suspects
from training.tasks.task import RowAnswer

# The page shows so many, each as long as a headline is, and none that would fill its field.
MOST_EXAMPLES, EXAMPLE_CHARACTERS, LONGEST_EXAMPLE = 6, 80, 300


def finish_run(context: RunContext) -> Path:
    """Test the weights of the best epoch, in fp32 if the strategy can, and write the model folder
    and the report.

    Without validation rows the last epoch takes the place of the best.
    """
    config = context.config
    if context.console:
        context.console.rest_of_epochs(context.state.epochs)
    if config.compress != "none":
        context.say(f"Layout: {context.strategy.describe()}")
    # 1. The best epoch's weights: those in memory if it was the last, otherwise from its
    # checkpoint.
    best = _load_best_or_fail(context)
    with context.strategy.averaged():
        return _test_and_write(context, best)


@dataclass(frozen=True)
class _Result:
    """What rank 0 knows about the finished model."""

    best: EpochMetrics
    test: dict[str, Any]
    answers: list[RowAnswer]  # to the test rows, in their order
    change: Change | None  # since the model that this run extends
    baseline: Baseline | None
    hints: list[str]


def _test_and_write(context: RunContext, best: EpochMetrics) -> Path:
    config, task, tokens = context.config, context.strategy.task, context.data.tokens
    # 2. Test once, on all ranks. Nothing was chosen by looking at the test rows, so the figure is
    # an honest one.
    test, logits = _test(context, best)
    change = (
        measure_change(config, context.ranks, tokens.test, logits) if config.from_model else None
    )
    # 3. Gather the whole weights on rank 0 (a collective call, so every rank is here), which writes
    # everything.
    weights = context.strategy.full_weights()
    context.events.publish(RunTested(context.state.step, test))
    if context.console:
        if config.lora:
            weights = merge_adapters(weights, config)
        answers = list(task.describe(logits, tokens.test.labels, best.validation))
        baseline = _baseline(context, best, logits)
        hints = hints_of(_evidence(context, test, answers, baseline)) if test["rows"] else []
        result = _Result(best, test, answers, change, baseline, hints)
        report = _write(context, result, weights)
        _show(context, result, report)
    # The other ranks wait: if they left first, a launcher could take the run for finished.
    context.ranks.barrier()
    return config.output_dir


def _test(context: RunContext, best: EpochMetrics) -> tuple[dict[str, Any], np.ndarray]:
    tokens, console, data_shard = context.data.tokens, context.console, context.strategy.data_shard
    if len(tokens.test):
        context.say(f"Testing epoch {best.epoch} on {counted(len(tokens.test), 'row')} ...")
    counting = (
        console.counting("testing", len(tokens.test)) if console else nullcontext(lambda rows: None)
    )
    with counting as count, context.phases("evaluate"):
        return evaluate(
            ModelOnRanks.of_run(context.strategy, context.strategy.test_precision),
            tokens.test,
            chosen=best.validation,
            on_batch=lambda rows: count(rows * data_shard.size),
            stops=context.stop_agreed,
        )


def _write(context: RunContext, result: _Result, weights: dict[str, torch.Tensor]) -> Path:
    """Write the model, the answers and the report; returns the report's path."""
    config, task, metrics = context.config, context.strategy.task, _metrics(context, result)
    try:
        finished = FinishedModel(
            context.model_config,
            _finished(weights, context.strategy),
            context.data.tokenizer,
            metrics,
            {CLEANING_KEY: config.clean, **task.settings(result.best.validation)},
            type(task),
            None if config.is_language_model else context.data.seen_texts(),
        )
        write_model(finished, config.output_dir)
        if task.has_labels:
            _write_predictions(context, result.answers)
        doubted = _doubted_texts(context)
        if context.suspects:
            _write_suspects(context, doubted)
        return write_report(config.run_dir, _report_data(context, result, doubted))
    except OSError as error:
        raise TrainingFailure(
            f"the model could not be written ({error}); nothing is lost, the checkpoints in "
            f"{config.run_dir} "
            f"are complete: free some space, then {config.how_to_resume}",
            code="model-not-saved",
        ) from error


def _metrics(context: RunContext, result: _Result) -> dict[str, Any]:
    """What metrics.json tells about the model."""
    config, task, state = context.config, context.strategy.task, context.state
    test, start = result.test, context.plan.start
    return {
        "task": config.task,
        **({"dataset": recorded_name(context.data.tokens.name)} if config.dataset else {}),
        "text_column": config.text_column,
        **({"label_column": config.label_column} if task.has_labels else {}),
        **asdict(config.selection),
        **({"pair_column": config.columns.pair} if config.columns.pair else {}),
        # With these the same rows are test rows again, also of data that has none of its own.
        "seed": config.seed,
        "bad_rows": config.bad_rows,
        "base_model": recorded_name(config.model),
        "max_length": config.max_length,
        "best_epoch": result.best.epoch,
        "method": config.method,
        **({"fitted_head": asdict(start)} if start else {}),
        "created": datetime.now(UTC).date().isoformat(),
        **({"version": config.model_version} if config.model_version else {}),
        "train_rows": len(context.data.train_index) if config.dataset else 0,
        **_distilled_from(context),
        "rows_left_out": context.data.texts.left_out + len(state.bad.excluded_rows),
        "test": test,
        "test_precision": context.strategy.test_precision,
        "validation": result.best.validation or None,
        **({"baseline": result.baseline.to_plain()} if result.baseline else {}),
        **({"learned_before": sources_of(read_earlier(config))} if config.from_model else {}),
        **({"earlier": asdict(result.change)} if result.change else {}),
        **({"hints": result.hints} if result.hints else {}),
        **_examples(context, result.answers),
    }


def _show(context: RunContext, result: _Result, report: Path) -> None:
    config, start = context.config, context.plan.start
    outcome = Outcome(
        seconds=context.state.seconds,
        best_epoch=result.best.epoch,
        by_folds=start.by_folds if start else "",
        validation=result.best.validation,
        test=result.test,
        baseline=str(result.baseline or ""),
        earlier_labels=result.change.in_words if result.change else "",
        hints=[*trust_in(start, has_test=bool(result.test["rows"])), *result.hints],
        model_folder=config.output_dir,
        checkpoint_file=config.checkpoint_file if context.strategy.task.has_labels else None,
        report=report,
        exports=config.export,
    )
    context.console.finish(outcome)


def _baseline(context: RunContext, best: EpochMetrics, logits: np.ndarray) -> Baseline | None:
    """What a linear model makes of the same rows, on rank 0, which has the texts; None if there is none."""
    config, task = context.config, context.strategy.task
    if not task.has_labels or not len(context.data.tokens.test):
        return None
    seconds = seconds_for_baseline(config, context.data)
    if not seconds:
        flag = (
            f"--budget {config.budget}"
            if config.budget
            else f"--collective_timeout {config.collective_timeout:g}"
        )
        context.say(f"No linear baseline: {flag} leaves no time for one")
        return None
    weights, heartbeat = context.plan.class_weights, context.phases.heartbeat
    try:
        return measure_baseline(
            config, context.data, task, weights, logits, best.validation, heartbeat
        )
    except (
        Exception
    ) as error:  # such as texts without words: whatever it is, the trained model is worth more
        context.say(f"No linear baseline: {first_line(error)}")
        return None


def _evidence(
    context: RunContext,
    test: dict[str, Any],
    answers: Sequence[RowAnswer],
    baseline: Baseline | None,
) -> Evidence:
    config, tokens, task = context.config, context.data.tokens, context.strategy.task
    chance_loss, confidence = None, None
    # With a loss of the user's own nobody knows what a guess costs, and its scores may be no logits.
    if not task.own_loss:
        chance_loss = task.chance_loss(tokens.train.labels[context.data.labelled_index])
        if chance_loss and (
            context.plan.class_weights is not None or config.sampling == "balanced"
        ):
            # Weighted or balanced, the labels count alike in training, so the guess is an even one.
            chance_loss = math.log(len(tokens.label_names))
        # A teacher may be unsure and be right, and a student learns both from it.
        if "accuracy" in test and task.has_labels and not config.is_distilled:
            confidence = float(np.mean([answer.certainty for answer in answers]))
    return Evidence(
        config=config,
        learning_rate=context.plan.peak_learning_rate,
        epochs=context.state.epochs,
        test=test,
        chance_loss=chance_loss,
        confidence=confidence,
        baseline=baseline,
        share_cut=tokens.num_cut / tokens.num_texts if tokens.num_texts else 0.0,
    )


def _distilled_from(context: RunContext) -> dict[str, Any]:
    if not context.config.is_distilled:
        return {}
    names = ",".join(map(recorded_name, context.config.teachers))
    return {"distilled_from": names, "unlabelled_rows": context.data.num_unlabelled}


def _examples(context: RunContext, answers: Sequence[RowAnswer]) -> dict[str, Any]:
    config = context.config
    has_classes = context.strategy.task.problem_type in (SINGLE_LABEL, MULTI_LABEL)
    if not config.examples or not has_classes or config.columns.pair:
        return {}
    examples = examples_by_label(map(in_one_line, context.data.texts.test.texts), answers)
    return {"examples": examples} if examples else {}


def examples_by_label(texts: Iterable[str], answers: Iterable[RowAnswer]) -> dict[str, str]:
    """One short test text per label, which the server's page offers to its visitors."""
    found: dict[str, tuple[bool, int, str]] = {}
    for text, answer in zip(texts, answers, strict=True):
        # Those that the model answers right first, then the one nearest to the length of a headline.
        rank = (answer.surprise > 0, abs(len(text) - EXAMPLE_CHARACTERS), text)
        if len(text) <= LONGEST_EXAMPLE:
            found[answer.label] = min(rank, found.get(answer.label, rank))
    return {label: found[label][-1] for label in sorted(found)[:MOST_EXAMPLES]}


def export_model(config: TrainConfig) -> None:
    """Export the model that a run has written, with the limits and the rows that the command has by
    default.

    Raises:
        UserError: it was refused, or failed.
    """
    flag = f"--export: the model in {config.output_dir} is complete and is kept"
    print(f"--export: python -m inference.export {shlex.quote(str(config.output_dir))}", flush=True)
    run_module("inference.export", [str(config.output_dir)], flag, print)


def _load_best_or_fail(context: RunContext) -> EpochMetrics:
    try:
        return _load_best(context)
    except UserError as error:  # the flags were right until here: a launcher may try again
        raise TrainingFailure(str(error), quiet=error.quiet, code=error.code) from error


def _load_best(context: RunContext) -> EpochMetrics:
    """Load the weights of the best epoch whose checkpoint is still there and undamaged."""
    ranks, state = context.ranks, context.state
    paths = list_checkpoints(ranks, context.storage)
    # Best first, and the later of two that scored the same. The last epoch's weights are still in
    # memory; those of others may have been pruned or damaged.
    metric, validated = context.config.best_metric, bool(state.epochs[-1].validation)

    def preference(epoch: EpochMetrics) -> tuple[float, int]:
        return (score_of(epoch.validation, metric) if validated else 0.0, epoch.step)

    for epoch in sorted(state.epochs, key=preference, reverse=True):
        if epoch.step == state.step:
            break
        path = paths.get(epoch.step)
        damage = find_shared_damage(path, ranks) if path else "is missing"
        if damage is None:
            saved = open_checkpoint(path, ranks).tensors
            ranks.run_on_all_ranks(lambda saved=saved: context.strategy.load_weights(saved))
            break
        context.say(
            f"Skipping epoch {epoch.epoch}, although it scored best: {path or 'its checkpoint'} "
            f"{damage}"
        )
    return epoch


def _report_data(
    context: RunContext, result: _Result, doubted: Sequence[DoubtedText]
) -> ReportData:
    config, data, task = context.config, context.data, context.strategy.task
    figures, configuration = {**data.figures}, config.model_dump(mode="json")
    if config.dataset and not config.is_language_model:
        figures["tokens"] = run_lengths(data.tokens, config)
    return ReportData(
        title=f"{_short(config.model)} on {_short(config.dataset or 'names of labels')}",
        command=describe_command(context.ranks),
        configuration=configuration,
        changed={name: configuration[name] for name in configuration if config.is_changed(name)},
        environment=describe_environment(context.ranks),
        test=result.test,
        baseline=result.baseline and result.baseline.tile,
        wrong_texts=[
            WrongText(in_one_line(text), answer, task.certainty)
            for text, answer in zip(data.texts.test.texts, result.answers, strict=task.has_labels)
            if answer.surprise
        ],
        doubted_texts=[text for text in doubted if text.is_flagged],
        notes=_notes(context, result),
        seconds=context.state.seconds,
        model_folder=str(config.output_dir),
        figures=figures,
    )


def _short(name: str) -> str:
    """A model or dataset in a title: of a path the last part, a name on the hub as it is."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name


def _notes(context: RunContext, result: _Result) -> list[str]:
    """What a reader of the report should know, told by each part of the run."""
    config, tokens, plan, change = context.config, context.data.tokens, context.plan, result.change
    blocks = (
        f"Rows are blocks of {config.max_length} tokens, into which all texts of a split were "
        "joined."
    )
    return [
        *result.hints,
        *tokens.notes,
        *([f"Labels of {change.model}: {change.in_words}."] if change else []),
        *trust_in(plan.start, has_test=bool(result.test["rows"])),
        *([blocks] if config.is_language_model else []),
        *context.strategy.notes(),
        *plan.notes(tokens.label_names),
        *context.state.notes(config),
        *notes_on_teachers(config, context.data.num_unlabelled),
        *notes_on_suspects(config),
    ]


def _write_predictions(context: RunContext, answers: Sequence[RowAnswer]) -> None:
    """Write the model's answer to each test row, in their order, to ``predictions.csv`` in the run folder."""
    header = ["row", "label", "predicted", context.strategy.task.certainty, "text"]
    rows = (
        [row, answer.label, answer.predicted, f"{answer.certainty:.6f}", in_one_line(text)]
        for row, (answer, text) in enumerate(
            zip(answers, context.data.texts.test.texts, strict=True)
        )
    )
    write_csv(context.config.run_dir / "predictions.csv", header, rows)


def _doubted_texts(context: RunContext) -> list[DoubtedText]:
    names, texts = context.data.tokens.label_names, context.data.texts.train.texts
    return [
        DoubtedText(
            one.row,
            names[one.label],
            names[one.proposed],
            one.doubt,
            one.is_flagged,
            in_one_line(texts[one.row]),
        )
        for one in (context.suspects.ranking() if context.suspects else ())
    ]


def _write_suspects(context: RunContext, doubted: Sequence[DoubtedText]) -> None:
    """Write the training rows whose label the run disbelieves, the most suspicious first, to ``suspects.csv``."""
    header = ["row", "label", "proposed", "doubt", "flagged", "text"]
    rows = (
        [
            one.row,
            one.label,
            one.proposed,
            f"{one.doubt:.6f}",
            "yes" if one.is_flagged else "no",
            one.text,
        ]
        for one in doubted
    )
    write_csv(context.config.run_dir / "suspects.csv", header, rows)


def _finished(weights: dict[str, torch.Tensor], strategy: Strategy) -> dict[str, torch.Tensor]:
    """The weights to write, the last layer as the task finishes it."""
    weight, bias = (f"network.{strategy.head}.{name}" for name in ("weight", "bias"))
    if weight not in weights:
        return weights
    if not strategy.task.keeps_head:
        return {name: tensor for name, tensor in weights.items() if name not in (weight, bias)}
    # In training the attention of windows is one more row of the last layer. It is taken off before
    # the task finishes the rows of the labels.
    if strategy.config.long == "windows":
        weights = split_head(weights, strategy.head)
    finished = dict(
        zip((weight, bias), strategy.task.finish(weights[weight], weights.get(bias)), strict=True)
    )
    return weights | {name: tensor for name, tensor in finished.items() if tensor is not None}
