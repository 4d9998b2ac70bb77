"""Hints: what the curves of a run say about training on, and the flag that would help.

They speak only if the evidence is clear, because nobody reads what stands under every run. All
thresholds are here, with their reasons.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from common.text import counted
from training.config import TrainConfig
from training.evaluation.baseline import Baseline
from training.monitoring.records import (
    METRICS,
    SMALLER_IS_BETTER,
    EpochMetrics,
    format_percent,
    score_of,
)
from training.run.head_start import Start

MOST_HINTS = 2
# Of the loss of a guess that knows only how frequent each label is. A network that has learned
# something is far below that, on noisy labels too; one that has hardly begun is at 0.9 or more.
CHANCE_SHARE = 0.8
# Nearly every run is best at its last epoch, because the learning rate ends at zero. It is not done
# if that epoch still removed this share of the errors, and more than the standard error of a
# difference between two samples. Epochs are validated on the same rows and agree on most of them,
# so that is about twice the standard error of their difference.
ERRORS_REMOVED = 0.1
# Between mean confidence and accuracy, in addition to two standard errors. Well trained encoders
# are up to ten points too sure of themselves.
CALIBRATION_GAP = 0.15
# If early stopping ends a run although the validation loss fell by this share in each of the last
# two evaluations, the network does not overfit: the metric has not begun to rise, as that of
# several labels for the first epochs.
LOSS_STILL_FALLS = 0.02
# Encoders diverge with a higher one, so a still higher one is no way out.
HIGH_LEARNING_RATE = 1e-3
# If more of the texts were cut than this, the baseline, which reads them whole, may know more.
MANY_CUT = 0.2


@dataclass(frozen=True)
class Evidence:
    """What is known at the end of a run.

    ``chance_loss``: of a guess that knows only how frequent each label is; None if the run's losses
    are of another kind. ``confidence``: the mean over the test rows; None if the task has none.
    ``share_cut``: of the texts.
    """

    config: TrainConfig
    learning_rate: float
    epochs: Sequence[EpochMetrics]
    test: Mapping[str, Any]
    chance_loss: float | None = None
    confidence: float | None = None
    baseline: Baseline | None = None
    share_cut: float = 0.0

    @property
    def stopped_early(self) -> bool:
        ended_before = self.epochs[-1].epoch < self.config.epochs
        return bool(self.config.early_stopping) and ended_before and not self.config.budget

    @property
    def is_best_last(self) -> bool:
        return self.epochs[-1].is_best

    @property
    def more_epochs(self) -> str:
        """The flag that makes the run longer, with a value."""
        if self.config.method == "head":
            return "--method fine_tune"
        if self.config.budget:
            return "a longer --budget"
        return f"--epochs {2 * self.config.epochs}"

    @property
    def continued(self) -> str:
        """The start of a sentence that names a flag which extends this run."""
        again = "" if self.config.resume == "auto" else " --resume auto and"
        return f"the same command continues this run with{again}"

    @property
    def other_rate(self) -> str:
        higher = "a higher" if self.learning_rate <= HIGH_LEARNING_RATE else "a lower"
        return f"{higher} --learning_rate (it was {self.learning_rate:g})"


def hints_of(run: Evidence) -> list[str]:
    """One sentence each, the most important first; empty for a run that has nothing to be said against."""
    hints = list(islice(_hints(run), MOST_HINTS))
    if run.baseline and run.baseline.wins and not hints:
        hints.append(_beaten(run))
    return hints


def trust_in(start: Start | None, *, has_test: bool) -> list[str]:
    """How far to trust a model that learned from names or texts without a label."""
    said = []
    if start and start.agreement is not None:
        texts = counted(start.num_texts, "text")
        did = (
            "learned from"
            if start.learned_from_texts
            else "did not use (folds were no better with them)"
        )
        said.append(
            f"The head {did} {texts} without a label, and answers "
            f"{format_percent(start.agreement, 0)} of them as "
            "names and rows alone would."
        )
    if not has_test:
        said.append(
            "No row has a label, so nothing measures this model: label some 100 texts, and run "
            "python -m "
            "training.evaluate with --dataset to know how good it is. A few rows of each label, "
            "given with --dataset "
            "beside --labels, make it better."
        )
    return said


def _beaten(run: Evidence) -> str:
    better = "A linear model of the words is better than this network"
    if run.share_cut > MANY_CUT:
        cut = (
            f"{format_percent(run.share_cut, digits=0)} of the texts were cut at --max_length "
            f"{run.config.max_length}"
        )
        windows = "" if run.config.columns.pair else ", or --long windows"
        return f"{better}, and {cut}: try a larger one{windows}."
    return f"{better}: try {run.more_epochs}, {run.other_rate}, or another --model."


def _hints(run: Evidence) -> Iterator[str]:
    is_at_chance, still_improves = _is_at_chance(run), _still_improves(run)
    if is_at_chance:
        yield is_at_chance
    if still_improves:
        yield still_improves
    too_unsure, too_sure = _miscalibrated(run)
    if too_unsure and not is_at_chance:
        yield too_unsure
    if too_sure and not still_improves:
        yield too_sure
    if stopped := _stopped_on_a_plateau(run):
        yield stopped


def _is_at_chance(run: Evidence) -> str:
    """Whether neither the training rows nor the validation rows show that anything was learned."""
    last = run.epochs[-1]
    loss = min(last.train_loss, last.validation.get("loss", math.inf))
    if not run.chance_loss or loss <= CHANCE_SHARE * run.chance_loss:
        return ""
    if run.baseline and run.baseline.gain.is_clear and not run.baseline.wins:
        return ""  # it knows more than the words say: the labels are hard to tell, or are noisy
    found = (
        f"The network has hardly begun to learn: its loss is {loss:.3g}, and guessing costs "
        f"{run.chance_loss:.3g}"
    )
    if run.baseline and not _texts_tell(run.baseline, run.test):
        return (
            f"{found}. The linear baseline finds nothing either, so the texts may not tell the "
            "labels."
        )
    return f"{found}. Try {run.other_rate} or {run.more_epochs}."


def _texts_tell(baseline: Baseline, test: Mapping[str, Any]) -> bool:
    """Whether the baseline is better than one that always gives the most frequent label, or the mean."""
    if "r2" in baseline.test:
        return baseline.test["r2"] > 0.02
    if "accuracy" not in baseline.test:
        return True
    most = max(label["rows"] for label in test["per_class"].values()) / test["rows"]
    # Where nearly all rows have one label, accuracy says nothing about the others.
    return most > 0.6 or baseline.test["accuracy"] > most + 2 * _standard_error(
        most, baseline.test["rows"]
    )


def _still_improves(run: Evidence) -> str:
    metric, last = run.config.best_metric, run.epochs[-1]
    earlier = [epoch for epoch in run.epochs if epoch.validation and epoch.epoch <= last.epoch - 1]
    if not (earlier and last.is_best and metric in (*METRICS, "loss")):
        return ""
    before = max(earlier, key=lambda epoch: score_of(epoch.validation, metric)).validation[metric]
    now = last.validation[metric]
    if not is_clear_gain(metric, before, now, last.validation["rows"]):
        return ""
    shown, title = (
        (METRICS[metric].shown, METRICS[metric].title)
        if metric in METRICS
        else ("{:.4f}".format, "loss")
    )
    moved = f"was still {'falling' if metric in SMALLER_IS_BETTER else 'rising'} at the last epoch"
    how = "try" if run.config.budget else run.continued
    return (
        f"The validation {title} {moved} ({shown(before)}, then {shown(now)}): {how} "
        f"{run.more_epochs}."
    )


def is_clear_gain(metric: str, before: float, now: float, rows: int) -> bool:
    """Whether an epoch has removed enough of the errors to expect more of the next ones."""
    if (
        metric in SMALLER_IS_BETTER
    ):  # the relative standard error of a root mean square is 1 / sqrt(2 rows)
        return before > 0 and (before - now) / before > max(ERRORS_REMOVED, 1 / math.sqrt(rows))
    middle = min(1.0, max(0.0, (before + now) / 2))
    return now - before > max(
        ERRORS_REMOVED * (1 - before), math.sqrt(2) * _standard_error(middle, rows)
    )


def _miscalibrated(run: Evidence) -> tuple[str, str]:
    """The sentence for a network that is too unsure, and for one that is too sure."""
    if run.confidence is None:
        return "", ""
    accuracy, rows = run.test["accuracy"], run.test["rows"]
    gap = CALIBRATION_GAP + 2 * _standard_error(accuracy, rows)
    right, sure = format_percent(accuracy, 0), format_percent(run.confidence, 0)
    said = f"{right} of its answers are right, at a mean confidence of {sure}"
    if run.confidence < accuracy - gap - run.config.label_smoothing:
        return f"The network is too unsure: {said}. Try {run.more_epochs} or {run.other_rate}.", ""
    if run.confidence > accuracy + gap:
        ways = [] if run.is_best_last else ["fewer --epochs"]
        ways += [] if run.config.label_smoothing else ["--label_smoothing 0.1"]
        return "", f"The network is too sure: {said}. Try {' or '.join(ways or ['more rows'])}."
    return "", ""


def _stopped_on_a_plateau(run: Evidence) -> str:
    losses = [epoch.validation["loss"] for epoch in run.epochs if epoch.validation][-3:]
    falling = len(losses) == 3 and all(b < (1 - LOSS_STILL_FALLS) * a for a, b in pairwise(losses))
    if not (run.stopped_early and falling):
        return ""
    shown = ", ".join(f"{loss:.4f}" for loss in losses)
    longer = f"{run.continued} --early_stopping {2 * run.config.early_stopping + 1}"
    return (
        f"Early stopping came too soon: the validation loss was still falling ({shown}); {longer}."
    )


def _standard_error(share: float, rows: int) -> float:
    return math.sqrt(share * (1 - share) / rows)
