"""Records: what a run measures, and how its figures are written for people."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step that all ranks agree on.

    `seconds` counts from the run's start, time before a resume included; `rows` are those of the global batch;
    `skipped` says that the weights were left alone, `bad` that no loss scale explains it.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float
    samples_per_second: float
    tokens_per_second: float
    seconds: float
    rows: int = 0
    skipped: bool = False
    bad: bool = False

    @property
    def step_seconds(self) -> float:
        """How long the step took, in the mean of those agreed upon with it."""
        return self.rows / self.samples_per_second


@dataclass(frozen=True)
class EpochMetrics:
    """One finished epoch; `validation` is an evaluation (loss, accuracy, macro_f1, per_class ...)."""

    epoch: int
    step: int
    train_loss: float
    seconds: float
    validation: dict[str, Any]
    is_best: bool


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that stands: how long training waited for it, how long it took in all, and its size."""

    step: int
    blocked_seconds: float
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class WrongText:
    """A text the model got wrong, with the confidence (0 to 1) it had in its answer."""

    text: str
    label: str
    predicted: str
    confidence: float


@dataclass(frozen=True)
class ReportData:
    """What the report shows beside the curves of metrics.jsonl; `test` is an evaluation."""

    title: str
    configuration: dict[str, Any]
    environment: dict[str, str]
    test: dict[str, Any]
    wrong_texts: list[WrongText]
    notes: list[str]
    seconds: float
    model_folder: str


@dataclass(frozen=True)
class Curves:
    """The step and epoch records of metrics.jsonl, in order of steps, each step once."""

    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]

    def column(self, name: str) -> list[float]:
        """One field of the step records; null became NaN."""
        return [math.nan if record[name] is None else record[name] for record in self.steps]

    def validation(self, name: str) -> list[float]:
        """One figure of each epoch's validation; null became NaN."""
        figures = [record["validation"][name] for record in self.epochs]
        return [math.nan if figure is None else figure for figure in figures]


def wilson_interval(share: float, rows: int) -> tuple[float, float]:
    """Give the 95% interval of a share measured on `rows` independent rows.

    Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference".
    """
    if rows == 0:
        return 0.0, 1.0
    z = 1.959964
    middle = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z / (1 + z * z / rows) * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    return max(0.0, middle - half), min(1.0, middle + half)


def format_percent(share: float, digits: int = 2) -> str:
    """Write a share between 0 and 1 as a percentage."""
    return f"{100 * share:.{digits}f}%"


def format_time(seconds: float) -> str:
    """Seconds as a person reads them: ``42.3s``, ``3m 05s``, ``2h 07m``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
