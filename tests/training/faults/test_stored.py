"""The disk is full, locked or has lost what it was given."""

from collections.abc import Callable

import pytest

from tests.training.faults.cases import STORED
from tests.training.faults.faults import Fault

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", STORED, ids=lambda fault: fault.name)
def test_a_disk_that_fails_costs_no_step(suffers: Callable[[Fault], None], fault: Fault) -> None:
    suffers(fault)
