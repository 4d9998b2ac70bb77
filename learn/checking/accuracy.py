"""``global_accuracy``: what a solution makes of ranks that answered unequally many rows, and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from learn.checking.finding import Finding

PROMISE = "the accuracy is that of all rows, on every rank"


@dataclass(frozen=True)
class Seen:
    """What a solution returned on one rank: the name of its type, and its value if it has one."""

    type_name: str
    value: float | None


def counts(rank: int) -> tuple[int, int]:
    """Rows answered rightly and rows answered: more rows on later ranks, a lower accuracy, too many for small types."""
    return 9_000 + 5_000 * rank, 10_000 * (rank + 1)


def observe(function: Callable[[int, int], float]) -> Seen:
    """Call a solution on this rank."""
    answer = function(*counts(dist.get_rank()))
    try:
        return Seen(type(answer).__name__, float(answer))
    except (TypeError, ValueError, RuntimeError):
        return Seen(type(answer).__name__, None)


def judge(seen: Sequence[Seen]) -> Finding | None:
    """Read what the ranks returned, in their order."""
    of_ranks = [counts(rank) for rank in range(len(seen))]
    correct, total = (sum(column) for column in zip(*of_ranks, strict=True))
    terms = ", ".join(f"{right} of {rows}" for right, rows in of_ranks)
    said = [one.type_name if one.value is None else f"{one.value:.4g}" for one in seen]
    detail = f"the ranks count {terms}: {correct} of {total} = {correct / total:.4g}; they return {', '.join(said)}"
    if missing := [one for one in seen if one.value is None]:
        return Finding(f"returns {missing[0].type_name}, not a number", "Does every path end in a return?", detail)
    values = [one.value for one in seen]
    if _equal(values, [correct / total] * len(seen)):
        others = [one.type_name for one in seen if one.type_name not in ("float", "float64")]
        hint = "Who prints or stores it wants a plain number: a tensor of one element has a method for that."
        return Finding(f"returns {others[0]}, not float", hint, detail) if others else None
    problem, hint = _suspect(values, of_ranks, correct, total)
    return Finding(problem, hint, detail)


def _suspect(values: Sequence[float], of_ranks: Sequence[tuple[int, int]], correct: int, total: int) -> tuple[str, str]:
    """The mistake that leads to these values, and a hint."""
    num_ranks, shares = len(of_ranks), [right / rows for right, rows in of_ranks]
    mistakes = [
        (shares, "counts only the own rank's rows", "How does a rank hear of the others' counts?"),
        (
            [sum(shares) / num_ranks] * num_ranks,
            "averages the ranks' accuracies",
            "A rank with few rows weighs as much as one with many. What has to be added up before the division?",
        ),
        ([sum(shares)] * num_ranks, "adds up the ranks' accuracies", "What has to be added up before the division?"),
        ([correct / rows for _, rows in of_ranks], "sums correct over the ranks, but not total", _BOTH),
        ([right / total for right, _ in of_ranks], "sums total over the ranks, but not correct", _BOTH),
        ([100 * correct / total] * num_ranks, "returns per cent", "A share between 0 and 1 is asked for."),
        (
            [correct / total / num_ranks] * num_ranks,
            "divides by the number of ranks too",
            "The sums over all ranks are the counts of the whole test set already.",
        ),
    ]
    for expected, problem, hint in mistakes:
        if _equal(values, expected):
            return problem, hint
    if math.isclose(values[0], correct / total, rel_tol=1e-4):
        return "only rank 0 has the right answer", "Some collectives give their result to one rank, others to all."
    return "the accuracy is wrong", _PRINT


_PRINT = "Print the counts before and after they were summed. `//` divides to whole numbers, and small types overflow."
_BOTH = "An accuracy is a quotient of two counts, and both are known only in parts."


def _equal(values: Sequence[float], expected: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(values, expected, strict=True))
