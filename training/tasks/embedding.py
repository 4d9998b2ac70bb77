"""Embedding: a teacher's vector per text. The encoder that learns to give it is a base for
fine-tuning on few rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from training.tasks.regression import spearman
from training.tasks.task import PlainTextTask


class Embedding(PlainTextTask):
    """Rows are texts without labels; their targets are unit vectors, float32 (rows, width), see
    ``data/teacher_vectors.py``.

    The scores are compared with the vectors by their direction alone. What is written is the
    encoder without the last layer, which is of no use to another task; a dense layer before it, as
    DistilBERT's head has, stays.
    """

    name = "embedding"
    keeps_head = False

    def row_losses(
        self, scores: torch.Tensor, targets: torch.Tensor, label_smoothing: float
    ) -> torch.Tensor:
        """1 minus the cosine similarity."""
        return 1 - F.cosine_similarity(scores.float(), targets, dim=1)

    def metrics(
        self, scores: np.ndarray, targets: np.ndarray, chosen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """``cosine``: the mean cosine similarity to the teacher's vectors; ``spearman``: whether
        teacher and student agree on how similar two texts are, over pairs of rows, as benchmarks of
        sentence vectors measure it.
        """
        # The targets have length 1 already, so a product of two rows is their cosine.
        vectors = scores / np.maximum(np.linalg.norm(scores, axis=1, keepdims=True), 1e-12)
        cosine = float((vectors * targets).sum(axis=1).mean(dtype=np.float64))
        # Neighbouring rows are the pairs: one less than there are rows, where all pairs would be
        # the square of that.
        own, wanted = ((one[:-1] * one[1:]).sum(axis=1) for one in (vectors, targets))
        return {
            "rows": len(scores),
            "loss": 1 - cosine,
            "cosine": cosine,
            "spearman": spearman(own, wanted),
            "labels": [],
        }
