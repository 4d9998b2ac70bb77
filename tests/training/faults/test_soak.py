"""A hundred kills, one after the other, at moments drawn by chance from all phases of a run."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.faults.cases import KILLS, SOAK
from tests.training.faults.faults import FaultedRun
from tests.training.faults.judgement import Finding, Reference

SECONDS = 2 * 3600.0


@pytest.mark.slow
def test_a_run_killed_a_hundred_times_ends_with_the_weights_of_one_never_killed(
    start: Callable[..., Any],
    base_flags: tuple[str, ...],
    tmp_path: Path,
    undisturbed: Callable[..., Reference],
    findings: list[Finding],
) -> None:
    [fault] = SOAK
    run = FaultedRun(fault, tmp_path / "faulted")
    run.take(start(run.command(base_flags), env=run.environment, wait=False), seconds=SECONDS)

    found = run.finding(undisturbed(fault.epochs))

    assert len(re.findall(r"failed \(exitcode", run.printed)) >= KILLS
    assert (found.lost, found.repeated, found.difference) == (0, 0, 0.0)
    findings.append(found)
