"""The checker of the exercise: the truth passes, and each wrong solution is told what is wrong with it."""

import ast
from pathlib import Path

import pytest

from training.by_hand import data_parallel
from training.by_hand.check import describe
from training.by_hand.checking.exercises import EXERCISES
from training.by_hand.checking.verdict import check_function

TRUTH = Path(data_parallel.__file__)
HANG_SECONDS = 5.0
# The others take half a minute together.
FAST = ("gradients_not_divided", "broadcast_makes_new_parameters", "accuracy_averaged", "gradients_divided_by_two")
WRONG = sorted(Path(__file__).with_name("wrong_solutions").glob("*.py"))


def _cases() -> list:
    return [pytest.param(path, id=path.stem, marks=() if path.stem in FAST else pytest.mark.slow) for path in WRONG]


def _expected(path: Path) -> tuple[str, list[str]]:
    """What stands in a wrong solution's docstring: the function, and what has to be said of it."""
    function, _, says = ast.get_docstring(ast.parse(path.read_text())).partition(": ")
    return function, says.split(" | ")


@pytest.mark.parametrize("path", _cases())
def test_a_wrong_solution_is_told_what_is_wrong(path: Path) -> None:
    function, says = _expected(path)

    verdict = check_function(path, function, (2, 3), seconds=HANG_SECONDS)

    assert verdict.finding is not None
    shown = describe(verdict).plain
    assert all(words in shown for words in says), shown


@pytest.mark.parametrize("name", EXERCISES)
def test_the_truth_passes_on_two_and_three_ranks(name: str) -> None:
    verdict = check_function(TRUTH, name, (2, 3))

    assert verdict.finding is None
    assert verdict.world_size == 3
