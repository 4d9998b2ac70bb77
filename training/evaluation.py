"""Evaluation on all ranks: every row counted exactly once, whatever their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from training.batching import DataPlace, pad
from training.distributed import Ranks
from training.metrics import classification_metrics
from training.tokenized import TokenizedRows

ROWS_PER_BATCH = 64
ROUNDS_BETWEEN_ASKING = 4


class EvaluationStopped(Exception):
    """An evaluation was given up because the run is to stop; raised on all ranks at the same batch."""


def evaluate(
    logits_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: TokenizedRows,
    ranks: Ranks,
    label_names: Sequence[str],
    place: DataPlace,
    index: np.ndarray | None = None,
    on_batch: Callable[[int], None] = lambda rows: None,
    stops: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], np.ndarray]:
    """Classify rows and say how well.

    The batches do not depend on the number of ranks; they are dealt out one by one, and every row counts once.

    Args:
        logits_of: ids and mask, (batch, seq) on this rank's device, to logits, (batch, classes).
        rows: the split.
        ranks: every rank must call this.
        label_names: a name for each class.
        place: which of the batches are this rank's.
        index: which rows of the split; all by default.
        on_batch: told the number of rows of each batch done on this rank.
        stops: asked every few batches on all ranks at once, and answers the same on all, whether to give up.

    Returns:
        On every rank the metrics of :func:`classification_metrics` and the logits, float32 (rows, classes), in the
        order of ``index``.

    Raises:
        EvaluationStopped: ``stops`` said so.
    """
    index = np.arange(len(rows)) if index is None else index
    order = np.argsort(rows.lengths[index], kind="stable")
    batches = [order[start : start + ROWS_PER_BATCH] for start in range(0, len(order), ROWS_PER_BATCH)]
    mine = []
    for number, first in enumerate(range(0, len(batches), place.size)):
        if number % ROUNDS_BETWEEN_ASKING == 0 and stops():
            raise EvaluationStopped
        # Ranks that share out a model gather it together: one that has no batch left takes part in the others'.
        has_batch = first + place.rank < len(batches)
        batch = batches[first + place.rank] if has_batch else batches[-1][:1]
        chosen = index[batch]
        input_ids, attention_mask = pad(rows, chosen, int(rows.lengths[chosen].max()))
        part = logits_of(input_ids.to(ranks.device), attention_mask.to(ranks.device)).float().cpu().numpy()
        if has_batch:
            mine.append(part)
            on_batch(len(batch))
    logits = np.zeros((len(index), len(label_names)), dtype=np.float32)
    for number, parts in ranks.gather((place.rank, mine if place.leads else [])):
        for batch, part in zip(batches[number :: place.size], parts, strict=False):
            logits[batch] = part
    return classification_metrics(logits, rows.labels[index], label_names), logits
