"""The functions of the exercise, each with how it is tried and how the outcome is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from learn.checking import accuracy, broadcast, gradients
from learn.checking.finding import Finding


@dataclass(frozen=True)
class Exercise:
    """One function.

    Args:
        promise: what holds once it is right.
        observe: calls a solution on a rank and returns what can be seen then; must pickle.
        judge: reads what was seen on all ranks; None if all is right.
    """

    promise: str
    observe: Callable[[Callable[..., Any]], Any]
    judge: Callable[[Sequence[Any]], Finding | None]


EXERCISES = {
    "broadcast_parameters": Exercise(broadcast.PROMISE, broadcast.observe, broadcast.judge),
    "average_gradients": Exercise(gradients.PROMISE, gradients.observe, gradients.judge),
    "global_accuracy": Exercise(accuracy.PROMISE, accuracy.observe, accuracy.judge),
}
