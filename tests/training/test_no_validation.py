"""Runs that train on all rows: there is no validation, and the last epoch is the one that is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from common.model_folder import METRICS_KEYS, read_saved_model
from training.config import TrainConfig
from training.data.prepare import _check_no_validation_needed

Train = Callable[..., int]
Metrics = Callable[..., list[dict[str, Any]]]
ALL_ROWS = ("--validation_fraction", 0, "--batch_size", 16)


def test_without_validation_all_rows_are_trained_on_and_the_last_epoch_is_written(
    train_here: Train, metrics_of: Metrics, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model"

    assert train_here(*ALL_ROWS, "--epochs", 2, "--trackers", "", "--output_dir", output, with_plots=True) == 0

    printed = capfd.readouterr()
    report = (tmp_path / "model.run" / "report.html").read_text()
    metrics = json.loads((output / "metrics.json").read_text())
    assert "63 training, no validation, " in printed.out
    assert "Last epoch" in printed.out
    assert "* best" not in printed.out
    assert "Testing epoch 2 on" in printed.out
    assert metrics.keys() <= METRICS_KEYS  # a server publishes these
    assert metrics["examples"].keys() <= set(metrics["test"]["labels"])
    assert (metrics["train_rows"], metrics["best_epoch"], metrics["validation"]) == (63, 2, None)
    assert "after the last epoch (2); no validation split chose" in (output / "README.md").read_text()
    assert report.count("<td>none</td>") == 2
    assert "(best)" not in report
    assert "No rows were kept for validation" in report
    assert [record["validation"] for record in metrics_of(tmp_path / "model.run", "epoch")] == [{}, {}]
    plots = {path.stem: Image.open(path).size for path in (tmp_path / "model.run" / "plots").iterdir()}
    assert plots.keys() == {"loss", "learning_rate", "throughput", "gradient_norm", "confusion_matrix", "reliability"}
    assert all(min(size) > 500 for size in plots.values())
    assert read_saved_model(output).metadata["best_epoch"] == 2


@pytest.mark.slow
def test_a_resumed_run_without_validation_ends_with_the_same_weights(train_here: Train, tmp_path: Path) -> None:
    for name in ("whole", "resumed"):
        flags = (*ALL_ROWS, "--save_every", 2, "--keep_last", 9, "--output_dir", tmp_path / name)
        assert train_here(*flags) == 0
    assert train_here(*flags, "--resume", tmp_path / "resumed.run" / "checkpoints" / "step_00000004") == 0

    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    "flags", [("--best_metric", "loss"), ("--early_stopping", "2"), ("--evaluate_every", "3")], ids=" ".join
)
def test_what_needs_validation_rows_is_refused_without_them(
    flags: tuple[str, str], train_here: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train_here(*ALL_ROWS, *flags) == 2

    assert (
        f"error: {flags[0]} {flags[1]} and --validation_fraction 0: without validation rows" in capfd.readouterr().err
    )


def test_an_encoder_may_learn_vectors_from_all_rows() -> None:
    _check_no_validation_needed(TrainConfig(task="embedding", distill="teacher", validation_fraction=0))


def test_validation_rows_that_the_data_brings_are_used_even_if_none_are_to_be_kept(
    train_here: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for split, count in (("train", 24), ("validation", 6), ("test", 4)):
        rows = "".join(f"{split} {i},{'ab'[i % 2]}\n" for i in range(count))
        (tmp_path / f"{split}.csv").write_text("text,label\n" + rows)

    code = train_here(*ALL_ROWS, "--dataset", tmp_path, "--best_metric", "loss", "--output_dir", tmp_path / "model")

    assert code == 0
    assert "24 training, 6 validation, 4 test rows" in capfd.readouterr().out
