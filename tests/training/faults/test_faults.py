"""A rank is killed, at whatever it was."""

from collections.abc import Callable

import pytest

from tests.training.faults.cases import KILLED
from tests.training.faults.faults import Fault


@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in KILLED])
def test_a_run_with_a_killed_rank_ends_with_the_weights_of_one_never_disturbed(
    suffers: Callable[[Fault], None], fault: Fault
) -> None:
    suffers(fault)
