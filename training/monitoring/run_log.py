"""Run log: a run's curves, in metrics.jsonl and wherever trackers keep them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.files import write_whole
from training.monitoring.json_lines import JsonLines, read_lines
from training.monitoring.observer import Observer
from training.monitoring.records import EpochMetrics, StepMetrics
from training.monitoring.trackers import TRACKERS, TensorBoard, TrackedRun, TrackerThread

if TYPE_CHECKING:
    from training.config import TrainConfig

METRICS_FILE = "metrics.jsonl"
EVALUATION_SCALARS = ("loss", "accuracy", "macro_f1", "calibration_error")


class RunLog(Observer):
    """Writes each record to `metrics.jsonl` and to TensorBoard events, both in `run_dir`, and to further `trackers`.

    Whatever stands there after `resume_step` is dropped first, so that the curves of a resumed
    run have one line a step; 0 starts afresh. `metrics.jsonl` is whole after every record. Of the steps that it is
    told, it keeps each `log_every`-th, the first and the last. What cannot be written is lost, and ends no run.

    Args:
        run_dir: the run folder.
        resume_step: steps done before.
        log_every: optimizer steps between records.
        trackers: names of :data:`training.monitoring.trackers.TRACKERS`.
        configuration: what those are to show of the run's flags.
        say: prints a line about one that failed.
    """

    def __init__(
        self,
        run_dir: Path,
        resume_step: int,
        log_every: int = 1,
        trackers: Sequence[str] = (),
        configuration: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lines = JsonLines(run_dir / METRICS_FILE)
        self._say = say
        self._finished = False
        self._log_every = log_every
        self._total_steps = 0
        self._go_on_after(resume_step)
        run = TrackedRun(run_dir, configuration or {}, resume_step + 1)
        kinds = {"TensorBoard": TensorBoard} | {name: TRACKERS[name] for name in trackers}
        self._trackers = [TrackerThread(name, kind(), run, say) for name, kind in kinds.items()]

    def _go_on_after(self, step: int) -> None:
        self._last_step = step
        try:
            _drop_lines_after(self._lines.path, step)
        except OSError as error:
            self._say(f"{self._lines.path}: keeps its lines after step {step} ({error.strerror}); the run goes on")

    @classmethod
    def of(cls, config: TrainConfig, resume_step: int, say: Callable[[str], None]) -> RunLog:
        """The log that a run asks for."""
        flags = config.model_dump(mode="json")
        return cls(config.run_dir, resume_step, config.log_every, config.tracker_names, flags, say)

    def run_starts(self, step: int, total_steps: int, epochs: Sequence[EpochMetrics]) -> None:
        """Learn which step is the last."""
        self._total_steps = total_steps

    def steps_agreed(self, steps: Sequence[StepMetrics]) -> None:
        """Log those that are due."""
        for metrics in steps:
            if metrics.step % self._log_every == 0 or metrics.step in (1, self._total_steps):
                self.step(metrics)

    def epoch_ends(self, epoch: EpochMetrics) -> None:
        """Log the epoch."""
        self.epoch(epoch)

    def rolled_back(self, step: int) -> None:
        """Drop what was logged of steps that do not count, as a resumed run does."""
        self._go_on_after(step)
        for tracker in self._trackers:
            tracker.roll_back(step)

    def step(self, metrics: StepMetrics) -> None:
        """Log one optimizer step."""
        fields = asdict(metrics)
        self._last_step = metrics.step
        self._write("step", fields)
        scalars = {name: value for name, value in fields.items() if name not in ("step", "seconds")}
        self._track("train", scalars, metrics.step)

    def epoch(self, metrics: EpochMetrics) -> None:
        """Log a finished epoch with its validation."""
        self._last_step = metrics.step
        self._write("epoch", asdict(metrics))
        self._track("validation", _evaluation_scalars(metrics.validation), metrics.step)

    def test(self, evaluation: Mapping[str, Any]) -> None:
        """Log the test of the finished model, at the last step logged."""
        self._write("test", {**evaluation, "step": self._last_step})
        self._track("test", _evaluation_scalars(evaluation), self._last_step)
        self._finished = True

    def close(self) -> None:
        """Let the trackers end."""
        for tracker in self._trackers:
            tracker.close(finished=self._finished)

    def _track(self, group: str, scalars: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.write(group, scalars, step)

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        self._lines.write({"kind": kind, **fields})


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read the records of a run in their order; a line that a crash tore is left out."""
    return read_lines(run_dir / METRICS_FILE)


def _drop_lines_after(path: Path, resume_step: int) -> None:
    if not path.exists():
        return
    # A test belongs to a finished run: one that goes on makes its own.
    kept = [
        record for record in read_metrics(path.parent) if record["kind"] != "test" and record["step"] <= resume_step
    ]
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept).encode())


def _evaluation_scalars(evaluation: Mapping[str, Any]) -> dict[str, float]:
    return {name: evaluation[name] for name in EVALUATION_SCALARS if name in evaluation}
