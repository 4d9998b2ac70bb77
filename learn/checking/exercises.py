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
    "ring_all_reduce": Exercise("ring", ring.PROMISE, ring.observe, ring.judge, ring.HANG_HINT),
    "broadcast_parameters": Exercise("data_parallel", broadcast.PROMISE, broadcast.observe, broadcast.judge),
    "average_gradients": Exercise("data_parallel", gradients.PROMISE, gradients.observe, gradients.judge),
    "global_accuracy": Exercise("data_parallel", accuracy.PROMISE, accuracy.observe, accuracy.judge),
    "training_rows": Exercise("rows", rows.TRAINING_PROMISE, rows.observe_training, rows.judge_training),
    "evaluation_rows": Exercise("rows", rows.EVALUATION_PROMISE, rows.observe_evaluation, rows.judge_evaluation),
    "average_in_buckets": Exercise("buckets", buckets.PROMISE, buckets.observe, buckets.judge, buckets.HANG_HINT),
    "accumulate": Exercise("buckets", accumulation.PROMISE, accumulation.observe, accumulation.judge),
    **zero1.EXERCISES,
    **tensor_parallel.EXERCISES,
    **pipeline.EXERCISES,
}


def functions_of(lesson: str) -> list[str]:
    return [name for name, exercise in EXERCISES.items() if exercise.lesson == lesson]
