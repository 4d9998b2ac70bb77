"""Records: what a run measures of a step, an epoch and a checkpoint, and how figures are written for people."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step that all ranks agree on.

    ``seconds``: since the run's start, time before a resume included; ``rows``: of the global
    batch; ``skipped``: the weights were left as they were, ``bad``: because loss or gradient is not
    finite and no loss scale explains it; ``mfu``: of a language model the utilization of the
    devices, 0 to 1; ``gpu_utilization``: the share of the time in which this rank's GPU computed, 0
    to 1; ``accuracy``: of the answers that the step learned from, so with dropout, None if the task
    has none.
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
    mfu: float | None = None
    gpu_utilization: float | None = None
    accuracy: float | None = None

    def known(self) -> dict[str, Any]:
        """The fields that have a value."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def step_seconds(self) -> float:
        """Mean time of the steps that were agreed on together with this one."""
        return self.rows / self.samples_per_second


@dataclass(frozen=True)
class EpochMetrics:
    """An evaluation on the validation rows; ``validation`` has the loss, and what the task
    measures. Without validation rows it is empty, and each epoch counts as better than the one
    before.

    ``epoch``: how many epochs are done; within an epoch, if that is asked for, a fraction.
    ``train_loss``, ``train_accuracy`` and ``seconds`` are those of the epoch so far.
    """

    epoch: float
    step: int
    train_loss: float
    seconds: float
    validation: dict[str, Any]
    is_best: bool
    train_accuracy: float | None = None


@dataclass(frozen=True)
class Metric:
    """A figure of an evaluation besides its loss: how people call it, and whether it is a share, shown in percent."""

    title: str
    is_share: bool = True

    def shown(self, value: float) -> str:
        return format_percent(value) if self.is_share else f"{value:.4g}"


# Evaluations have some of these, in the order of their task: the first two are shown wherever there
# is little room. What is not in the table is a user's own metric.
METRICS = {
    "accuracy": Metric("accuracy"),
    "micro_f1": Metric("micro F1"),
    "macro_f1": Metric("macro F1"),
    "exact_match": Metric("all labels right"),
    "calibration_error": Metric("calibration error"),
    "rmse": Metric("RMSE", is_share=False),
    "mae": Metric("mean absolute error", is_share=False),
    "r2": Metric("R²", is_share=False),
    "spearman": Metric("Spearman correlation", is_share=False),
    "cosine": Metric("cosine similarity", is_share=False),
    "perplexity": Metric("perplexity", is_share=False),
    "token_accuracy": Metric("tokens right"),
}
SMALLER_IS_BETTER = ("loss", "rmse", "mae", "perplexity")


def metrics_of(evaluation: Mapping[str, Any]) -> dict[str, Metric]:
    figures = [
        name for name, value in evaluation.items() if isinstance(value, float) and name != "loss"
    ]
    return {name: METRICS.get(name, Metric(name, is_share=False)) for name in figures}


def score_of(validation: Mapping[str, Any], metric: str) -> float:
    """How good an evaluation is by one of its metrics, the larger the better."""
    return -validation[metric] if metric in SMALLER_IS_BETTER else validation[metric]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint: how long training waited for it, how long it took in all, and its size."""

    step: int
    blocked_seconds: float
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class CollectiveUse:
    """One rank's calls of one collective operation in a step.

    ``num_bytes``: what the rank passed to them; ``seconds``: of each call with gloo, of each kernel
    with NCCL, the wait for other ranks included.
    """

    calls: int
    num_bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class SearchedTrial:
    """One trial of a search that has ended: ``finished``, ``pruned`` or ``failed``.

    ``value``: the metric on the validation rows, of the best epoch, or of the last one if it was
    pruned, None if it failed; ``epoch``: that epoch; ``seconds``: of training; ``values``: of the
    searched fields.
    """

    number: int
    state: str
    value: float | None
    epoch: int | None
    seconds: float | None
    values: dict[str, Any]
    error: str = ""


def wilson_interval(share: float, rows: int) -> tuple[float, float]:
    """The 95% interval of a share measured on ``rows`` independent rows.

    Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference".
    """
    if rows == 0:
        return 0.0, 1.0
    # The simpler share +- z sqrt(share (1 - share) / rows) has no width at a share of 0 or 1: a
    # model that gets all of 20 rows right would be certain to be perfect. This one has.
    z = 1.959964
    middle = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = (
        z / (1 + z * z / rows) * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def calibration_in_words(evaluation: Mapping[str, Any]) -> str:
    """How sure the answers are and how often they are right, and what helps if these differ; empty
    if the evaluation does not tell.
    """
    bins, rows = evaluation.get("reliability"), evaluation["rows"]
    if not bins:
        return ""
    right = evaluation["accuracy"]
    sure = sum(count * confidence for count, confidence, _ in bins) / rows
    # A calibration error has no sign, so a modest model looks as bad as a boastful one. Below two
    # points, and within chance, there is nothing to report.
    limit = 0.02 + 2 * math.sqrt(right * (1 - right) / rows)
    verdict = "as it should be"
    if sure < right - limit:
        verdict = "too modest; more epochs help"
    elif sure > right + limit:
        verdict = "too sure; fewer epochs or --label_smoothing help"
    found = f"answers with {sure:.0%} confidence on average and is right {right:.0%} of the time"
    return f"{found}: {verdict}"


def format_percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f}%"


def format_time(seconds: float) -> str:
    """Seconds as a person reads them: ``42.3s``, ``3m 05s``, ``2h 07m``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    # Rounded before it is split, or 119.7 seconds would read 1m 60s.
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
