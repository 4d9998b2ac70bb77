"""Evaluation on all ranks: every row counted exactly once, whatever their number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import UserError
from common.model_folder import SavedModel, read_saved_model
from common.rows import AG_NEWS_LABELS, Columns
from common.text import cleaner
from common.windows import pool
from training.config import Selection, TrainConfig
from training.data.batching import DataShard, pad
from training.data.dataset import NewsData, Rows, load_news
from training.data.tokenized import TokenizedRows, encode_rows
from training.distributed.ranks import Ranks
from training.evaluation.robustness import measure_robustness
from training.model.classifier import NewsClassifier
from training.monitoring import Console
from training.publishing.model_card import recorded_name
from training.quiet import quiet_libraries
from training.tasks import TASK_OF_PROBLEM, Task

ROUNDS_BETWEEN_ASKING = 4
# The seed of what a task draws for an evaluation: the same in each.
EVALUATION = (5,)


class EvaluationStopped(Exception):
    """An evaluation was interrupted because the run is stopping; raised on all ranks after the same batch."""


def evaluate(
    logits_of: Callable[..., torch.Tensor],
    rows: TokenizedRows,
    ranks: Ranks,
    task: Task,
    data_shard: DataShard,
    index: np.ndarray | None = None,
    chosen: Mapping[str, Any] | None = None,
    on_batch: Callable[[int], None] = lambda rows: None,
    stops: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], np.ndarray]:
    """Answer rows and measure the result; a collective call.

    The batches do not depend on the number of ranks. They are dealt out one by one, and every row counts once.

    Args:
        logits_of: from ids and mask, (batch, seq) on this rank's device, to what the function ``finish``, its third
            argument, makes of the scores of the batch: (batch, :attr:`Task.num_scores`); of a model that reads windows,
            with the attention's output.
        index: which rows of the split; by default all.
        chosen: the evaluation on which was chosen what this one uses, such as thresholds; None to choose here.
        on_batch: called with the number of rows of each batch that this rank finishes.
        stops: whether to give up; called every few batches by all ranks together, with the same answer on all.

    Returns:
        On every rank, the task's metrics and the scores, float32 (rows, :attr:`Task.num_scores`), in the order of
        ``index``.

    Raises:
        EvaluationStopped: ``stops`` returned true.
    """
    index = np.arange(len(rows)) if index is None else index
    if not len(index):
        return {"rows": 0, "labels": list(task.label_names)}, np.zeros(
            (0, task.num_scores), np.float32
        )
    # Rows of similar length share a batch, so little is padded. Rank r of n takes the batches r, r + n, r + 2n, ...
    order = np.argsort(rows.lengths[index], kind="stable")
    batch_of = (
        np.cumsum(rows.num_inputs(index[order])) - 1
    ) // task.rows_at_once  # a row's windows stay together
    batches = np.split(order, np.flatnonzero(np.diff(batch_of)) + 1) if len(order) else []
    results = []
    for number, first in enumerate(range(0, len(batches), data_shard.size)):
        if number % ROUNDS_BETWEEN_ASKING == 0 and stops():
            raise EvaluationStopped
        # Ranks that shard a model gather it together, so a rank without a batch takes part in the others'.
        has_batch = first + data_shard.rank < len(batches)
        batch = batches[first + data_shard.rank] if has_batch else batches[-1][:1]
        own = index[batch]
        input_ids, attention_mask = pad(rows, own, int(rows.input_lengths(own).max()))
        mask = None if attention_mask is None else attention_mask.to(ranks.device)
        input_ids, targets = task.ask(
            input_ids, attention_mask, torch.from_numpy(rows.labels[own]), own, EVALUATION
        )
        finish = partial(task.summary, targets=targets.to(ranks.device))
        part = logits_of(input_ids.to(ranks.device), mask, finish=finish).float().cpu().numpy()
        if rows.window:
            part, _ = pool(part, rows.num_inputs(own))
        if has_batch:
            results.append(part)
            on_batch(len(batch))
    # Put every row's logits back where the row was, on every rank.
    logits = np.zeros((len(index), task.num_scores), dtype=np.float32)
    for number, parts in ranks.gather(
        (data_shard.rank, results if data_shard.is_replica_leader else [])
    ):
        for batch, part in zip(batches[number :: data_shard.size], parts, strict=False):
            logits[batch] = part
    return task.measure(logits, rows.labels[index], chosen), logits


def evaluate_saved(
    path: Path,
    dataset: str | None,
    ranks: Ranks,
    columns: tuple[str | None, str | None, str | None] = (None, None, None),
    *,
    quiet: bool = False,
    robustness: bool = False,
) -> dict[str, Any]:
    """Evaluate a model folder or ``.pt`` file on a dataset's test rows, in fp32; ``robustness``: on rough texts, too.

    Dataset and columns are by default those that the model was trained on, and so are the test rows that were set aside
    if the data has none. Of other data without test rows, all rows are evaluated.

    Raises:
        UserError: model or data cannot be read, or their labels differ.
    """
    quiet_libraries()

    def read() -> tuple[SavedModel, NewsData]:
        saved = read_saved_model(path)
        name = dataset or saved.metadata.get("dataset")
        if name is None:
            raise UserError(
                f"{path}: does not say what it was trained on; name the data with --dataset",
                code="data-not-found",
            )
        text, label, pair = columns
        text = text or str(saved.metadata.get("text_column", "text"))
        label = label or str(saved.metadata.get("label_column", "label"))
        pair = pair or str(saved.metadata.get("pair_column", ""))
        task = TASK_OF_PROBLEM[saved.problem_type.name]
        # Those of the dataset that it was trained on fit no other.
        known = (
            {}
            if dataset
            else {field.name: saved.metadata.get(field.name) for field in fields(Selection)}
        )
        selection = Selection(**{name: str(value) for name, value in known.items() if value})
        say = partial(print, file=sys.stderr)
        seed, bad_rows = (
            saved.metadata.get(flag, getattr(TrainConfig(), flag)) for flag in ("seed", "bad_rows")
        )
        # Numbers without a header mean AG News' classes to a model that answers with these.
        names = AG_NEWS_LABELS if set(saved.labels) <= set(AG_NEWS_LABELS) else None
        data = load_news(
            name,
            seed,
            bad_rows,
            Columns(text, label, pair),
            say,
            selection,
            task,
            class_names=names,
        )
        if not data.has_test_rows and recorded_name(name) != saved.metadata.get("dataset"):
            texts, labels = (
                [*data.train.texts, *data.test.texts],
                np.concatenate([data.train.labels, data.test.labels]),
            )
            return saved, replace(data, test=Rows(texts, labels))
        for note in data.notes if ranks.is_first and not quiet else ():
            say(note[0].upper() + note[1:])
        return saved, data

    def prepare() -> tuple[NewsClassifier, Rows]:
        model = NewsClassifier.from_saved(saved).to(ranks.device).eval()
        return model, _relabelled(data, model.task)

    saved, data = ranks.run_on_all_ranks(read)
    model, rows = ranks.run_on_all_ranks(prepare)
    tokenizer, show = saved.tokenizer(), ranks.is_first and not quiet

    def answer(rows: Rows) -> dict[str, Any]:
        tokens = encode_rows(tokenizer, rows)
        counting = (
            Console().counting("evaluating", len(tokens))
            if show
            else nullcontext(lambda rows: None)
        )
        with counting as count, torch.inference_mode():
            metrics, _ = evaluate(
                lambda input_ids, mask, finish: finish(model(input_ids, mask)),
                tokens,
                ranks,
                model.task,
                DataShard(ranks.rank, ranks.world_size),
                chosen={"thresholds": saved.thresholds},
                on_batch=lambda rows: count(rows * ranks.world_size),
            )
        return metrics

    found = {"model": str(path), "dataset": data.name, **answer(rows)}
    if robustness:
        found["robustness"] = measure_robustness(rows, answer, cleaner(saved.cleaning))
    return found


def _relabelled(data: NewsData, task: Task) -> Rows:
    try:
        return Rows(data.test.texts, task.renamed(data.test.labels, data.label_names))
    except ValueError as error:
        raise UserError(f"--dataset {data.name}: {error}", code="label-unknown") from error
