"""The functions of all lessons, with how each is called and how the result is judged."""

from __future__ import annotations

from learn.checking import (
    accumulation,
    accuracy,
    broadcast,
    buckets,
    gradients,
    pipeline,
    ring,
    rows,
    tensor_parallel,
    zero1,
)
from learn.checking.finding import Exercise

EXERCISES: dict[str, Exercise] = {
    **ring.EXERCISES,
    **broadcast.EXERCISES,
    **gradients.EXERCISES,
    **accuracy.EXERCISES,
    **rows.EXERCISES,
    **buckets.EXERCISES,
    **accumulation.EXERCISES,
    **zero1.EXERCISES,
    **tensor_parallel.EXERCISES,
    **pipeline.EXERCISES,
}


def functions_of(lesson: str) -> list[str]:
    return [name for name, exercise in EXERCISES.items() if exercise.lesson == lesson]
