"""Turn the ranks' reports into a verdict on a function."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from learn.checking.exercises import EXERCISES
from learn.checking.finding import ENDLESS_HINT, NOT_WRITTEN, Finding
from learn.checking.rank import Report
from learn.checking.supervision import call_on_ranks

SECONDS = 20.0  # for a call that takes milliseconds

# The most frequent errors (patterns of their messages), and their causes.
_HINTS = {
    "NoneType": "A tensor has no gradient, its .grad is None, if it took no part in the loss, or "
    "if nothing has set its requires_grad: parameters have it, received tensors do not.",
    "leaf Variable that requires grad": "Autograd records a write into a weight as part of the "
    "loss. Change values where it does not record: under torch.no_grad(), or in .detach().",
    "result type|dtype|scalar type": "Buffers may be whole numbers (BatchNorm counts its batches), "
    "and not every operation can write its result into one.",
    "type torch.Tensor": "A collective takes a tensor and works in place; put a plain number into one first.",
    "Boolean value of Tensor|must match the size of tensor": "`in` and `==` compare tensors number "
    "by number. To find one in a list, use `is`, or a set or a dict.",
    "trying to initialize": "The process group is already initialized when your functions are called.",
}


@dataclass(frozen=True)
class Verdict:
    name: str
    finding: Finding | None
    world_size: int
    printed: dict[int, str]


def check_function(
    path: Path,
    name: str,
    world_sizes: Sequence[int],
    seconds: float = SECONDS,
    show: Callable[[str], None] = lambda progress: None,
) -> Verdict:
    """Call a learner's function on each number of ranks, until something is wrong; ``show`` is told
    each second for which ranks the check waits.
    """
    # More than one number: a function that divides by 2 is right on two ranks.
    for world_size in world_sizes:
        reports = call_on_ranks(world_size, path.resolve(), name, seconds, show)
        finding = explain(name, reports, seconds)
        printed = {rank: report.printed for rank, report in enumerate(reports) if report.printed}
        if finding:
            break
    return Verdict(name, finding, world_size, printed)


def explain(name: str, reports: Sequence[Report], seconds: float) -> Finding | None:
    """What is wrong, or None. If several ranks failed on their own, the first one is quoted."""
    # Causes before consequences: a rank that failed on its own, then ranks that failed together,
    # then those that wait. Only if all have returned is there a result to judge.
    by_rank = dict(enumerate(reports))
    quiet = ("returned", "waits", "runs")
    failed = {rank: report for rank, report in by_rank.items() if report.outcome not in quiet}
    for rank, report in failed.items():
        if not _failed_by_others(report):
            return _failure(name, rank, report)
    if failed:
        hint = (
            "All ranks make the same calls, in the same order, with tensors of the same size and "
            "type."
        )
        return Finding("the ranks' collectives do not match", hint, _places(reports))
    outcomes = {report.outcome for report in reports}
    if outcomes & {"waits", "runs"}:
        problem = f"hangs: not all ranks had returned after {seconds:.0f} s"
        hint = EXERCISES[name].hang_hint if "waits" in outcomes else ENDLESS_HINT
        return Finding(problem, hint, _places(reports))
    return EXERCISES[name].judge([report.value for report in reports])


def _failed_by_others(report: Report) -> bool:
    """Whether gloo failed: it lost a rank, or a message's size was wrong, which aborts."""
    if report.outcome == "gone":
        return report.value == -signal.SIGABRT
    return report.outcome == "raised" and re.search("gloo|Connection", report.error) is not None


def _failure(name: str, rank: int, report: Report) -> Finding:
    if report.outcome == "wrong signature":
        lesson = f"learn/lessons/{EXERCISES[name].lesson}.py"
        return Finding(report.error, f"Keep the names and the arguments of {lesson}.")
    if report.outcome == "gone":
        hint = "The function must return: did it call os._exit, or crash outside of Python?"
        how = f"ended during the call, with exit code {report.value}"
        return Finding(f"the process of rank {rank} {how}", hint)
    if report.error == "NotImplementedError":
        return NOT_WRITTEN
    hints = (hint for pattern, hint in _HINTS.items() if re.search(pattern, report.error))
    general = (
        "This is the last line of your file that ran. Print what it works on: the output is shown "
        "here."
    )
    hint = next(hints, general)
    return Finding(f"rank {rank} raised {report.error}", hint, report.place)


def _places(reports: Sequence[Report]) -> str:
    verbs = {"returned": "has returned", "raised": "failed", "gone": "is gone"}
    lines = []
    for rank, report in enumerate(reports):
        where = f" at {report.place}" if report.place else ""
        lines.append(f"rank {rank} {verbs.get(report.outcome, 'is' if where else 'waits')}{where}")
    return "\n".join(lines)
