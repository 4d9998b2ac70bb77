"""Runs on labels of unequal frequency: weights, balanced batches, the metric that decides, and an early end."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.model_folder import read_saved_model
from training.config import TrainConfig
from training.data.prepare import class_weights_of

Train = Callable[..., int]
Metrics = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def rare(tmp_path: Path) -> Path:
    """A folder of data in which one row of ten is about `storm`."""
    folder = tmp_path / "rare"
    folder.mkdir()
    for split, count in (("train", 80), ("test", 20)):
        rows = (f"a storm, {split} {i};storm" if i % 10 == 0 else f"the sea, {split} {i};calm" for i in range(count))
        (folder / f"{split}.csv").write_text("text;label\n" + "\n".join(rows))
    return folder


@pytest.mark.parametrize(
    "flags",
    [("--class_weights", "auto"), pytest.param(("--sampling", "balanced"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_two_ranks_train_as_one_does(
    flags: tuple[str, ...], rare: Path, launch: Callable[..., Any], metrics_of: Metrics, tmp_path: Path
) -> None:
    losses = []
    for world_size in (1, 2):
        output = tmp_path / f"on_{world_size}"
        sizes = ("--batch_size", 8 // world_size, "--epochs", 1, "--output_dir", output)
        run = launch(world_size, "--dataset", rare, *flags, *sizes)
        assert run.process.returncode == 0, run.err
        losses.append([record["loss"] for record in metrics_of(tmp_path / f"on_{world_size}.run")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_labels_that_yaml_takes_for_something_else_get_their_weights(tmp_path: Path) -> None:
    (tmp_path / "weights.yaml").write_text("no: 1\nyes: 2.5\n007: 3\n")
    data: Any = SimpleNamespace(tokens=SimpleNamespace(label_names=["no", "yes", "007"]))
    config = TrainConfig(class_weights=str(tmp_path / "weights.yaml"))
    assert class_weights_of(config, data, None).tolist() == [1, 2.5, 3]


@pytest.mark.slow
def test_a_run_with_class_weights_resumes_with_those_that_it_began_with(
    rare: Path, train_here: Train, metrics_of: Metrics, tmp_path: Path
) -> None:
    file = tmp_path / "weights.yaml"

    def train(name: str, *flags: object) -> int:
        fixed = (
            "--dataset",
            rare,
            "--class_weights",
            file,
            "--batch_size",
            8,
            "--save_every",
            3,
            "--keep_last",
            4,
            "--epochs",
            1,
        )
        return train_here(*fixed, "--output_dir", tmp_path / name, *flags)

    file.write_text("calm: 1\nstorm: 9\n")
    assert train("whole") == 0
    assert train("resumed") == 0
    last = tmp_path / "resumed.run" / "checkpoints" / "step_00000003"
    file.write_text("calm: 1\nstorm: 0.5\n")
    assert train("resumed", "--resume", last) == 0
    file.unlink()
    assert train("resumed", "--resume", last) == 0

    losses = {
        name: [record["loss"] for record in metrics_of(tmp_path / f"{name}.run")] for name in ("whole", "resumed")
    }
    assert losses["resumed"] == losses["whole"]
    assert "calm 1, storm 9" in (tmp_path / "resumed.run" / "report.html").read_text()


def test_training_stops_when_no_epoch_is_better_any_more_and_keeps_the_last_of_the_best(
    rare: Path, train_here: Train, metrics_of: Metrics, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model"
    # With so small a rate no answer changes, so all epochs are as good as the first.
    flags = ("--dataset", rare, "--learning_rate", 1e-9, "--epochs", 9, "--early_stopping", 2, "--output_dir", output)

    assert train_here(*flags) == 0
    first = capfd.readouterr().out
    assert train_here(*flags) == 0

    assert [record["epoch"] for record in metrics_of(tmp_path / "model.run", "epoch")] == [1, 2, 3]
    assert "Stopping after epoch 3 of 9: the last 2 evaluations had no better accuracy than epoch 1" in first
    assert read_saved_model(output).metadata["best_epoch"] == 3
    assert "Training stopped after epoch 3 of 9" in (tmp_path / "model.run" / "report.html").read_text()


def test_the_best_epoch_by_the_metric_asked_for_is_tested_and_its_answers_are_kept_row_by_row(
    rare: Path, train_here: Train, metrics_of: Metrics, tmp_path: Path
) -> None:
    output = tmp_path / "model"
    code = train_here("--dataset", rare, "--best_metric", "loss", "--epochs", 4, "--output_dir", output)

    with (tmp_path / "model.run" / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    epochs = metrics_of(tmp_path / "model.run", "epoch")
    best = min(epochs, key=lambda epoch: epoch["validation"]["loss"])["epoch"]
    metrics = json.loads((output / "metrics.json").read_text())
    assert code == 0
    assert metrics["best_epoch"] == best
    assert [epoch["epoch"] for epoch in epochs if epoch["is_best"]][-1] == best
    assert [(row["row"], row["label"], row["text"]) for row in rows[:2]] == [
        ("0", "storm", "a storm, test 0"),
        ("1", "calm", "the sea, test 1"),
    ]
    right = [row["label"] == row["predicted"] for row in rows]
    assert sum(right) / len(right) == pytest.approx(metrics["test"]["accuracy"])
    assert all(0.5 <= float(row["confidence"]) <= 1 for row in rows)
