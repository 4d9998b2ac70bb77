"""A rank stands still, or is slow."""

from collections.abc import Callable

import pytest

from tests.training.faults.cases import STUCK
from tests.training.faults.faults import Fault

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", STUCK, ids=lambda fault: fault.name)
def test_a_rank_that_holds_up_the_others_is_named_and_costs_nothing(
    suffers: Callable[[Fault], None], fault: Fault
) -> None:
    suffers(fault)
