"""The undisturbed run, a run with a fault, and the option with which the suite writes its table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.faults.cases import FAMILIES
from tests.training.faults.faults import FAULT_INJECTION, FLAGS, Fault, run_and_judge
from tests.training.faults.judgement import Finding, Reference, lineage, rows_of_rank, state_of
from tests.training.faults.table import write_faults


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write_faults", metavar="PAGE", default="", help="write the table of faults into PAGE")


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, launch_shared: Callable[..., Any]
) -> Callable[..., Reference]:
    """`undisturbed(epochs, left_out, without)`: the run of a fault of these fields when nothing happens to it."""
    finished: dict[tuple[Any, ...], Reference] = {}

    def run(epochs: int = 2, left_out: tuple[int, ...] = (), without: tuple[int, ...] = ()) -> Reference:
        if (wanted := (epochs, left_out, without)) not in finished:
            folder = tmp_path_factory.mktemp("undisturbed")
            rows = rows_of_rank(1, without, run(epochs).folder) if without else []
            fewer = json.dumps({"steps": left_out, "rows": rows})
            environment = {"FAULT_FOLDER": str(folder), "FAULT_LEAVES_OUT": fewer}
            flags = ("--epochs", epochs, "--output_dir", folder / "model")
            ended = launch_shared(2, *FLAGS, *flags, env=environment, script=FAULT_INJECTION)
            assert ended.process.returncode == 0, ended.err
            finished[wanted] = Reference(folder, state_of(folder), lineage(folder))
        return finished[wanted]

    return run


@pytest.fixture(scope="session")
def findings(request: pytest.FixtureRequest) -> Iterator[list[Finding]]:
    """Collects what was found; with --write_faults a page's table is made of it."""
    collected: list[Finding] = []
    yield collected
    if (page := request.config.getoption("--write_faults")) and not request.session.testsfailed:
        faults = [item for item in request.session.items if "findings" in item.fixturenames]
        if len(faults) < sum(map(len, FAMILIES)):
            pytest.fail("--write_faults: for the whole table run all of tests/training/faults")
        write_faults(Path(page), collected)


@pytest.fixture
def run_with_fault(
    start: Callable[..., Any],
    base_flags: tuple[str, ...],
    tmp_path: Path,
    undisturbed: Callable[..., Reference],
    findings: list[Finding],
) -> Callable[[Fault], None]:
    """`run_with_fault(fault)`: inject it into a run, and compare its last weights with the undisturbed run's."""

    def run(fault: Fault) -> None:
        found = run_and_judge(
            fault, start, base_flags, tmp_path / "faulted", undisturbed(fault.epochs, fault.left_out, fault.without)
        )
        assert (found.lost, found.repeated, found.difference) == (0, 0, 0.0)
        findings.append(found)

    return run
