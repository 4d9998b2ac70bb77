"""Each mistake has one name on any number of ranks: all wrong solutions of a lesson in turn, on the same few ranks.

``test_check.py`` sends each of them through the whole checker, with new processes, and so has the hangs too.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from learn.check import describe
from learn.checking.exercises import EXERCISES
from learn.checking.rank import Report
from learn.checking.solution import load_function
from learn.checking.verdict import SECONDS, Verdict, explain
from tests.learn.lessons.wrong_solutions import wrong_solutions

# Not here: the ranks could not be used again after a call that does not end, and without a late rank 0, a collective
# that nobody waits for may finish in time.
ONLY_IN_A_CHECK = ("hangs", "do not match", "raised", "Variable", "NoneType", "ended during", "wait()")
LISTED = ("zero1", "tensor_parallel", "pipeline")


def _call(path: Path, function: str) -> Report:
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
        if EXERCISES[case[0]].lesson == lesson and not any(words in case[1][0] for words in ONLY_IN_A_CHECK)
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
