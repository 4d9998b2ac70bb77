"""The functions of all lessons, with how each is called and how the result is judged."""

from __future__ import annotations

from learn.checking import accuracy, broadcast, gradients, pipeline, tensor_parallel, zero1
from learn.checking.finding import Exercise

EXERCISES: dict[str, Exercise] = {
    "broadcast_parameters": Exercise("data_parallel", broadcast.PROMISE, broadcast.observe, broadcast.judge),
    "average_gradients": Exercise("data_parallel", gradients.PROMISE, gradients.observe, gradients.judge),
    "global_accuracy": Exercise("data_parallel", accuracy.PROMISE, accuracy.observe, accuracy.judge),
    **zero1.EXERCISES,
    **tensor_parallel.EXERCISES,
    **pipeline.EXERCISES,
}


def functions_of(lesson: str) -> list[str]:
    return [name for name, exercise in EXERCISES.items() if exercise.lesson == lesson]
