"""Evaluation on all ranks: every row counted exactly once, whatever their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from training.batching import pad
from training.distributed import Ranks
from training.metrics import classification_metrics
from training.model import NewsClassifier
from training.precision import autocast
from training.tokenized import TokenizedRows

ROWS_PER_BATCH = 64


def evaluate(
    model: NewsClassifier,
    rows: TokenizedRows,
    ranks: Ranks,
    label_names: Sequence[str],
    precision: str = "fp32",
    index: np.ndarray | None = None,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> tuple[dict[str, Any], np.ndarray]:
    """Classify rows and say how well.

    The batches do not depend on the number of ranks; they are dealt out one by one, without padded duplicates.

    Args:
        model: on this rank's device; its mode is put back afterwards.
        rows: the split.
        ranks: every rank must call this.
        label_names: a name for each class.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        index: which rows of the split; all by default.
        on_batch: told the number of rows of each batch done on this rank.

    Returns:
        On every rank the metrics of :func:`classification_metrics` and the logits, float32 (rows, classes), in the
        order of ``index``.
    """
    index = np.arange(len(rows)) if index is None else index
    order = np.argsort(rows.lengths[index], kind="stable")
    batches = [order[start : start + ROWS_PER_BATCH] for start in range(0, len(order), ROWS_PER_BATCH)]
    was_training = model.training
    model.eval()
    mine = []
    with torch.inference_mode(), autocast(precision, ranks.device):
        for batch in batches[ranks.rank :: ranks.world_size]:
            chosen = index[batch]
            input_ids, attention_mask = pad(rows, chosen, int(rows.lengths[chosen].max()))
            mine.append(model(input_ids.to(ranks.device), attention_mask.to(ranks.device)).float().cpu().numpy())
            on_batch(len(batch))
    model.train(was_training)
    logits = np.zeros((len(index), len(label_names)), dtype=np.float32)
    for rank, parts in enumerate(ranks.gather(mine)):
        for batch, part in zip(batches[rank :: ranks.world_size], parts, strict=True):
            logits[batch] = part
    return classification_metrics(logits, rows.labels[index], label_names), logits
