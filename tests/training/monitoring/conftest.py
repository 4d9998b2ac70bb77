import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from training.monitoring import EpochMetrics, StepMetrics
from training.monitoring.events import MetricsFile, RunTested
from training.monitoring.report import ReportData, WrongText

NEWS = ("World", "Sports", "Business", "Sci/Tech")


def _evaluation(labels: Sequence[str] = NEWS, right: int = 45, wrong: int = 5) -> dict[str, Any]:
    # Each class: `right` texts on the diagonal, `wrong` taken for the next class.
    classes = range(len(labels))
    matrix = [[0] * len(labels) for _ in classes]
    for label in classes:
        matrix[label][label] = right
        matrix[label][(label + 1) % len(labels)] += wrong
    share = right / (right + wrong)
    figures = {"precision": share, "recall": share, "f1": share, "rows": right + wrong}
    return {
        "rows": len(labels) * (right + wrong),
        "loss": 0.3,
        "accuracy": share,
        "macro_f1": share,
        "calibration_error": 0.02,
        "reliability": [[len(labels) * (right + wrong), 0.55, share]],
        "labels": list(labels),
        "per_class": {label: dict(figures) for label in labels},
        "confusion_matrix": matrix,
    }


def _step(step: int, loss: float | None = None) -> StepMetrics:
    return StepMetrics(
        step=step,
        epoch=1,
        loss=math.exp(-step / 100) if loss is None else loss,
        learning_rate=2e-5,
        grad_norm=1.5,
        samples_per_second=100.0,
        tokens_per_second=9000.0,
        seconds=0.5 * step,
    )


def _epoch(epoch: int, step: int, is_best: bool = True) -> EpochMetrics:
    return EpochMetrics(epoch, step, train_loss=0.4, seconds=60.0, validation=_evaluation(), is_best=is_best)


def _report_data(test: dict[str, Any], texts: Sequence[WrongText] = ()) -> ReportData:
    return ReportData(
        title="DistilBERT on AG News",
        command="training/run_ddp.sh 2 --dataset ag_news",
        configuration={"dataset": "ag_news", "epochs": 3, "learning_rate": 2e-5},
        changed={"learning_rate": 2e-5},
        environment={"torch": "2.13.0", "device": "cpu"},
        test=test,
        wrong_texts=list(texts),
        doubted_texts=[],
        notes=["2% of the texts were cut."],
        seconds=160.0,
        model_folder="checkpoints/distilbert_agnews",
    )


def _write_run(run_dir: Path, steps: int = 60, epochs: int = 3, labels: Sequence[str] = NEWS) -> Path:
    """A run folder with the curves of a finished run."""
    file = MetricsFile(run_dir, resume_step=0)
    for step in range(1, steps + 1):
        file.receive(_step(step))
    for epoch in range(1, epochs + 1):
        file.receive(_epoch(epoch, step=max(1, steps) * epoch // epochs))
    file.receive(RunTested(steps, _evaluation(labels)))
    return run_dir


@pytest.fixture(scope="session")
def evaluation() -> Callable[..., dict[str, Any]]:
    return _evaluation


@pytest.fixture(scope="session")
def step_metrics() -> Callable[..., StepMetrics]:
    return _step


@pytest.fixture(scope="session")
def epoch_metrics() -> Callable[..., EpochMetrics]:
    return _epoch


@pytest.fixture(scope="session")
def report_data() -> Callable[..., ReportData]:
    return _report_data


@pytest.fixture(scope="session")
def write_run() -> Callable[..., Path]:
    return _write_run
