"""A number, a clock or a port is not what it should be."""

from collections.abc import Callable

import pytest

from tests.training.faults.cases import NUMBERS
from tests.training.faults.faults import Fault

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", NUMBERS, ids=lambda fault: fault.name)
def test_what_is_wrong_for_a_moment_is_named_and_costs_nothing_more(
    suffers: Callable[[Fault], None], fault: Fault
) -> None:
    suffers(fault)
