"""Lines stay whole whoever writes them, and what the disk refuses is lost alone."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import here
from training.monitoring.json_lines import JsonLines, read_lines


def _write_many(path: Path, count: int) -> None:
    lines = JsonLines(path)
    for number in range(count):
        assert lines.write({"rank": here().rank, "number": number, "text": "x" * (number % 300)})


def test_ranks_that_write_at_once_tear_no_line(tmp_path: Path, run_on_ranks: Callable[..., Any]) -> None:
    run_on_ranks(3, _write_many, tmp_path / "lines", 400)

    records = read_lines(tmp_path / "lines")
    assert len(records) == len((tmp_path / "lines").read_bytes().splitlines()) == 1200
    for rank in range(3):
        assert [record["number"] for record in records if record["rank"] == rank] == list(range(400))


def test_a_full_disk_loses_the_line_and_raises_nothing() -> None:
    assert not JsonLines(Path("/dev/full")).write({"step": 1})
    assert not JsonLines(Path("/no/such/folder/lines")).write({"step": 1})


def test_a_line_that_the_disk_tears_spoils_no_later_one(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "lines")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert lines.write({"step": 1})
    # The system writes what fits and refuses the rest, as a disk that runs full does.
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "lines").stat().st_size + 7, hard))
    try:
        written = [lines.write({"step": 2}), lines.write({"step": 3})]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert lines.write({"step": 4})

    assert written == [False, False]
    assert read_lines(tmp_path / "lines") == [{"step": 1}, {"step": 4}]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_null_however_deep(tmp_path: Path, value: float) -> None:
    JsonLines(tmp_path / "lines").write({"a": {"b": [value, 1.5]}})

    assert json.loads((tmp_path / "lines").read_text()) == {"a": {"b": [None, 1.5]}}
