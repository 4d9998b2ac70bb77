"""A rank is killed, at whatever it was."""

from collections.abc import Callable

import pytest

from tests.training.faults.cases import KILLED
from tests.training.faults.faults import Fault

FAST = ("rank 0 killed before a save's rename",)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=() if f.name in FAST else pytest.mark.slow, id=f.name) for f in KILLED],
)
def test_a_run_with_a_killed_rank_ends_with_the_weights_of_one_never_disturbed(
    suffers: Callable[[Fault], None], fault: Fault
) -> None:
    suffers(fault)
