"""Multi-label classification: each label applies to a text or not, independently of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from common.errors import UserError
from common.problem_types import DEFAULT_THRESHOLD, MULTI_LABEL, THRESHOLDS_KEY, Label
from training.tasks.task import RowAnswer, Task

# A threshold chosen on fewer rows with the label would follow chance, so 0.5 is kept.
FEWEST_TO_CHOOSE = 5


class MultiLabelClassification(Task):
    """A label is answered if its probability reaches its threshold, which is chosen on the
    validation rows.
    """

    name = "multi_label"

    @classmethod
    def name_labels(
        cls, dataset: str, labels: Sequence[Label], known: Sequence[str] | None, column: str
    ) -> tuple[list[str], list[str]]:
        present = Counter(name for row in labels for name in row)
        names = list(known or sorted(present))
        if len(names) < 2:
            raise UserError(
                f"--dataset {dataset}: the training rows have {len(names)} different labels, and "
                "--task multi_label "
                "needs two; for one label that applies or not, use --task classification with two "
                "labels",
                code="labels-too-few",
            )
        num_rows = len(labels)
        if 2 * len(names) > num_rows:
            raise UserError(
                f"--dataset {dataset}: {len(names):,} different labels in {num_rows:,} rows; is "
                f"column {column} free "
                "text?",
                code="labels-too-many",
            )
        return names, list(_notes_on_labels(labels, names, present))

    @classmethod
    def targets(cls, labels: Sequence[Label], names: Sequence[str]) -> np.ndarray:
        """uint8, (rows, labels): 1 if the label applies."""
        index = {name: i for i, name in enumerate(names)}
        targets = np.zeros((len(labels), len(names)), dtype=np.uint8)
        for row, applying in enumerate(labels):
            targets[row, [index[name] for name in applying]] = 1
        return targets

    @classmethod
    def strata(cls, targets: np.ndarray) -> np.ndarray:
        """The rarest label of each row, so that rare labels reach every split; one more for rows
        without labels.
        """
        # With columns in this order, argmax finds the first 1 of a row, which is its rarest label.
        rarest_first = np.argsort(targets.sum(axis=0), kind="stable")
        has_label = targets[:, rarest_first].any(axis=1)
        rarest = rarest_first[targets[:, rarest_first].argmax(axis=1)]
        return np.where(has_label, rarest, targets.shape[1])

    def renamed(self, targets: np.ndarray, names: Sequence[str]) -> np.ndarray:
        found = np.zeros((len(targets), len(self.label_names)), dtype=targets.dtype)
        found[:, self._places(names)] = targets
        return found

    def settings(self, validation: Mapping[str, Any]) -> dict[str, Any]:
        return {THRESHOLDS_KEY: self._thresholds(validation).tolist()}

    def row_losses(
        self, scores: torch.Tensor, targets: torch.Tensor, label_smoothing: float
    ) -> torch.Tensor:
        """Binary cross-entropy, the mean over the labels."""
        losses = F.binary_cross_entropy_with_logits(
            scores.float(), targets.float(), reduction="none"
        )
        return losses.mean(dim=1)

    def chance_loss(self, targets: np.ndarray) -> float:
        # A label that no row or every row has would give 0 times the logarithm of 0.
        shares = np.clip(targets.mean(axis=0, dtype=np.float64), 1e-12, 1 - 1e-12)
        return float(-(shares * np.log(shares) + (1 - shares) * np.log(1 - shares)).mean())

    def metrics(
        self, scores: np.ndarray, targets: np.ndarray, chosen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """F1 over all decisions (micro) and as the mean over labels (macro), and the share of rows
        all right.
        """
        probabilities = MULTI_LABEL.answers(scores)
        # Chosen here only on the validation rows. On test rows they would be fitted to the very
        # rows that they are judged by.
        thresholds = (
            _best_thresholds(probabilities, targets) if chosen is None else self._thresholds(chosen)
        )
        predicted, actual = probabilities >= thresholds, targets.astype(bool)
        hits, num_predicted, num_actual = (
            each.sum(axis=0) for each in (predicted & actual, predicted, actual)
        )
        per_class = {
            name: {
                "precision": _share(hits[i], num_predicted[i]),
                "recall": _share(hits[i], num_actual[i]),
                "f1": _share(2 * hits[i], num_predicted[i] + num_actual[i]),
                "rows": int(num_actual[i]),
            }
            for i, name in enumerate(self.label_names)
        }
        present = [figures["f1"] for figures in per_class.values() if figures["rows"]]
        exact = scores.astype(np.float64)
        # log(1 + exp(x)) - x * y, without overflow.
        losses = np.maximum(exact, 0) - exact * targets + np.log1p(np.exp(-np.abs(exact)))
        return {
            "rows": len(targets),
            "loss": float(losses.mean()),
            "micro_f1": _share(2 * hits.sum(), num_predicted.sum() + num_actual.sum()),
            "macro_f1": float(np.mean(present)) if present else 0.0,
            "exact_match": float((predicted == actual).all(axis=1).mean()),
            "labels": list(self.label_names),
            "thresholds": [float(one) for one in thresholds],
            "per_class": per_class,
        }

    def describe(
        self, scores: np.ndarray, targets: np.ndarray, chosen: Mapping[str, Any]
    ) -> Iterator[RowAnswer]:
        """The certainty is that of the least certain decision; the surprise that of the most wrong
        one.
        """
        probabilities = MULTI_LABEL.answers(scores)
        predicted = probabilities >= self._thresholds(chosen)
        applies = targets.astype(bool)
        # The probability of the true answer to each label, (rows, labels).
        right = np.where(applies, probabilities, 1 - probabilities)
        wrong = predicted != applies
        certainty = np.where(predicted, probabilities, 1 - probabilities).min(axis=1)
        surprise = np.where(wrong, 1 - right, 0.0).max(axis=1)
        for row in range(len(targets)):
            label, answer = (self._names(flags) for flags in (targets[row], predicted[row]))
            yield RowAnswer(label, answer, float(certainty[row]), float(surprise[row]))

    def _thresholds(self, chosen: Mapping[str, Any]) -> np.ndarray:
        # Without validation rows none were chosen.
        return np.array(chosen.get("thresholds") or [DEFAULT_THRESHOLD] * len(self.label_names))

    def _names(self, flags: np.ndarray) -> str:
        pairs = zip(self.label_names, flags, strict=True)
        return ", ".join(name for name, applies in pairs if applies) or "none"


def _notes_on_labels(
    labels: Sequence[Label], names: Sequence[str], present: Mapping[str, int]
) -> Iterator[str]:
    num_rows = len(labels)
    constant = next((name for name in names if present[name] in (0, num_rows)), None)
    if constant is not None:
        where = "every" if present[constant] else "no"
        yield f"label {constant!r} applies to {where} training row, so nothing is learned about it"
    if unlabelled := sum(not row for row in labels):
        yield f"{unlabelled:,} of {num_rows:,} training rows have no label, which is learned too"


def _best_thresholds(probabilities: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The threshold of each label with the best F1 on these rows, half-way to the next lower
    probability.
    """
    thresholds = np.full(targets.shape[1], DEFAULT_THRESHOLD)
    for label in range(targets.shape[1]):
        if targets[:, label].sum() < FEWEST_TO_CHOOSE:
            continue
        # From the most probable row down: with the threshold below row i, the first i + 1 rows are
        # predicted, so one cumulative sum gives the hits, and the F1, of every threshold at once.
        order = np.argsort(-probabilities[:, label], kind="stable")
        ranked, hits = probabilities[order, label], np.cumsum(targets[order, label], dtype=np.int64)
        f1 = 2 * hits / (np.arange(1, len(order) + 1) + hits[-1])
        # A threshold cannot part rows with the same probability.
        following = np.append(ranked[1:], 0.0)
        f1[ranked == following] = -1
        best = int(f1.argmax())
        thresholds[label] = (ranked[best] + following[best]) / 2
    return thresholds


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
