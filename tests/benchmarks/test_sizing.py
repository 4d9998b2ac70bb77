"""The page that containers are sized by: one row a case, medians over its rounds, dollars from what was measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sizing import render


def figures(rate: float) -> dict[str, float]:
    return {"texts_per_second": rate, "p50_ms": 8.0, "p99_ms": 20.0, "memory_mb": 200.0, "cpu_s_per_1000": 10.0}


def test_dollars_are_those_of_all_cores_for_the_median_rate() -> None:
    rounds = [figures(rate) for rate in (10.0, 100.0, 1000.0)]
    case = {"model": "news", "engine": "native", "cores": 2, "rounds": rounds}
    page = render({"facts": {}, "seconds": 5, "dollars_per_core_hour": 0.36, "cases": [case]})
    # 360,000 texts an hour for 0.72 dollars.
    assert "| news, native | 2 | 100.0 | 8 | 20 | 200 | 10.0 | 2.00 |" in page


@pytest.mark.parametrize("wrong", [["no/such/model"], pytest.param([], marks=pytest.mark.slow)])
def test_a_model_that_cannot_be_served_ends_in_one_line(wrong: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.sizing", *wrong, "--output", str(tmp_path / "page.md")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "page.md").exists()
