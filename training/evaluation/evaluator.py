"""Evaluation on all ranks: every row counted exactly once, whatever their number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import UserError
from common.model_folder import SavedModel, read_saved_model
from common.rows import Columns
from common.text import TextTokenizer
from training.data.batching import DataShard, pad
from training.data.dataset import NewsData, Rows, load_news
from training.data.tokenized import TokenizedRows, encode_rows
from training.evaluation.metrics import classification_metrics
from training.model.classifier import NewsClassifier
from training.monitoring import Console
from training.parallelism.distributed import Ranks
from training.run.quiet import quiet_libraries

ROWS_PER_BATCH = 64
ROUNDS_BETWEEN_ASKING = 4


class EvaluationStopped(Exception):
    """An evaluation was interrupted because the run is stopping; raised on all ranks after the same batch."""


def evaluate(
    logits_of: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    rows: TokenizedRows,
    ranks: Ranks,
    label_names: Sequence[str],
    data_shard: DataShard,
    index: np.ndarray | None = None,
    on_batch: Callable[[int], None] = lambda rows: None,
    stops: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], np.ndarray]:
    """Classify rows and measure the result; a collective call.

    The batches do not depend on the number of ranks. They are dealt out one by one, and every row counts once.

    Args:
        logits_of: ids and mask, (batch, seq) on this rank's device, to logits, (batch, classes).
        index: which rows of the split; by default all.
        on_batch: called with the number of rows of each batch that this rank finishes.
        stops: whether to give up; called every few batches by all ranks together, with the same answer on all.

    Returns:
        On every rank, the metrics of :func:`classification_metrics` and the logits, float32 (rows, classes), in the
            order of ``index``.

    Raises:
        EvaluationStopped: ``stops`` returned true.
    """
    index = np.arange(len(rows)) if index is None else index
    # Rows of similar length share a batch, so little is padded. Rank r of n takes the batches r, r + n, r + 2n, ...
    order = np.argsort(rows.lengths[index], kind="stable")
    batches = [order[start : start + ROWS_PER_BATCH] for start in range(0, len(order), ROWS_PER_BATCH)]
    results = []
    for number, first in enumerate(range(0, len(batches), data_shard.size)):
        if number % ROUNDS_BETWEEN_ASKING == 0 and stops():
            raise EvaluationStopped
        # Ranks that shard a model gather it together, so a rank without a batch takes part in the others'.
        has_batch = first + data_shard.rank < len(batches)
        batch = batches[first + data_shard.rank] if has_batch else batches[-1][:1]
        chosen = index[batch]
        input_ids, attention_mask = pad(rows, chosen, int(rows.lengths[chosen].max()))
        mask = None if attention_mask is None else attention_mask.to(ranks.device)
        part = logits_of(input_ids.to(ranks.device), mask).float().cpu().numpy()
        if has_batch:
            results.append(part)
            on_batch(len(batch))
    # Put every row's logits back where the row was, on every rank.
    logits = np.zeros((len(index), len(label_names)), dtype=np.float32)
    for number, parts in ranks.gather((data_shard.rank, results if data_shard.is_replica_leader else [])):
        for batch, part in zip(batches[number :: data_shard.size], parts, strict=False):
            logits[batch] = part
    return classification_metrics(logits, rows.labels[index], label_names), logits


def evaluate_saved(
    path: Path,
    dataset: str | None,
    ranks: Ranks,
    columns: tuple[str | None, str | None] = (None, None),
    *,
    quiet: bool = False,
) -> dict[str, Any]:
    """Evaluate a model folder or ``.pt`` file on a dataset's test rows, in fp32.

    Dataset and columns are by default those that the model was trained on.

    Raises:
        UserError: model or data cannot be read, or their labels differ.
    """

    quiet_libraries()

    def read() -> tuple[SavedModel, NewsData]:
        saved = read_saved_model(path)
        name = dataset or saved.metadata.get("dataset")
        if name is None:
            raise UserError(
                f"{path}: does not say what it was trained on; name the data with --dataset", code="data-not-found"
            )
        text, label = columns
        text = text or str(saved.metadata.get("text_column", "text"))
        label = label or str(saved.metadata.get("label_column", "label"))
        return saved, load_news(name, columns=Columns(text, label), say=partial(print, file=sys.stderr))

    saved, data = ranks.run_on_all_ranks(read)
    rows = _relabelled(data, saved.labels)
    tokens = encode_rows(TextTokenizer.from_json(saved.tokenizer_json, saved.max_length, saved.cleaning), rows)
    model = NewsClassifier.from_saved(saved).to(ranks.device).eval()
    show = ranks.is_first and not quiet
    counting = Console().counting("evaluating", len(tokens)) if show else nullcontext(lambda rows: None)
    with counting as count, torch.inference_mode():
        data_shard = DataShard(ranks.rank, ranks.world_size)
        metrics, _ = evaluate(
            model, tokens, ranks, saved.labels, data_shard, on_batch=lambda rows: count(rows * ranks.world_size)
        )
    return {"model": str(path), "dataset": data.name, **metrics}


def _relabelled(data: NewsData, labels: list[str]) -> Rows:
    unknown = [name for name in data.label_names if name not in labels]
    if unknown:
        raise UserError(
            f"--dataset {data.name}: label {unknown[0]!r} is not one of the model's labels {', '.join(labels)}",
            code="label-unknown",
        )
    index = np.array([labels.index(name) for name in data.label_names])
    return Rows(data.test.texts, index[data.test.labels])
