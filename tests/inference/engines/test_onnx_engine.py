from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from transformers import pipeline

from common.hardware import Hardware, usable_cpus
from common.rows import evenly_spread
from inference import export
from inference.engines.base import PASSES_AT_ONCE
from inference.engines.model_loader import ModelLoader
from inference.exporting.comparison import TURN_TEXTS

pytest.importorskip("onnxruntime", reason="the onnx engine needs onnxruntime")
pytest.importorskip("onnx", reason="exporting needs onnx")


def test_fp32_answers_equal_those_of_the_transformers_pipeline(
    folder_copy: Path, rows_file: Path, texts: list[str]
) -> None:
    rows = ["--rows", str(rows_file), "--limit", "50"]
    export.main([str(folder_copy), "--engine", "onnx", "--precision", "fp32", *rows, "--max_drop", "0"])
    model = ModelLoader(folder_copy)
    assert model.engine.name == "onnx fp32"
    classify = pipeline("text-classification", model=str(folder_copy), top_k=None)
    many = texts * 3  # more than one forward pass, of mixed lengths
    for answer, expected in zip(model.predict_batch(many), classify(many, truncation=True), strict=True):
        scores = {one["label"]: one["score"] for one in expected}
        assert answer["probabilities"] == pytest.approx(scores, abs=1e-5)


def test_int8_disagrees_with_the_reference_as_often_as_its_manifest_says(
    exported_folder: Path, rows_file: Path
) -> None:
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    rows = [rows[i] for i in evenly_spread(len(rows), 99)]  # as the export took them
    model = ModelLoader(exported_folder, "onnx")
    # In the export's portions: activations have one range a forward pass, so neighbours matter a little.
    portions = [rows[start : start + TURN_TEXTS] for start in range(0, len(rows), TURN_TEXTS)]
    answers = [answer for portion in portions for answer in model.predict_batch([row["text"] for row in portion])]
    changed = [answer["label"] != row["label"] for answer, row in zip(answers, rows, strict=True)]
    accuracy = json.loads((exported_folder / "onnx" / "manifest.json").read_text())["accuracy"]
    assert accuracy["disagreement_percent"] == pytest.approx(100 * np.mean(changed), abs=1e-3)
    assert accuracy["flipped"]["right_to_wrong"] == sum(changed)
    assert accuracy["before"] == 1


def test_a_text_gets_the_same_answer_alone_and_in_a_batch(exported_folder: Path, texts: list[str]) -> None:
    model = ModelLoader(exported_folder, "onnx")
    # Not to the last digit: int8 activations have one range a batch.
    for text, answer in zip(texts, model.predict_batch(texts), strict=True):
        assert answer["probabilities"] == pytest.approx(model.predict(text)["probabilities"], abs=0.1)


def test_passes_that_run_at_the_same_time_answer_as_alone_with_few_threads_beside_the_processors(
    exported_folder: Path, texts: list[str]
) -> None:
    before = _num_threads()
    model = ModelLoader(exported_folder, "onnx", Hardware(threads=8))
    alone = [model.predict(text) for text in texts * 10]
    with ThreadPoolExecutor(PASSES_AT_ONCE) as pool:
        assert list(pool.map(model.predict, texts * 10)) == alone
        assert _num_threads() - before <= usable_cpus() + PASSES_AT_ONCE


def _num_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def test_the_runtime_sends_no_telemetry(exported_folder: Path, tmp_path: Path) -> None:
    # What it reports under is kept below the home folder.
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    command = [sys.executable, "-m", "inference.predict", "--model", exported_folder, "--engine", "onnx", "News"]
    done = subprocess.run(command, env={**environment, "HOME": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*")) == []
