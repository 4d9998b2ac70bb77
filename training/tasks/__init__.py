"""What a model can be trained to answer: one file per task. Only this table knows them all by name."""

from __future__ import annotations

from training.tasks.classification import Classification
from training.tasks.multi_label import MultiLabelClassification
from training.tasks.regression import Regression
from training.tasks.task import Task

TASKS: dict[str, type[Task]] = {task.name: task for task in (Classification, MultiLabelClassification, Regression)}
TASK_OF_PROBLEM: dict[str, type[Task]] = {task.problem_type.name: task for task in TASKS.values()}
