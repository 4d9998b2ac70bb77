"""The benchmark of the browser's kernels; what it measures is tested in tests/inference/web."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import browser
from common.errors import UserError


def test_a_missing_onnxruntime_web_is_named_with_the_command_that_brings_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no onnxruntime-web; npm install onnxruntime-web") as refused:
        browser.write_site(tmp_path / "site", tmp_path / "model", tmp_path / "node_modules")
    assert refused.value.code == "benchmark-input"


def test_a_row_compares_within_rounds() -> None:
    found = {name: [10.0, 40.0] for name in browser.CASES} | {browser.ORT: [30.0, 80.0]}
    row = next(line for line in browser.pass_table(found).splitlines() if line.startswith(f"| {browser.OURS} |"))
    assert row == f"| {browser.OURS} | 25.0 (10.0 to 40.0) | 2.50 | 1.00 | 1.00 |"


def test_the_first_answer_counts_code_and_model_apart() -> None:
    start = {"seconds": 0.5, "code": 100_000, "model": 24_500_000}
    assert f"| {browser.OURS} | 0.50 (0.50 to 0.50) | 100 | 24.5 |" in browser.start_table({browser.OURS: [start] * 2})
