"""A rank, all ranks or the launcher are told to stop."""

from collections.abc import Callable

import pytest

from tests.training.faults.cases import STOPPED
from tests.training.faults.faults import Fault

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", STOPPED, ids=lambda fault: fault.name)
def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_been(suffers: Callable[[Fault], None], fault: Fault) -> None:
    suffers(fault)
