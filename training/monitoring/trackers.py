"""Trackers: where a run's curves go beside metrics.jsonl. TensorBoard always, others when ``--trackers`` names them.

None of them can slow or stop a run: each has a thread and a queue of its own, and is dropped at its first error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, first_line
from common.files import write_json

PROJECT = "distrinews"
IDS_FILE = "trackers.json"
# What the others have not taken by then is lost; after a stop or a failure somebody waits for this process to end.
SECONDS_TO_FINISH = 30.0
SECONDS_TO_LEAVE = 5.0
LONGEST_QUEUE = 10_000
_writing_ids = threading.Lock()


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run; ``first_step`` is that of this process."""

    folder: Path
    configuration: Mapping[str, Any]
    first_step: int

    @property
    def name(self) -> str:
        """The model folder's name."""
        return self.folder.name.removesuffix(".run")

    def known_as(self, tracker: str) -> str | None:
        """The tracker's name for this run, from an earlier process."""
        return self._ids().get(tracker)

    def remember(self, tracker: str, name: str) -> None:
        """Keep the tracker's name for this run, so that a resumed run goes on with it."""
        with _writing_ids:
            write_json(self.folder / IDS_FILE, self._ids() | {tracker: name})

    def _ids(self) -> dict[str, str]:
        path = self.folder / IDS_FILE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


class Tracker:
    """One place that curves go to; all of it runs on one thread, and may raise and take as long as it will."""

    def start(self, run: TrackedRun, earlier: str | None) -> str | None:
        """Begin, or go on with the run that an ``earlier`` process began; returns the tracker's name for it."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Take figures of a step."""
        raise NotImplementedError

    def roll_back(self, step: int) -> None:
        """Take that what came after ``step`` does not count; it comes again."""

    def finish(self, *, finished: bool) -> None:
        """End; unless ``finished``, the run may go on in another process."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files in the run folder; those of steps that are made again are purged.

    This writer needs neither torch's SummaryWriter nor tensorflow. Where tensorflow is installed it imports it all the
    same, which takes seconds of this thread's time.
    """

    def start(self, run: TrackedRun, earlier: str | None) -> None:
        """Open a file and say from which step on it counts."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder), flush_secs=10)
        self.roll_back(run.first_step - 1)

    def roll_back(self, step: int) -> None:
        """Write that a session starts: readers then forget what has a later step."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write an event."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def finish(self, *, finished: bool) -> None:
        """Flush and close the file."""
        self._writer.close()


class WandB(Tracker):
    """Weights & Biases; its own variables say where (``WANDB_MODE=offline``: into the run folder alone)."""

    def start(self, run: TrackedRun, earlier: str | None) -> str:
        """Begin or go on with a run."""
        import wandb

        self._run = wandb.init(
            project=PROJECT,
            name=run.name,
            id=earlier,
            resume="allow",
            dir=run.folder,
            config=dict(run.configuration),
            # It is not to write into the console; nor to wait there for a key.
            settings=wandb.Settings(console="off", silent=True, login_timeout=1),
        )
        # Its own count of steps only rises: it would drop those that a resumed run makes again.
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Log with the step as a figure."""
        self._run.log({**scalars, "step": step})

    def finish(self, *, finished: bool) -> None:
        """End the run; it may go on under its id."""
        self._run.finish(exit_code=0 if finished else 1)


class MLflow(Tracker):
    """MLflow; its own variables say where (``MLFLOW_TRACKING_URI``), else a database in the run folder."""

    def start(self, run: TrackedRun, earlier: str | None) -> str:
        """Begin a run with the configuration as parameters, or go on with one."""
        import mlflow
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        own = f"sqlite:///{run.folder.absolute() / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(None if mlflow.is_tracking_uri_set() else own)
        if earlier:
            self._run_id = earlier
            self._client.update_run(earlier, status="RUNNING")
            return earlier
        experiment = self._client.get_experiment_by_name(PROJECT)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
        self._run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        self._client.log_batch(self._run_id, params=[Param(name, str(v)) for name, v in run.configuration.items()])
        return self._run_id

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Log in one request."""
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(name, value, now, step) for name, value in scalars.items()])

    def finish(self, *, finished: bool) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "KILLED")


class Trackio(Tracker):
    """Trackio; its own variables say where, else a database in its cache (``trackio show`` reads it)."""

    def start(self, run: TrackedRun, earlier: str | None) -> str:
        """Begin or go on with a run, which is known by its name there."""
        import trackio

        name = earlier or f"{run.name}-{time.time_ns() // 1_000_000:x}"
        config = {key: str(value) for key, value in run.configuration.items()}
        self._run = trackio.init(
            PROJECT, name, config=config, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )
        return name

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Log."""
        self._run.log(dict(scalars), step=step)

    def finish(self, *, finished: bool) -> None:
        """Send what is left."""
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {"wandb": WandB, "mlflow": MLflow, "trackio": Trackio}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed.

    Raises:
        UserError: with the extra that brings it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f'--trackers {name}: is not installed; pip install "distrinews[{name}]", or leave it out',
                code="package-missing",
            )


class TrackerThread:
    """A tracker at work beside the run, which it cannot hold up.

    Args:
        name: for a person.
        tracker: started, told and finished on the thread.
        run: what it tracks.
        say: prints a line.
    """

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, say: Callable[[str], None]) -> None:
        self.name = name
        self._tracker = tracker
        self._run = run
        self._say = say
        # Figures of a step; None in their place to go back to it; whether the run has finished, to end.
        self._queue: queue.Queue[tuple[Mapping[str, float] | None, int] | bool] = queue.Queue(LONGEST_QUEUE)
        self._lost = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, group: str, scalars: Mapping[str, float], step: int) -> None:
        """Leave each scalar as ``group/name`` for the thread; what a full queue cannot take is lost."""
        self._put({f"{group}/{name}": float(value) for name, value in scalars.items()}, step)

    def roll_back(self, step: int) -> None:
        """Leave for the thread that what came after ``step`` does not count."""
        self._put(None, step)

    def close(self, *, finished: bool) -> None:
        """Let the thread end, for so long as a run may wait for it."""
        deadline = time.monotonic() + (SECONDS_TO_FINISH if finished else SECONDS_TO_LEAVE)
        while self._thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Full):
                self._queue.put(finished, timeout=0.1)
                break
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._lost or self._thread.is_alive():
            self._say(f"{self.name}: too slow, {self._lost + self._queue.qsize()} records did not reach it")

    def _put(self, scalars: Mapping[str, float] | None, step: int) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait((scalars, step))
        except queue.Full:
            self._lost += 1

    def _work(self) -> None:
        try:
            known_as = self._tracker.start(self._run, self._run.known_as(self.name))
            if known_as:
                self._run.remember(self.name, known_as)
            while not isinstance(item := self._queue.get(), bool):
                scalars, step = item
                if scalars is None:
                    self._tracker.roll_back(step)
                else:
                    self._tracker.log(scalars, step)
            self._tracker.finish(finished=item)
        except Exception as error:
            self._say(f"{self.name}: dropped, the run goes on without it ({first_line(error)})")
