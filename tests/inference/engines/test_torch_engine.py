"""PyTorch as the engine: precisions, and torch.compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inference.engines.base import TokenBatch
from inference.engines.torch_engine import TorchEngine

REPOSITORY = Path(__file__).resolve().parents[3]
BATCH = TokenBatch.of([[2, 7, 9, 3], [2, 5, 3], [2, 11, 12, 13, 14, 3]])


def _engine(model_folder: Path, *arguments: str, compiled: bool = False) -> TorchEngine:
    config = json.loads((model_folder / "config.json").read_text())
    return TorchEngine(config, model_folder / "model.safetensors", *arguments, compiled=compiled)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.01)])
def test_half_precision_follows_float32(model_folder: Path, precision: str, tolerance: float) -> None:
    half = _engine(model_folder, precision)
    full = _engine(model_folder, "fp32")
    assert half.precision == precision
    expected, found = full.logits(BATCH), half.logits(BATCH)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_logits_for_every_length(model_folder: Path) -> None:
    compiled = _engine(model_folder, "fp32", compiled=True)
    plain = _engine(model_folder, "fp32")
    for batch in (BATCH, TokenBatch.of([[2, 3]]), TokenBatch.of([[2, *range(5, 20), 3]] * 2)):
        np.testing.assert_allclose(compiled.logits(batch), plain.logits(batch), atol=1e-5)


@pytest.mark.slow
def test_a_model_that_cannot_be_compiled_ends_in_one_line_and_exit_code_2(model_folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": str(tmp_path / "no-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "inference.predict", "--model", str(model_folder), "--engine", "torch_compiled"]
    run = subprocess.run(
        [*command, "News"], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=180
    )
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert "fails on a text of " in line
    assert "serve it with another engine" in line


def test_overwriting_or_truncating_the_weights_file_changes_no_answer(folder_copy: Path) -> None:
    engine = _engine(folder_copy)
    before = engine.logits(BATCH)
    weights = folder_copy / "model.safetensors"
    with weights.open("r+b") as file:
        file.write(bytes(weights.stat().st_size))
    np.testing.assert_array_equal(engine.logits(BATCH), before)
    weights.write_bytes(b"")
    np.testing.assert_array_equal(engine.logits(BATCH), before)
