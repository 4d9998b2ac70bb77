"""Each mistake has one name on any number of ranks: all wrong solutions of a lesson in turn, on the same few ranks.

``test_check.py`` sends each of them through the whole checker, with new processes, and so has the hangs too.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from learn.check import describe
from learn.checking.exercises import EXERCISES
from learn.checking.rank import LATE_SECONDS, Report
from learn.checking.solution import load_function
from learn.checking.verdict import SECONDS, Verdict, explain
from tests.learn.lessons.wrong_solutions import wrong_solutions

# One rank of these does not come to the end of the call: the ranks cannot be used again.
ENDS_THE_RANKS = ("hangs", "do not match", "raised", "Variable", "ended during")
LISTED = ("zero1",)


def _call(path: Path, function: str) -> Report:
    time.sleep(0 if dist.get_rank() else LATE_SECONDS)  # as in a check
    value = EXERCISES[function].observe(load_function(path, function))
    dist.barrier()
    return Report("returned", value)


def _call_all(cases: list[tuple[Path, str]]) -> list[Report]:
    return [_call(*case) for case in cases]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lesson", LISTED)
def test_each_wrong_solution_is_told_its_mistake_on_any_number_of_ranks(
    lesson: str, world_size: int, tmp_path: Path, run_on_ranks: Callable[..., list[Any]]
) -> None:
    listed = {
        name: case
        for name, case in wrong_solutions().items()
        if EXERCISES[case[0]].lesson == lesson and not any(words in case[1][0] for words in ENDS_THE_RANKS)
    }
    for name, (_, _, source) in listed.items():
        (tmp_path / f"{name}.py").write_text(source)

    cases = [(tmp_path / f"{name}.py", function) for name, (function, _, _) in listed.items()]
    by_rank = run_on_ranks(world_size, _call_all, cases)

    assert len(listed) >= 8
    untold = []
    for (name, (function, says, _)), reports in zip(listed.items(), zip(*by_rank, strict=True), strict=True):
        finding = explain(function, reports, SECONDS)
        verdict = Verdict(function, finding, world_size, {})
        shown = describe(verdict, EXERCISES[function].promise).plain
        untold += [f"{name}: {shown}"] if finding is None or not all(words in shown for words in says) else []
    assert not untold, "\n".join(untold)
