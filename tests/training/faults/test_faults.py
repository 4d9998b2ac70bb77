"""A run with a fault ends with the weights of one that was never disturbed, to the bit."""

from collections.abc import Callable

import pytest

from tests.training.faults.cases import KILLED, NUMBERS, STOPPED, STORED, STUCK
from tests.training.faults.faults import Fault

pytestmark = pytest.mark.slow
RunWithFault = Callable[[Fault], None]


def each(faults: list[Fault]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: fault.name)


@each(KILLED)
def test_killed_rank_is_restarted_and_loses_nothing(run_with_fault: RunWithFault, fault: Fault) -> None:
    run_with_fault(fault)


@each(STOPPED)
def test_stopped_run_resumes_as_if_it_had_never_stopped(run_with_fault: RunWithFault, fault: Fault) -> None:
    run_with_fault(fault)


@each(STUCK)
def test_rank_that_holds_up_the_others_is_named_and_loses_nothing(run_with_fault: RunWithFault, fault: Fault) -> None:
    run_with_fault(fault)


@each(STORED)
def test_failing_disk_costs_no_step(run_with_fault: RunWithFault, fault: Fault) -> None:
    run_with_fault(fault)


@each(NUMBERS)
def test_transient_fault_is_reported_and_loses_nothing(run_with_fault: RunWithFault, fault: Fault) -> None:
    run_with_fault(fault)
