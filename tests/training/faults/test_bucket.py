"""The server of a bucket goes away in the middle of a save, and comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.training.checkpointing.s3_server import CREDENTIALS, Line, s3_server
from tests.training.faults.cases import BUCKET
from tests.training.faults.faults import FaultedRun
from tests.training.faults.judgement import Finding, Reference

REPORTED = "Training continues, but the checkpoint"


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """A line to a server with an empty bucket; it breaks before rank 1's file of step 6 arrives."""
    with s3_server() as port:
        line = Line(port)
        for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}"}).items():
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        fsspec.filesystem("s3").mkdir("bucket")
        line.cut_at = b"PUT /bucket/run/step_00000006/__1_0.distcp"
        yield line


@pytest.mark.slow
def test_a_bucket_that_goes_away_in_a_save_costs_no_step(
    start: Callable[..., Any],
    base_flags: tuple[str, ...],
    tmp_path: Path,
    undisturbed: Callable[..., Reference],
    findings: list[Finding],
    line: Line,
) -> None:
    [fault] = BUCKET
    run = FaultedRun(fault, tmp_path / "faulted")
    started = start(run.command(base_flags), env=run.environment, wait=False)
    started.wait_until(lambda: REPORTED in started.out)
    line.restore()
    run.take(started)

    found = run.finding(undisturbed())

    assert (found.lost, found.repeated, found.difference) == (0, 0, 0.0)
    findings.append(found)
