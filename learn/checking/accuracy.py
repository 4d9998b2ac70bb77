"""``global_accuracy``: called on ranks with different numbers of rows, and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from learn.checking.finding import Exercise, Finding
from learn.checking.probe import explanation

PROMISE = "the accuracy is that of all rows, on every rank"


@dataclass(frozen=True)
class Seen:
    """What a solution returned on one rank: the name of its type, and its value if it has one."""

    type_name: str
    value: float | None


def counts(rank: int) -> tuple[int, int]:
    """Correct rows and all rows of a rank."""
    # Later ranks have more rows and a lower accuracy, so that the mean of the accuracies is not
    # the accuracy of all rows. And the numbers are large, so that small types overflow.
    return 9_000 + 5_000 * rank, 10_000 * (rank + 1)


def observe(function: Callable[[int, int], float]) -> Seen:
    answer = function(*counts(dist.get_rank()))
    try:
        return Seen(type(answer).__name__, float(answer))
    except (TypeError, ValueError, RuntimeError):
        return Seen(type(answer).__name__, None)


def judge(seen: Sequence[Seen]) -> Finding | None:
    counts_by_rank = [counts(rank) for rank in range(len(seen))]
    correct, total = (sum(column) for column in zip(*counts_by_rank, strict=True))
    values = [one.value for one in seen]
    detail = _detail(seen, counts_by_rank, correct, total)
    if None in values:
        hint = "Does every path end in a return?"
        return Finding(f"returns {seen[values.index(None)].type_name}, not a number", hint, detail)
    # With a tolerance: the division may have been one of float32 tensors.
    if not _equal(values, [correct / total] * len(seen)):
        return Finding(*_suspect(values, counts_by_rank, correct, total), detail)
    # The value is right. But a tensor, printed or compared later, is a surprise.
    if others := [one.type_name for one in seen if one.type_name not in ("float", "float64")]:
        hint = "The caller needs a plain number: a tensor of one element has a method for that."
        return Finding(f"returns {others[0]}, not float", hint, detail)
    return None


def _detail(
    seen: Sequence[Seen], counts_by_rank: Sequence[tuple[int, int]], correct: int, total: int
) -> str:
    terms = ", ".join(f"{right} of {rows}" for right, rows in counts_by_rank)
    answers = [one.type_name if one.value is None else f"{one.value:.4g}" for one in seen]
    terms = f"{terms}: {correct} of {total} = {correct / total:.4g}"
    return f"the ranks count {terms}; they return {', '.join(answers)}"


def _suspect(
    values: Sequence[float],
    counts_by_rank: Sequence[tuple[int, int]],
    correct: int,
    total: int,
) -> tuple[str, str]:
    """The mistake that explains these values, and a hint."""
    num_ranks, shares = len(counts_by_rank), [right / rows for right, rows in counts_by_rank]
    correct_only = [correct / rows for _, rows in counts_by_rank]
    total_only = [right / total for right, _ in counts_by_rank]
    before = "What has to be added up before the division?"
    mistakes = [
        (shares, "counts only its own rank's rows", "How does a rank learn the others' counts?"),
        (
            [sum(shares) / num_ranks] * num_ranks,
            "averages the ranks' accuracies",
            f"A rank with few rows weighs as much as one with many. {before}",
        ),
        ([sum(shares)] * num_ranks, "adds up the ranks' accuracies", before),
        (correct_only, "sums correct over the ranks, but not total", _BOTH),
        (total_only, "sums total over the ranks, but not correct", _BOTH),
        (
            [100 * correct / total] * num_ranks,
            "returns a percentage",
            "It must be a share between 0 and 1.",
        ),
        (
            [correct / total / num_ranks] * num_ranks,
            "divides by the number of ranks too",
            "The sums over all ranks are the counts of the whole test set already.",
        ),
    ]
    otherwise = "the accuracy is wrong", _PRINT
    if math.isclose(values[0], correct / total, rel_tol=1e-4):
        # As after a reduce instead of an all-reduce.
        hint = "Some collectives give their result to one rank, others to all."
        otherwise = "only rank 0 has the right answer", hint
    return explanation(values, mistakes, otherwise, _equal)


_PRINT = (
    "Print the counts before and after they were summed. `//` divides to whole numbers, and small "
    "types overflow."
)
_BOTH = "An accuracy is a quotient of two counts, and each rank knows only its part of both."


def _equal(values: Sequence[float], expected: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(values, expected, strict=True))


EXERCISES = {
    "global_accuracy": Exercise("data_parallel", PROMISE, observe, judge),
}
