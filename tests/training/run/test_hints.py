"""Hints at the end of a run: given for clear evidence, and for nothing else."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.config import TrainConfig
from training.evaluation.baseline import Baseline, Gain
from training.monitoring.records import EpochMetrics
from training.run.hints import Evidence, hints_of, is_clear_gain
from training.tasks import Classification, MultiLabelClassification, Regression

BETTER, EVEN = Gain("accuracy", -0.3, 0.01), Gain("accuracy", 0.001, 0.01)


def _epochs(
    train: Sequence[float], loss: Sequence[float], scores: Sequence[float], rows: int, metric: str = "accuracy"
) -> list[EpochMetrics]:
    best = -math.inf
    found = []
    for i, (a, b, score) in enumerate(zip(train, loss, scores, strict=True), start=1):
        value = -score if metric == "rmse" else score
        found.append(EpochMetrics(i, 10 * i, a, 1.0, {"rows": rows, "loss": b, metric: score}, value >= best))
        best = max(best, value)
    return found


def _run(
    train: Sequence[float],
    loss: Sequence[float],
    scores: Sequence[float],
    *,
    rows: int = 600,
    num_labels: int = 77,
    confidence: float | None = None,
    accuracy: float | None = None,
    gain: Gain | None = None,
    metric: str = "accuracy",
    chance_loss: float | None = None,
    cut: float = 0.0,
    linear: float = 0.8,
    **flags: Any,
) -> Evidence:
    right = scores[-1] if accuracy is None else accuracy
    per_class = {str(label): {"rows": 3000 // num_labels} for label in range(num_labels)}
    return Evidence(
        config=TrainConfig(**{"epochs": len(train), **flags}),
        learning_rate=flags.get("learning_rate", 2e-5),
        epochs=_epochs(train, loss, scores, rows, metric),
        test={"rows": 3000, metric: right, "per_class": per_class},
        chance_loss=math.log(num_labels) if chance_loss is None else chance_loss,
        confidence=confidence,
        baseline=gain and Baseline("TF-IDF", (9, 9), {}, {"rows": 3000, "accuracy": linear}, gain),
        share_cut=cut,
    )


# What runs printed: training losses, validation losses and accuracies by epoch, rows, labels, mean confidence.
HEALTHY = {
    "starter on the sample": _run(
        (0.985, 0.221, 0.080), (0.378, 0.118, 0.094), (0.962, 0.977, 0.977), rows=132, num_labels=4, confidence=0.95
    ),
    "starter on 2,000 rows of AG News": _run(
        (0.848, 0.317, 0.224), (0.302, 0.254, 0.236), (0.910, 0.910, 0.915), rows=199, num_labels=4, confidence=0.91
    ),
    "two labels": _run((0.294, 0.062), (0.106, 0.088), (0.973, 0.98), rows=150, num_labels=2, confidence=0.98),
    "97% of one label": _run((0.134, 0.03), (0.022, 0.02), (0.99, 0.99), rows=196, chance_loss=0.136, confidence=0.99),
    "one epoch": _run((1.2,), (0.5,), (0.85,), rows=200, num_labels=4, confidence=0.8),
    "starter on 8 rows of each of 77 labels, 12 epochs": _run(
        (4.29, 2.39, 0.97, 0.36, 0.08, 0.04),
        (3.77, 2.23, 1.53, 1.28, 1.28, 1.31),
        (0.26, 0.53, 0.61, 0.69, 0.65, 0.70),
        rows=77,
        confidence=0.74,
    ),
    "ten points too sure": _run((0.5, 0.1), (0.5, 0.6), (0.85, 0.84), num_labels=4, confidence=0.95),
    "emotions, several per text": _run(
        (0.253, 0.119, 0.112), (0.145, 0.113, 0.112), (0.126, 0.449, 0.472),
        task="multi_label", metric="micro_f1", chance_loss=0.147,
    ),
    "similarity of sentences": _run(
        (0.976, 0.758, 0.613), (0.883, 0.856, 0.848), (1.359, 1.338, 1.331),
        task="regression", metric="rmse", chance_loss=1.0, rows=299,
    ),
    "stopped early, overfitting": _run(
        (0.6, 0.3, 0.2), (0.5, 0.55, 0.6), (0.81, 0.80, 0.80), num_labels=4, early_stopping=2, epochs=9
    ),
    "stopped early, the loss stands still": _run(
        (0.6, 0.5, 0.48), (0.52, 0.50, 0.499), (0.81, 0.80, 0.80), num_labels=4, early_stopping=2, epochs=9
    ),
    "as good as the baseline": _run((0.6, 0.3), (0.3, 0.25), (0.91, 0.91), num_labels=4, gain=EVEN),
    "no validation rows": Evidence(
        TrainConfig(epochs=2),
        2e-5,
        [EpochMetrics(i, 10 * i, 0.6 / i, 1.0, {}, True) for i in (1, 2)],
        {"rows": 9, "accuracy": 0.9},
        1.4,
        0.9,
    ),
    "numbers that are hard to tell": _run(
        (0.99, 0.92), (0.95, 0.90), (1.20, 1.17),
        task="regression", metric="rmse", chance_loss=1.0, gain=Gain("rmse", 0.05, 0.01),
    ),
}  # fmt: skip


@pytest.mark.parametrize("run", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_run_has_none(run: Evidence) -> None:
    assert hints_of(run) == []


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (
            _run((4.38, 4.16, 4.08), (4.23, 4.11, 4.06), (0.05, 0.14, 0.19), rows=77, confidence=0.02, gain=BETTER),
            ["The network has hardly begun to learn: its loss is 4.06, and guessing costs 4.34. "
             "Try a higher --learning_rate (it was 2e-05) or --epochs 6."],
        ),
        (
            _run((4.6, 4.7), (4.6, 4.7), (0.01, 0.01), learning_rate=0.05),
            ["its loss is 4.7, and guessing costs 4.34. Try a lower --learning_rate (it was 0.05) or --epochs 4."],
        ),
        (
            _run((1.42, 1.34, 1.29), (1.40, 1.41, 1.41), (0.28, 0.26, 0.27), num_labels=4, gain=EVEN, linear=0.265),
            ["The linear baseline finds nothing either, so the texts may not tell the labels."],
        ),
        (
            _run((3.64, 2.34, 1.77), (2.66, 1.79, 1.54), (0.551, 0.699, 0.732), confidence=0.29, gain=BETTER),
            ["The validation accuracy was still rising at the last epoch (69.90%, then 73.20%): "
             "the same command continues this run with --epochs 6.",
             "The network is too unsure: 73% of its answers are right, at a mean confidence of 29%. "],
        ),
        (
            _run((3.6, 1.8), (2.6, 1.5), (0.55, 0.73), resume="none"),
            ["the same command continues this run with --resume auto and --epochs 4."],
        ),
        (
            _run((3.6, 1.8), (2.6, 1.5), (0.55, 0.73), budget="2m", epochs=2),
            ["(55.00%, then 73.00%): try a longer --budget."],
        ),
        (
            _run((0.9, 0.6), (0.9, 0.6), (1.4, 1.1), task="regression", metric="rmse", chance_loss=1.0),
            ["The validation RMSE was still falling at the last epoch (1.4, then 1.1)"],
        ),
        (
            _run((0.9, 0.1, 0.01), (0.9, 1.0, 1.3), (0.70, 0.72, 0.71), num_labels=4, confidence=0.97),
            ["The network is too sure: 71% of its answers are right, at a mean confidence of 97%. "
             "Try fewer --epochs or --label_smoothing 0.1."],
        ),
        (
            _run((0.62, 0.50, 0.43), (0.61, 0.49, 0.42), (0.15, 0.14, 0.14), task="multi_label", metric="micro_f1",
                 chance_loss=1.0, early_stopping=2, epochs=5),
            ["Early stopping came too soon: the validation loss was still falling (0.6100, 0.4900, 0.4200); "
             "the same command continues this run with --early_stopping 5."],
        ),
        (
            _run((0.17, 0.165), (0.168, 0.164), (0.2, 0.2), task="multi_label", metric="micro_f1", chance_loss=0.17),
            ["The network has hardly begun to learn: its loss is 0.164, and guessing costs 0.17."],
        ),
        (
            _run((0.6, 0.3), (0.3, 0.25), (0.91, 0.91), num_labels=4, gain=BETTER),
            ["A linear model of the words is better than this network: try --epochs 4, a higher --learning_rate"],
        ),
        (
            _run((0.6, 0.3), (0.3, 0.25), (0.91, 0.91), num_labels=4, gain=BETTER, cut=0.61),
            ["is better than this network, and 61% of the texts were cut at --max_length 128: try a larger one"],
        ),
    ],
)  # fmt: skip
def test_clear_evidence_is_said_with_the_flag_that_helps(run: Evidence, words: Sequence[str]) -> None:
    hints = hints_of(run)
    assert len(hints) == len(words), hints
    for hint, part in zip(hints, words, strict=True):
        assert part in hint


@pytest.mark.parametrize(
    ("metric", "before", "now", "rows", "is_clear"),
    [
        ("accuracy", 0.68, 0.83, 600, True),
        ("accuracy", 0.68, 0.83, 10, False),  # chance
        ("accuracy", 0.94, 0.943, 12_000, False),  # too little of the errors
        ("accuracy", 0.90, 0.95, 2_000, True),
        ("accuracy", 0.0, 0.0, 100, False),
        ("accuracy", 0.9, 1.0, 1_000, True),
        ("micro_f1", 0.4, 0.6, 145, True),
        ("r2", -0.5, 0.3, 300, True),
        ("rmse", 1.4, 1.1, 300, True),
        ("rmse", 1.4, 1.35, 300, False),
        ("perplexity", 250.0, 120.0, 1_000, True),
        ("loss", 0.0, 0.0, 10, False),
    ],
)
def test_a_gain_counts_if_it_is_beyond_chance_and_worth_an_epoch(
    metric: str, before: float, now: float, rows: int, is_clear: bool
) -> None:
    assert is_clear_gain(metric, before, now, rows) is is_clear


def test_guessing_costs_what_the_frequencies_of_the_labels_say() -> None:
    numbers = Regression(["price"])
    numbers.mean, numbers.deviation = 10.0, 2.0
    assert Classification(["a", "b"]).chance_loss(np.array([0, 1, 1, 0])) == pytest.approx(math.log(2))
    assert Classification(["a", "b", "c"]).chance_loss(np.array([1, 1])) == 0.0
    assert MultiLabelClassification(["a", "b"]).chance_loss(np.array([[1, 0], [0, 0]])) == pytest.approx(
        math.log(2) / 2
    )
    assert numbers.chance_loss(np.array([8.0, 12.0])) == pytest.approx(1.0)


def test_a_run_that_has_hardly_begun_says_so_everywhere(
    train_here: Callable[..., int], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with (tmp_path / "rows.csv").open("w") as file:
        csv.writer(file).writerows([("text", "label"), *((f"word{i % 6} number {i}", i % 6) for i in range(120))])
    flags = ("--dataset", tmp_path / "rows.csv", "--output_dir", tmp_path / "model", "--learning_rate", "1e-6")

    assert train_here(*flags) == 0

    hint = json.loads((tmp_path / "model" / "metrics.json").read_text())["hints"][0]
    assert hint.startswith("The network has hardly begun to learn: its loss is 1.")
    assert hint.endswith("Try a higher --learning_rate (it was 1e-06) or --epochs 4.")
    assert hint in capfd.readouterr().out
    assert hint in (tmp_path / "model.run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        pytest.param((), ("--epochs", "4"), marks=pytest.mark.slow),
        (("--epochs", "4", "--early_stopping", "1"), ("--early_stopping", "3")),
    ],
)
def test_the_same_command_continues_an_ended_run_as_a_hint_says(
    flags: Sequence[str],
    more: Sequence[str],
    train_here: Callable[..., int],
    metrics_of: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    command = ("--output_dir", tmp_path / "model", "--learning_rate", "1e-9", *flags)  # so that nothing improves
    assert train_here(*command) == 0
    assert [epoch["epoch"] for epoch in metrics_of(tmp_path / "model.run", "epoch")] == [1, 2]

    assert train_here(*command, *more) == 0

    assert [epoch["epoch"] for epoch in metrics_of(tmp_path / "model.run", "epoch")] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "model" / "metrics.json").read_text())["best_epoch"] == 4
