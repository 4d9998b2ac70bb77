"""The metrics of a classifier, computed from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

CALIBRATION_BINS = 15


def classification_metrics(logits: np.ndarray, labels: np.ndarray, label_names: Sequence[str]) -> dict[str, Any]:
    """Loss, accuracy, macro-F1, each class's precision and recall, confusion matrix, calibration error.

    ``logits``: (rows, classes). The result holds plain values for JSON: ``confusion_matrix[true][predicted]`` counts
    rows; ``calibration_error`` is the expected calibration error over 15 equal bins (Guo et al., arXiv 1706.04599).
    """
    log_probabilities = log_softmax(logits)
    predicted = log_probabilities.argmax(axis=1)
    confidence = np.exp(log_probabilities.max(axis=1))
    confusion = np.zeros((len(label_names), len(label_names)), dtype=np.int64)
    np.add.at(confusion, (labels, predicted), 1)
    per_class = {name: _class_metrics(confusion, i) for i, name in enumerate(label_names)}
    present = [scores["f1"] for scores in per_class.values() if scores["rows"]]
    return {
        "rows": len(labels),
        "loss": float(-log_probabilities[np.arange(len(labels)), labels].mean()),
        "accuracy": float((predicted == labels).mean()),
        "macro_f1": float(np.mean(present)),
        "calibration_error": _calibration_error(confidence, predicted == labels),
        "labels": list(label_names),
        "per_class": per_class,
        "confusion_matrix": confusion.tolist(),
    }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities in float64: (rows, classes)."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _class_metrics(confusion: np.ndarray, index: int) -> dict[str, float | int]:
    hits, predicted, actual = confusion[index, index], confusion[:, index].sum(), confusion[index].sum()
    return {
        "precision": float(hits / predicted) if predicted else 0.0,
        "recall": float(hits / actual) if actual else 0.0,
        "f1": float(2 * hits / (predicted + actual)) if predicted + actual else 0.0,
        "rows": int(actual),
    }


def _calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    gaps = [abs(confidence[bins == i].sum() - correct[bins == i].sum()) for i in range(CALIBRATION_BINS)]
    return float(sum(gaps) / len(confidence))
