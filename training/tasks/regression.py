"""Regression: a number per text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from common.errors import UserError
from common.problem_types import Label
from training.tasks.task import RowAnswer, Task

STRATA = 10


class Regression(Task):
    """Trains on targets with mean 0 and standard deviation 1, so that one learning rate fits prices
    and ratings.

    The written model needs no such scale: :meth:`finish` moves it into the last layer.
    """

    name = "regression"
    certainty = "error"

    def __init__(self, label_names: Sequence[str]) -> None:
        super().__init__(label_names)
        self.mean, self.deviation = 0.0, 1.0

    @classmethod
    def name_labels(
        cls, dataset: str, labels: Sequence[Label], known: Sequence[str] | None, column: str
    ) -> tuple[list[str], list[str]]:
        if len(set(labels)) < 2:
            raise UserError(
                f"--dataset {dataset}: all training rows have the number {labels[0]:g}; two are "
                "needed",
                code="labels-too-few",
            )
        return [column], []

    @classmethod
    def targets(cls, labels: Sequence[Label], names: Sequence[str]) -> np.ndarray:
        """float64, (rows,)."""
        return np.array(labels, dtype=np.float64)

    @classmethod
    def strata(cls, targets: np.ndarray) -> np.ndarray:
        """Tenths of the rows by their number."""
        # The inner borders of ten parts with as many rows each; equal numbers are always in the
        # same one.
        return np.searchsorted(np.quantile(targets, np.linspace(0, 1, STRATA + 1)[1:-1]), targets)

    def renamed(self, targets: np.ndarray, names: Sequence[str]) -> np.ndarray:
        return targets

    def fit(self, targets: np.ndarray, head: torch.nn.Linear | None) -> None:
        # Without a bias, as in Llama's head, no mean can be moved into the layer.
        self.mean = float(targets.mean()) if head is not None and head.bias is not None else 0.0
        self.deviation = float(np.sqrt(np.mean((targets - self.mean) ** 2))) or 1.0

    def finish(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Scores s are trained on (y - mean) / deviation, so y is s * deviation + mean: linear, as
        # is the last layer, which takes both.
        return weight * self.deviation, None if bias is None else bias * self.deviation + self.mean

    def row_losses(
        self, scores: torch.Tensor, targets: torch.Tensor, label_smoothing: float
    ) -> torch.Tensor:
        """Squared error, in standard deviations of the training rows."""
        # Targets are float64 and scaled as such: what is left of a year or a price after its mean
        # is taken off fits into fp32.
        wanted = ((targets - self.mean) / self.deviation).float()
        return (scores.float().squeeze(1) - wanted) ** 2

    def chance_loss(self, targets: np.ndarray) -> float:
        return float(targets.var()) / self.deviation**2

    def teacher_losses(self, scores: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        return self.row_losses(scores, answers[:, 0], 0.0)

    def metrics(
        self, scores: np.ndarray, targets: np.ndarray, chosen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The loss is in standard deviations, errors are in the unit of the data.

        ``r2``: share of the variance that is explained; ``spearman``: correlation of the ranks;
        ``by_tenth``: mean prediction and mean number of each tenth of the rows, by prediction.
        """
        predicted = self._predicted(scores)
        errors = predicted - targets
        variance = float(((targets - targets.mean()) ** 2).mean())
        tenths = np.array_split(np.argsort(predicted, kind="stable"), min(STRATA, len(targets)))
        return {
            "rows": len(targets),
            "loss": float(np.mean((errors / self.deviation) ** 2)),
            "rmse": float(np.sqrt((errors**2).mean())),
            "mae": float(np.abs(errors).mean()),
            "r2": 1 - float((errors**2).mean()) / variance if variance else 0.0,
            "spearman": spearman(predicted, targets),
            "labels": list(self.label_names),
            "by_tenth": [
                [float(predicted[rows].mean()), float(targets[rows].mean())] for rows in tenths
            ],
        }

    def describe(
        self, scores: np.ndarray, targets: np.ndarray, chosen: Mapping[str, Any]
    ) -> Iterator[RowAnswer]:
        for predicted, target in zip(
            self._predicted(scores).tolist(), targets.tolist(), strict=True
        ):
            error = predicted - target
            yield RowAnswer(f"{target:g}", f"{predicted:.6g}", error, surprise=abs(error))

    def in_units(self, scores: np.ndarray) -> np.ndarray:
        return self._predicted(scores)[:, None]

    def as_scores(self, answers: np.ndarray) -> np.ndarray:
        return (answers - self.mean) / self.deviation

    def _predicted(self, scores: np.ndarray) -> np.ndarray:
        return scores[:, 0].astype(np.float64) * self.deviation + self.mean


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of the ranks of two series of numbers, (rows,)."""
    return _correlation(_ranks(a), _ranks(b))


def _ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value; equal values share the mean of theirs."""
    # The ranks of a run of c equal values that ends at rank n are n - c + 1 to n; their mean is
    # n - (c - 1) / 2.
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[group]


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale else 0.0
