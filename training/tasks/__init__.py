"""What a model can be trained to answer: one file per task. Only this table knows them all by name."""

from __future__ import annotations

from training.tasks.classification import Classification
from training.tasks.embedding import Embedding
from training.tasks.language_model import (
    MASKED_SHARE,
    CausalLanguageModel,
    LanguageModel,
    MaskedLanguageModel,
    Vocabulary,
)
from training.tasks.multi_label import MultiLabelClassification
from training.tasks.pair import PairClassification
from training.tasks.regression import Regression
from training.tasks.task import Task

__all__ = [
    *("TASKS", "TASK_OF_PROBLEM", "Task"),
    *("Classification", "MultiLabelClassification", "PairClassification", "Regression"),
    "MASKED_SHARE",
    "CausalLanguageModel",
    "Embedding",
    "LanguageModel",
    "MaskedLanguageModel",
    "Vocabulary",
]

_TASKS = (PairClassification, Classification, MultiLabelClassification, Regression)
TASKS: dict[str, type[Task]] = {
    task.name: task for task in (*_TASKS, Embedding, MaskedLanguageModel, CausalLanguageModel)
}
# A model's answers to pairs of texts are those of classification.
TASK_OF_PROBLEM: dict[str, type[Task]] = {task.problem_type.name: task for task in _TASKS}
