"""The network between two machines is cut: whatever the processes make of it, nothing is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.faults.cases import NETWORK
from tests.training.faults.faults import Fault, FaultedRun
from tests.training.faults.judgement import Finding, Reference
from tests.training.faults.network import two_machines

pytestmark = pytest.mark.slow
MOST_STARTS = 2


@pytest.mark.parametrize("fault", NETWORK, ids=lambda fault: fault.name)
def test_a_run_over_a_cut_network_ends_with_the_right_weights(
    start: Callable[..., Any],
    base_flags: tuple[str, ...],
    tmp_path: Path,
    undisturbed: Callable[..., Reference],
    findings: list[Finding],
    fault: Fault,
) -> None:
    run = FaultedRun(fault, tmp_path / "faulted")
    with two_machines() as machines:
        while not run.codes or (run.codes[-1] and len(run.codes) < MOST_STARTS):
            launchers = [
                start(machine.command(run.command(base_flags)), env=run.environment | machine.environment, wait=False)
                for machine in machines
            ]
            run.take(*launchers)

    found = run.finding(undisturbed())

    assert (found.lost, found.repeated, found.difference) == (0, 0, 0.0)
    findings.append(found)
