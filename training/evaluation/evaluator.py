"""Evaluation on all ranks: every row counted exactly once, whatever their number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.errors import UserError
from common.model_folder import SavedModel, read_saved_model
from common.rows import AG_NEWS_LABELS, Columns
from common.text import cleaner
from common.windows import pool
from training.config import Selection, TrainConfig
from training.data.batching import DataShard, pad
from training.data.dataset import LoadOptions, Rows, TextData, load_data
from training.data.tokenized import TokenizedRows, encode_rows
from training.distributed.ranks import Ranks
from training.evaluation.robustness import measure_robustness
from training.model.classifier import NewsClassifier
from training.monitoring import Console
from training.publishing.model_card import recorded_name
from training.quiet import quiet_libraries
from training.tasks import TASK_OF_PROBLEM, Task

if TYPE_CHECKING:
    from training.parallelism.strategy import Strategy

ROUNDS_BETWEEN_ASKING = 4
# The seed of what a task draws for an evaluation: the same in each.
EVALUATION = (5,)


class EvaluationStopped(Exception):
    """An evaluation was interrupted because the run is stopping; raised on all ranks after the same
    batch.
    """


@dataclass(frozen=True)
class ModelOnRanks:
    """A model that can be evaluated, and the ranks that hold it.

    ``logits_of``: from ids and mask, (batch, seq) on this rank's device, to what the function
    ``finish``, its third argument, makes of the scores of the batch: (batch,
    :attr:`Task.num_scores`); of a model that reads windows, with the attention's output.
    ``data_shard``: which share of the batches this rank takes.
    """

    logits_of: Callable[..., torch.Tensor]
    task: Task
    ranks: Ranks
    data_shard: DataShard

    @classmethod
    def of_run(cls, strategy: Strategy, precision: str) -> ModelOnRanks:
        """The model that is being trained, distributed as its strategy does it."""
        logits_of = partial(strategy.logits, precision=precision)
        return cls(logits_of, strategy.task, strategy.ranks, strategy.data_shard)

    @classmethod
    def whole(cls, saved: SavedModel, ranks: Ranks) -> ModelOnRanks:
        """A model that was written earlier: each rank holds all of it, in fp32."""
        model = NewsClassifier.from_saved(saved).to(ranks.device).eval()

        @torch.inference_mode()
        def logits_of(
            input_ids: torch.Tensor,
            mask: torch.Tensor | None,
            finish: Callable[[torch.Tensor], torch.Tensor],
        ) -> torch.Tensor:
            return finish(model(input_ids, mask))

        return cls(logits_of, model.task, ranks, DataShard(ranks.rank, ranks.world_size))

    def scores(self, rows: TokenizedRows, batch: np.ndarray) -> np.ndarray:
        """What an evaluation keeps of these rows of the split: (rows, :attr:`Task.num_scores`)."""
        device = self.ranks.device
        input_ids, mask = pad(rows, batch, int(rows.input_lengths(batch).max()))
        labels = torch.from_numpy(rows.labels[batch])
        # A masked language model hides tokens in the ids; what it hid are the targets.
        asked, targets = self.task.inputs_and_targets(input_ids, mask, labels, batch, EVALUATION)
        # Scores over a vocabulary are gigabytes, so the task sums them up before they leave the
        # device.
        finish = partial(self.task.summary, targets=targets.to(device))
        mask = None if mask is None else mask.to(device)
        scores = self.logits_of(asked.to(device), mask, finish=finish).float().cpu().numpy()
        if rows.window:  # (windows of all rows, ...) -> (rows, ...)
            scores, _ = pool(scores, rows.num_inputs(batch))
        return scores


def evaluate(
    model: ModelOnRanks,
    rows: TokenizedRows,
    index: np.ndarray | None = None,
    *,
    chosen: Mapping[str, Any] | None = None,
    on_batch: Callable[[int], None] = lambda rows: None,
    stops: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], np.ndarray]:
    """Answer rows and measure the result; a collective call.

    The batches do not depend on the number of ranks. They are dealt out one by one, and every row
    counts once.

    Args:
        index: which rows of the split; by default all.
        chosen: the evaluation on which was chosen what this one uses, such as thresholds; None to
        choose here.
        on_batch: called with the number of rows of each batch that this rank finishes.
        stops: whether to give up; called every few batches by all ranks together, with the same
        answer on all.

    Returns:
        On every rank, the task's metrics and the scores, float32 (rows, :attr:`Task.num_scores`),
        in the order of ``index``.

    Raises:
        EvaluationStopped: ``stops`` returned true.
    """
    task, shard = model.task, model.data_shard
    index = np.arange(len(rows)) if index is None else index
    scores = np.zeros((len(index), task.num_scores), dtype=np.float32)
    if not len(index):
        return {"rows": 0, "labels": list(task.label_names)}, scores
    batches, results = _batches(rows, index, task.rows_at_once), []
    for number, first in enumerate(range(0, len(batches), shard.size)):
        if number % ROUNDS_BETWEEN_ASKING == 0 and stops():
            raise EvaluationStopped
        # Ranks that shard a model gather it together, so a rank without a batch takes part in the
        # others'.
        has_batch = first + shard.rank < len(batches)
        batch = batches[first + shard.rank] if has_batch else batches[-1][:1]
        part = model.scores(rows, index[batch])
        if has_batch:
            results.append(part)
            on_batch(len(batch))
    # Put every row's scores back where the row was, on every rank. Ranks of the same replica have
    # computed the same, so one of them hands it over.
    own = results if shard.is_replica_leader else []
    for rank, parts in model.ranks.gather((shard.rank, own)):
        for batch, part in zip(batches[rank :: shard.size], parts, strict=False):
            scores[batch] = part
    return task.measure(scores, rows.labels[index], chosen), scores


def _batches(rows: TokenizedRows, index: np.ndarray, rows_at_once: int) -> list[np.ndarray]:
    """Positions in ``index``, batch by batch; data rank r of n takes the batches r, r + n, r + 2n,
    ...
    """
    # Rows of similar length share a batch, so little is padded.
    order = np.argsort(rows.lengths[index], kind="stable")
    # By the number of the row's last input, so a row's windows stay together.
    batch_of = (np.cumsum(rows.num_inputs(index[order])) - 1) // rows_at_once
    return np.split(order, np.flatnonzero(np.diff(batch_of)) + 1)


def evaluate_saved(
    path: Path,
    dataset: str | None,
    ranks: Ranks,
    columns: tuple[str | None, str | None, str | None] = (None, None, None),
    *,
    quiet: bool = False,
    robustness: bool = False,
) -> dict[str, Any]:
    """Evaluate a model folder or ``.pt`` file on a dataset's test rows, in fp32; ``robustness``: on
    rough texts, too.

    Dataset and columns are by default those that the model was trained on, and so are the test rows
    that were set aside if the data has none. Of other data without test rows, all rows are
    evaluated.

    Raises:
        UserError: model or data cannot be read, or their labels differ.
    """
    quiet_libraries()
    show = ranks.is_first and not quiet

    def read() -> tuple[SavedModel, TextData]:
        saved = read_saved_model(path)
        return saved, _read_data(saved, dataset, columns, show_notes=show)

    def prepare() -> tuple[ModelOnRanks, Rows]:
        model = ModelOnRanks.whole(saved, ranks)
        return model, _relabelled(data, model.task)

    saved, data = ranks.run_on_all_ranks(read)
    model, rows = ranks.run_on_all_ranks(prepare)
    tokenizer = saved.tokenizer()

    def answer(rows: Rows) -> dict[str, Any]:
        tokens = encode_rows(tokenizer, rows)
        silent = nullcontext(lambda rows: None)
        with Console().counting("evaluating", len(tokens)) if show else silent as count:
            metrics, _ = evaluate(
                model,
                tokens,
                chosen={"thresholds": saved.thresholds},
                # Only rank 0 shows its progress; the others are about as far.
                on_batch=lambda rows: count(rows * ranks.world_size),
            )
        return metrics

    found = {"model": str(path), "dataset": data.name, **answer(rows)}
    if robustness:
        found["robustness"] = measure_robustness(rows, answer, cleaner(saved.cleaning))
    return found


def _read_data(
    saved: SavedModel,
    dataset: str | None,
    columns: tuple[str | None, str | None, str | None],
    *,
    show_notes: bool,
) -> TextData:
    """The data, with the rows to evaluate as its test rows; read as for training, apart from what
    is given.
    """
    recorded = saved.metadata
    name = dataset or recorded.get("dataset")
    if name is None:
        raise UserError(
            f"{saved.path}: does not say what it was trained on; name the data with --dataset",
            code="data-not-found",
        )
    say = partial(print, file=sys.stderr)
    seed, bad_rows = (
        recorded.get(flag, getattr(TrainConfig(), flag)) for flag in ("seed", "bad_rows")
    )
    options = LoadOptions(
        seed=seed,
        bad_rows=bad_rows,
        columns=_columns(recorded, columns),
        # Revision, splits and so on of the dataset that it was trained on fit no other.
        selection=Selection() if dataset else _selection(recorded),
        task=TASK_OF_PROBLEM[saved.problem_type.name],
        # Numbers without a header mean AG News' classes to a model that answers with these.
        class_names=AG_NEWS_LABELS if set(saved.labels) <= set(AG_NEWS_LABELS) else None,
    )
    data = load_data(name, options, say)
    if not data.has_test_rows and recorded_name(name) != recorded.get("dataset"):
        # The model has seen none of these rows. A share that was just set aside would be a part of
        # them for nothing.
        labels = np.concatenate([data.train.labels, data.test.labels])
        return replace(data, test=Rows([*data.train.texts, *data.test.texts], labels))
    for note in data.notes if show_notes else ():
        say(note[0].upper() + note[1:])
    return data


def _columns(
    recorded: Mapping[str, Any], given: tuple[str | None, str | None, str | None]
) -> Columns:
    usual = (("text_column", "text"), ("label_column", "label"), ("pair_column", ""))
    names = (
        name or str(recorded.get(flag, default))
        for name, (flag, default) in zip(given, usual, strict=True)
    )
    return Columns(*names)


def _selection(recorded: Mapping[str, Any]) -> Selection:
    known = {field.name: recorded.get(field.name) for field in fields(Selection)}
    return Selection(**{flag: str(value) for flag, value in known.items() if value})


def _relabelled(data: TextData, task: Task) -> Rows:
    try:
        return Rows(data.test.texts, task.renamed(data.test.labels, data.label_names))
    except ValueError as error:
        raise UserError(f"--dataset {data.name}: {error}", code="label-unknown") from error
