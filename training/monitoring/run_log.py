"""Run log: the files a run leaves while it goes, metrics.jsonl and TensorBoard events."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.monitoring.json_lines import JsonLines, read_lines
from training.monitoring.observer import Observer
from training.monitoring.records import EpochMetrics, StepMetrics
from training.utils import write_whole

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

METRICS_FILE = "metrics.jsonl"
EVALUATION_SCALARS = ("loss", "accuracy", "macro_f1", "calibration_error")


class RunLog(Observer):
    """Writes each record to `metrics.jsonl` and to TensorBoard events, both in `run_dir`.

    Whatever stands there after `resume_step` is dropped first, so that the curves of a resumed
    run have one line a step; 0 starts afresh. `metrics.jsonl` is whole after every record. Of the steps that it is
    told, it keeps each `log_every`-th, the first and the last.
    """

    def __init__(self, run_dir: Path, resume_step: int, log_every: int = 1) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        _drop_lines_after(run_dir / METRICS_FILE, resume_step)
        self._lines = JsonLines(run_dir / METRICS_FILE)
        self._events = _TensorBoardEvents(run_dir, first_step=resume_step + 1)
        self._last_step = resume_step
        self._log_every = log_every
        self._total_steps = 0

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

    def step(self, metrics: StepMetrics) -> None:
        """Log one optimizer step."""
        fields = asdict(metrics)
        self._last_step = metrics.step
        self._write("step", fields)
        scalars = {name: value for name, value in fields.items() if name not in ("step", "seconds")}
        self._events.write("train", scalars, metrics.step)

    def epoch(self, metrics: EpochMetrics) -> None:
        """Log a finished epoch with its validation."""
        self._last_step = metrics.step
        self._write("epoch", asdict(metrics))
        self._events.write("validation", _evaluation_scalars(metrics.validation), metrics.step)

    def test(self, evaluation: Mapping[str, Any]) -> None:
        """Log the test of the finished model, at the last step logged."""
        self._write("test", {**evaluation, "step": self._last_step})
        self._events.write("test", _evaluation_scalars(evaluation), self._last_step)

    def close(self) -> None:
        """Flush and close TensorBoard's file."""
        self._events.close()

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        self._lines.write({"kind": kind, **fields})


class _TensorBoardEvents:
    """TensorBoard's scalars in `run_dir`; older ones from `first_step` on are purged."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        self._run_dir = run_dir
        self._first_step = first_step
        self._writer: EventFileWriter | None = None

    def write(self, group: str, scalars: Mapping[str, float], step: int) -> None:
        """Write each scalar as `group/name`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in scalars.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._open().add_event(event)

    def close(self) -> None:
        """Flush and close the event file, if there is one."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> "EventFileWriter":
        # Opened at the first record, so that no step waits for the import; this writer needs neither torch's
        # SummaryWriter nor tensorflow, which take seconds to import.
        if self._writer is None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self._run_dir), flush_secs=10)
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=self._first_step, session_log=start))
        return self._writer


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
