"""A task: what a row's label is, the loss, the metrics, and what a report and a model folder say
about the answers.

The loop, the strategies and the evaluator know none of it: they pass labels in and scores out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from common.problem_types import SINGLE_LABEL, Label, ProblemType, UnknownLabel
from training.facts import TASK_FACTS


@dataclass(frozen=True)
class RowAnswer:
    """The model's answer to one row, in words.

    ``certainty``: how sure the answer is, or how far off; see :attr:`Task.certainty`. ``surprise``:
    how wrong it is, the most wrong first in the report; 0 if it is right.
    """

    label: str
    predicted: str
    certainty: float
    surprise: float


class Task:
    """One task with the labels of one model.

    Attributes:
        name: what ``--task`` calls it; decides the next three, see :mod:`training.facts`.
        problem_type: what the model folder calls it.
        is_language_model: its rows are blocks of plain text.
        has_labels: its rows have labels, and its models can be served.
        certainty: the heading of :attr:`RowAnswer.certainty`.
        auto_class: the class of transformers that loads its networks.
        keeps_head: the last layer is written with the others.
        rows_at_once: that an evaluation computes in one batch.
        label_names: the name of each output of the model.
    """

    name: ClassVar[str]
    problem_type: ClassVar[ProblemType]
    is_language_model: ClassVar[bool] = False
    has_labels: ClassVar[bool] = True
    certainty: ClassVar[str] = "confidence"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    keeps_head: ClassVar[bool] = True
    rows_at_once: ClassVar[int] = 64

    def __init_subclass__(cls) -> None:
        # Only classes that --task names have facts; those in between, such as PlainTextTask, have
        # none. The facts are kept apart because flags and the planner need them without PyTorch.
        if "name" in cls.__dict__:
            facts = TASK_FACTS[cls.name]
            cls.problem_type, cls.has_labels = facts.problem_type, facts.has_labels
            cls.is_language_model = facts.is_language_model

    def __init__(self, label_names: Sequence[str]) -> None:
        self.label_names = list(label_names)
        # The user's, instead of the task's loss, and in addition to its metrics.
        self.own_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self.own_metric: Callable[[np.ndarray, np.ndarray], Mapping[str, float]] | None = None

    @property
    def num_scores(self) -> int:
        """How many numbers per row :meth:`summary` returns."""
        return len(self.label_names)

    def predicted(self, lengths: np.ndarray) -> np.ndarray:
        """How much each row counts in the mean loss of a batch, (rows,): what it predicts, by its
        number of tokens.
        """
        return np.ones(len(lengths))

    def inputs_and_targets(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor,
        rows: np.ndarray,
        seed: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids that the model gets, and the targets of the loss, from padded rows and what
        :meth:`targets` gave.

        ``rows``: their numbers, which together with ``seed`` decide what is drawn.
        """
        return input_ids, labels

    def summary(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """What an evaluation keeps of a batch's scores, before it leaves the device: (rows,
        :attr:`num_scores`).
        """
        return scores

    def loss(
        self, scores: torch.Tensor, targets: torch.Tensor, label_smoothing: float
    ) -> torch.Tensor:
        """The loss that a row is trained with: (rows, labels) to (rows,)."""
        if self.own_loss:
            return self.own_loss(scores.float(), targets)
        return self.row_losses(scores, targets, label_smoothing)

    def teacher_losses(self, scores: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """The loss of each row by what a teacher answers, fp32 (rows, labels): probabilities, or a
        number in the unit of the data.
        """
        return self.row_losses(scores, answers, 0.0)

    def measure(
        self, scores: np.ndarray, targets: np.ndarray, chosen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """All figures of an evaluation, the user's among them; see :meth:`metrics`."""
        own = self.own_metric(self.in_units(scores), targets) if self.own_metric else {}
        return self.metrics(scores, targets, chosen) | {
            name: float(value) for name, value in own.items()
        }

    def in_units(self, scores: np.ndarray) -> np.ndarray:
        """Scores as a metric of the user's own gets them: for numbers, in the unit of the targets."""
        return scores

    def as_scores(self, answers: np.ndarray) -> np.ndarray:
        """The scores of a model whose answers these are: the opposite of :meth:`in_units`."""
        return answers

    # Rows. Class methods, because they come before anything is known of a model.

    @classmethod
    def name_labels(
        cls, dataset: str, labels: Sequence[Label], known: Sequence[str] | None, column: str
    ) -> tuple[list[str], list[str]]:
        """The label names of training rows, and reasons to doubt them.

        Args:
            labels: of the training rows.
            known: the names that the data itself declares, if it does.
            column: that the labels are from.

        Raises:
            UserError: nothing can be learned from these.
        """
        raise NotImplementedError

    @classmethod
    def targets(cls, labels: Sequence[Label], names: Sequence[str]) -> np.ndarray:
        """Labels as the loss takes them: (rows, ...)."""
        raise NotImplementedError

    @classmethod
    def strata(cls, targets: np.ndarray) -> np.ndarray:
        """A number for each row, (rows,); rows with the same number are shared evenly between the
        splits.
        """
        raise NotImplementedError

    def renamed(self, targets: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """The targets of rows whose labels are called ``names`` as targets of this task.

        Raises:
            ValueError: this task has no such label.
        """
        raise NotImplementedError

    def _places(self, names: Sequence[str]) -> np.ndarray:
        """The place of each name among the labels."""
        try:
            known = [SINGLE_LABEL.read_label(name, self.label_names) for name in names]
        except UnknownLabel as error:
            what = str(error).replace("the training labels", "the model's labels")
            raise ValueError(what) from error
        return np.array([self.label_names.index(name) for name in known])

    # The model

    def fit(self, targets: np.ndarray, head: torch.nn.Linear | None) -> None:
        """Learn from the targets of the training rows what the loss needs to know of all of them."""

    def finish(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weights of the model's last layer, so that its scores need nothing else."""
        return weight, bias

    def settings(self, validation: Mapping[str, Any]) -> dict[str, Any]:
        """What config.json says besides the problem type; ``validation``: the best epoch's
        evaluation.
        """
        return {}

    def row_losses(
        self, scores: torch.Tensor, targets: torch.Tensor, label_smoothing: float
    ) -> torch.Tensor:
        """The loss of each row in fp32: (rows, labels) to (rows,)."""
        raise NotImplementedError

    def chance_loss(self, targets: np.ndarray) -> float | None:
        """The mean loss of a guess that knows only how frequent each label is; None if the task has
        no such guess.
        """
        return None

    def label_logprobs(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """What a step finds out about each row's label: its log-probability, the number of the
        strongest other label, and whether it is the answer (0 or 1): fp32, (rows, 3). None unless
        each row has one label.
        """
        return None

    # Evaluation

    def metrics(
        self, scores: np.ndarray, targets: np.ndarray, chosen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Plain values for JSON: ``rows``, ``loss``, ``labels`` and the task's own metrics.

        ``chosen``: the evaluation on which was chosen what this one uses; None to choose here.
        """
        raise NotImplementedError

    def describe(
        self, scores: np.ndarray, targets: np.ndarray, chosen: Mapping[str, Any]
    ) -> Iterator[RowAnswer]:
        """The answer to each row; ``chosen`` as for :meth:`metrics`."""
        raise NotImplementedError


class PlainTextTask(Task):
    """A task whose rows are texts without labels, so its targets come from elsewhere."""

    @classmethod
    def name_labels(
        cls, dataset: str, labels: Sequence[Label], known: Sequence[str] | None, column: str
    ) -> tuple[list[str], list[str]]:
        return [], []

    @classmethod
    def targets(cls, labels: Sequence[Label], names: Sequence[str]) -> np.ndarray:
        """Placeholders."""
        return np.zeros(len(labels), np.int64)

    @classmethod
    def strata(cls, targets: np.ndarray) -> np.ndarray:
        return np.zeros(len(targets), np.int64)

    def describe(
        self, scores: np.ndarray, targets: np.ndarray, chosen: Mapping[str, Any]
    ) -> Iterator[RowAnswer]:
        return iter(())
