"""The functions of the exercise, with how each is called and how the result is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from learn.checking import accuracy, broadcast, gradients
from learn.checking.finding import Finding


@dataclass(frozen=True)
class Exercise:
    """One function: what it ``promise``s, what a call on a rank does (``observe``), and what all ranks' calls show
    (``judge``).
    """

    promise: str
    observe: Callable[[Callable[..., Any]], Any]
    judge: Callable[[Sequence[Any]], Finding | None]


EXERCISES = {
    "broadcast_parameters": Exercise(broadcast.PROMISE, broadcast.observe, broadcast.judge),
    "average_gradients": Exercise(gradients.PROMISE, gradients.observe, gradients.judge),
    "global_accuracy": Exercise(accuracy.PROMISE, accuracy.observe, accuracy.judge),
}
