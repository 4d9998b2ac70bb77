"""Classification: one label per text."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from common.errors import UserError
from common.escaping import printable
from common.problem_types import Label
from common.rows import AG_NEWS_LABELS
from common.text import counted
from training.tasks.task import RowAnswer, Task

# This many labels are not suspicious, however few the rows.
FEW_LABELS = 10
CALIBRATION_BINS = 15
# What programs write for a value that is missing.
_MISSING = {"nan", "none", "null", "n/a", "na", "<na>", "#n/a", "nat", "undefined"}


class Classification(Task):
    name = "classification"

    @classmethod
    def name_labels(
        cls, dataset: str, labels: Sequence[Label], known: Sequence[str] | None, column: str
    ) -> tuple[list[str], list[str]]:
        present = Counter(map(str, labels))
        if len(present) < 2:
            raise UserError(
                f"--dataset {dataset}: all training rows have the label {next(iter(present))!r}; "
                "two labels are needed",
                code="labels-too-few",
            )
        notes = _notes_on_labels(dataset, present, known=known is not None)
        return list(known or _label_names(present)), notes

    @classmethod
    def targets(cls, labels: Sequence[Label], names: Sequence[str]) -> np.ndarray:
        """int64, (rows,)."""
        index = {name: i for i, name in enumerate(names)}
        return np.fromiter((index[str(label)] for label in labels), np.int64, len(labels))

    @classmethod
    def strata(cls, targets: np.ndarray) -> np.ndarray:
        return targets

    def renamed(self, targets: np.ndarray, names: Sequence[str]) -> np.ndarray:
        return self._places(names)[targets]

    def row_losses(
        self, scores: torch.Tensor, targets: torch.Tensor, label_smoothing: float
    ) -> torch.Tensor:
        """Cross-entropy."""
        # In fp32 under autocast too: bf16 keeps eight bits, too few for the logarithm of a softmax.
        return F.cross_entropy(
            scores.float(), targets, reduction="none", label_smoothing=label_smoothing
        )

    def chance_loss(self, targets: np.ndarray) -> float:
        # The entropy of the shares: what a guess costs on average that gives each label its share.
        shares = np.unique(targets, return_counts=True)[1] / len(targets)
        return float(-(shares * np.log(shares)).sum())

    def label_logprobs(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        log_probabilities, given = scores.float().log_softmax(dim=1), targets[:, None]
        # All of it stays on the device, (rows, 1) each, and is read with the losses some steps
        # later.
        own = log_probabilities.gather(1, given)
        # The strongest of the others: the row's own label is taken out of the maximum.
        other = log_probabilities.scatter(1, given, -math.inf).max(dim=1, keepdim=True)
        return torch.cat([own, other.indices.float(), (own > other.values).float()], dim=1)

    def metrics(
        self, scores: np.ndarray, targets: np.ndarray, chosen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Accuracy, macro-F1, each class's precision and recall, confusion matrix, calibration
        error.

        ``confusion_matrix[true][predicted]`` counts rows; ``calibration_error`` is the expected
        calibration error over 15 equal bins (Guo et al., arXiv 1706.04599); ``reliability`` has
        rows, mean confidence and accuracy of each tenth of the confidences that has rows.
        """
        names, log_probabilities = self.label_names, log_softmax(scores)
        predicted = log_probabilities.argmax(axis=1)
        confidence = np.exp(log_probabilities.max(axis=1))
        confusion = np.zeros((len(names), len(names)), dtype=np.int64)
        np.add.at(confusion, (targets, predicted), 1)
        per_class = {name: _class_metrics(confusion, i) for i, name in enumerate(names)}
        # A class without a row here would count as an F1 of 0, which says nothing about the model.
        present = [figures["f1"] for figures in per_class.values() if figures["rows"]]
        return {
            "rows": len(targets),
            "loss": float(-log_probabilities[np.arange(len(targets)), targets].mean()),
            "accuracy": float((predicted == targets).mean()),
            "macro_f1": float(np.mean(present)),
            "calibration_error": _calibration_error(confidence, predicted == targets),
            "reliability": _reliability(confidence, predicted == targets),
            "labels": list(names),
            "per_class": per_class,
            "confusion_matrix": confusion.tolist(),
        }

    def describe(
        self, scores: np.ndarray, targets: np.ndarray, chosen: Mapping[str, Any]
    ) -> Iterator[RowAnswer]:
        probabilities, names = np.exp(log_softmax(scores)), self.label_names
        predicted, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1).tolist()
        for label, answer, certainty in zip(targets, predicted, confidence, strict=True):
            yield RowAnswer(
                names[label],
                names[answer],
                certainty,
                surprise=certainty if answer != label else 0.0,
            )


def _notes_on_labels(name: str, labels: Counter[str], *, known: bool) -> list[str]:
    """Reasons to doubt that these labels are classes; ``known``: the data itself declares its
    classes.

    Raises:
        UserError: most labels occur in a single row.
    """
    num_rows = labels.total()
    counts = f"{len(labels):,} different labels in {num_rows:,} rows"
    per_label = num_rows / len(labels) if len(labels) > FEW_LABELS else math.inf
    if per_label < 2:
        raise UserError(
            f"--dataset {name}: {counts}; is the label column free text, or a number to predict "
            "(--task regression)?",
            code="labels-too-many",
        )
    few = f"{counts}: few rows to learn each from; is it the right column?"
    notes = (
        few if per_label < 10 else "",
        _note_on_spelling(labels),
        _note_on_missing_values(labels),
        _note_on_minus_one(labels),
        "" if known else _note_on_other_tasks(labels),
    )
    return [note for note in notes if note]


def _note_on_spelling(labels: Counter[str]) -> str:
    if not (alike := _spelt_alike(labels)):
        return ""
    more = f" and {len(alike) - 3} more" if len(alike) > 3 else ""
    shown = "; ".join(
        ", ".join(f"'{printable(name, keep='')}'" for name in names) for names in alike[:3]
    )
    return f"labels that only differ in spelling are trained as classes of their own: {shown}{more}"


def _note_on_missing_values(labels: Counter[str]) -> str:
    if not (missing := [name for name in labels if name.strip().lower() in _MISSING]):
        return ""
    count = sum(labels[name] for name in missing)
    return (
        f"the label {', '.join(map(repr, missing))} ({counted(count, 'row')}) looks like a missing "
        "value and is trained as a class; leave such rows out if it is none"
    )


def _note_on_minus_one(labels: Counter[str]) -> str:
    count = labels["-1"]
    # Data sets on the hub mark rows without a label by -1. But -1, 0 and 1 may well be classes, and
    # so may be numbers around zero.
    is_rare = count * len(labels) * 10 < labels.total()
    if not count or "-2" in labels or not (is_rare or "2" in labels):
        return ""
    return (
        f"the label -1 ({counted(count, 'row')}) is trained as a class of its own; if it marks "
        "rows without a label, leave them out"
    )


def _note_on_other_tasks(labels: Counter[str]) -> str:
    if _are_fractions(labels):
        examples = ", ".join(sorted(labels)[:3])
        return (
            f"labels look like numbers to predict ({examples}): each value is trained as a class "
            "of "
            "its own; --task regression predicts the number"
        )
    if lists := _lists(labels):
        return (
            f"labels such as {lists[0]!r} look like lists: each combination is trained as a class "
            "of its own; --task multi_label predicts each label separately"
        )
    return ""


def _are_fractions(labels: Iterable[str]) -> bool:
    """Whether all labels are numbers, at least one of them not an integer."""
    numbers = [_number(label) for label in labels]
    return None not in numbers and not all(
        number.is_integer() for number in numbers if number is not None
    )


def _number(label: str) -> float | None:
    try:
        number = float(label)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _spelt_alike(labels: Iterable[str]) -> list[list[str]]:
    """Labels that are one number, or one name but for case, space, invisible characters and ways to
    write a letter.
    """
    found: dict[Any, list[str]] = {}
    for label in sorted(labels):
        # NFKC makes one of the ways to write a letter, such as a wide or a composed one. Characters
        # of category Cf, such as a zero-width joiner, cannot be seen at all.
        letters = unicodedata.normalize("NFKC", label)
        plain = "".join(one for one in letters if unicodedata.category(one) != "Cf")
        number = _number(label)
        same = " ".join(plain.casefold().split()) if number is None else number
        found.setdefault(same, []).append(label)
    return [names for names in found.values() if len(names) > 1]


def _lists(labels: Collection[str]) -> list[str]:
    """Labels such as ``a,b`` whose parts are labels too, or parts of several labels."""
    split = {label: re.split(r"\s*[,;|]\s*", label.strip("[]")) for label in labels}
    occurrences = Counter(part for parts in split.values() for part in set(parts))
    return [
        label
        for label, parts in split.items()
        if len(parts) > 1 and any(occurrences[part] > 1 for part in parts)
    ]


def _label_names(labels: Iterable[str]) -> list[str]:
    names = sorted(set(labels))
    if set(names) <= set(AG_NEWS_LABELS):
        return [label for label in AG_NEWS_LABELS if label in names]
    # By value, or label 10 would come before label 2.
    are_numbers = all(name.removeprefix("-").isdecimal() for name in names)
    return sorted(names, key=int) if are_numbers else names


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities in float64: (rows, classes)."""
    # Without each row's maximum, which changes no probability, so that exp cannot overflow.
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _class_metrics(confusion: np.ndarray, index: int) -> dict[str, float | int]:
    hits, predicted = confusion[index, index], confusion[:, index].sum()
    actual = confusion[index].sum()
    return {
        "precision": float(hits / predicted) if predicted else 0.0,
        "recall": float(hits / actual) if actual else 0.0,
        "f1": float(2 * hits / (predicted + actual)) if predicted + actual else 0.0,
        "rows": int(actual),
    }


def _reliability(confidence: np.ndarray, correct: np.ndarray) -> list[list[float]]:
    tenths = np.minimum((confidence * 10).astype(int), 9)  # a confidence of 1 is in the last one
    parts = [tenths == i for i in np.unique(tenths)]
    return [
        [int(part.sum()), float(confidence[part].mean()), float(correct[part].mean())]
        for part in parts
    ]


def _calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
    # A confidence of exactly 1 belongs to the last bin, not to one behind it. A bin's gap is
    # counted in rows, so that the sum weighs each bin by its rows.
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    gaps = [
        abs(confidence[bins == i].sum() - correct[bins == i].sum()) for i in range(CALIBRATION_BINS)
    ]
    return float(sum(gaps) / len(confidence))
