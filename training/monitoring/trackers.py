"""Trackers: TensorBoard always gets a run's curves, other services if ``--trackers`` names them.

None of them can slow or stop a run: each has its own thread and queue, and is dropped at its first
error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, first_line
from common.files import write_json
from training.monitoring.events import Event, RolledBack, RunEnded, RunTested, Subscriber
from training.monitoring.records import EpochMetrics, StepMetrics, metrics_of

PROJECT = "distrinews"
IDS_FILE = "trackers.json"
# Records that a service has not taken by then are lost; after a stop or a failure a launcher waits
# for this process.
SECONDS_TO_FINISH = 30.0
SECONDS_TO_LEAVE = 5.0
LONGEST_QUEUE = 10_000
_writing_ids = threading.Lock()


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker follows; ``first_step`` is that of this process."""

    folder: Path
    configuration: Mapping[str, Any]
    first_step: int

    @property
    def name(self) -> str:
        return self.folder.name.removesuffix(".run")

    def read_ids(self) -> dict[str, str]:
        """Each tracker's name for this run, from an earlier process."""
        path = self.folder / IDS_FILE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def keep_id(self, tracker: str, name: str) -> None:
        """Keep the tracker's name for this run, so that a resumed run continues under it."""
        # Every tracker has a thread, and all of them share this file: what one reads, extends and
        # writes must not come between that of another one.
        with _writing_ids:
            write_json(self.folder / IDS_FILE, self.read_ids() | {tracker: name})


class Tracker:
    """One place that curves go to. All of it runs on one thread, and may raise and take as long as it likes."""

    def start(self, run: TrackedRun, earlier: str | None) -> str | None:
        """Begin, or continue the run that an ``earlier`` process began; returns the tracker's name for it."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def roll_back(self, step: int) -> None:
        """What came after ``step`` does not count; it comes again."""

    def finish(self, *, finished: bool) -> None:
        """End; unless ``finished``, another process may resume the run."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files in the run folder; readers purge steps that are made again.

    This writer needs neither torch's SummaryWriter nor tensorflow. If tensorflow is installed it
    imports it all the same, which takes seconds of this thread's time.
    """

    def start(self, run: TrackedRun, earlier: str | None) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder), flush_secs=10)
        self.roll_back(run.first_step - 1)

    def roll_back(self, step: int) -> None:
        # When a session starts, readers forget what has a later step.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        )

    def finish(self, *, finished: bool) -> None:
        self._writer.close()


class WandB(Tracker):
    """Weights & Biases; its own variables say where (``WANDB_MODE=offline``: only into the run folder)."""

    def start(self, run: TrackedRun, earlier: str | None) -> str:
        import wandb

        self._run = wandb.init(
            project=PROJECT,
            name=run.name,
            id=earlier,
            resume="allow",
            dir=run.folder,
            config=dict(run.configuration),
            # It must not write to the console, nor wait there for a key.
            settings=wandb.Settings(console="off", silent=True, login_timeout=1),
        )
        # Its own step counter only rises, and would drop the steps that a resumed run makes again.
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log({**scalars, "step": step})

    def finish(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MLflow(Tracker):
    """MLflow; its own variables say where (``MLFLOW_TRACKING_URI``), else a database in the run folder."""

    def start(self, run: TrackedRun, earlier: str | None) -> str:
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
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
        )
        self._run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        # Only once: MLflow refuses to change a parameter, and a resumed run may have other flags.
        self._client.log_batch(
            self._run_id, params=[Param(name, str(v)) for name, v in run.configuration.items()]
        )
        return self._run_id

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        self._client.log_batch(
            self._run_id, [Metric(name, value, now, step) for name, value in scalars.items()]
        )

    def finish(self, *, finished: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "KILLED")


class Trackio(Tracker):
    """Trackio, which knows a run by its name; a database in its cache unless its own variables say otherwise."""

    def start(self, run: TrackedRun, earlier: str | None) -> str:
        import trackio

        # With the time, since a run is its name here: without it, a new run into a folder of the
        # same name would continue the curves of the old one.
        name = earlier or f"{run.name}-{time.time_ns() // 1_000_000:x}"
        config = {key: str(value) for key, value in run.configuration.items()}
        self._run = trackio.init(
            PROJECT,
            name,
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def finish(self, *, finished: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {"wandb": WandB, "mlflow": MLflow, "trackio": Trackio}


def check_trackers(names: Sequence[str]) -> None:
    """Raises UserError for a tracker that is not installed, with the extra that brings it."""
    for name in names:
        # Looked for and not imported: the tracker's own thread does that, which may take its time.
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f'--trackers {name}: is not installed; pip install "distrinews[{name}]", or leave '
                "it out",
                code="package-missing",
            )


class TrackerThread:
    """Runs a tracker on its own thread, so that it cannot hold up the run; ``say`` prints a line."""

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, say: Callable[[str], None]
    ) -> None:
        self.name = name
        self._tracker = tracker
        self._run = run
        self._say = say
        # (scalars, step) to log, (None, step) to roll back to the step, a bool to end: whether the
        # run has finished.
        self._queue: queue.Queue[tuple[Mapping[str, float] | None, int] | bool] = queue.Queue(
            LONGEST_QUEUE
        )
        self._lost = 0
        # A daemon, so that a service which never answers cannot keep the process at its end.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, scalars: Mapping[str, float] | None, step: int) -> None:
        """Queue scalars to log, or None to roll back to ``step``; what a full queue cannot take is lost."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait((scalars, step))
        except queue.Full:
            self._lost += 1

    def close(self, *, finished: bool) -> None:
        deadline = time.monotonic() + (SECONDS_TO_FINISH if finished else SECONDS_TO_LEAVE)
        # The queue may be full, and stay so if the service hangs.
        while self._thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Full):
                self._queue.put(finished, timeout=0.1)
                break
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._lost or self._thread.is_alive():
            self._say(
                f"{self.name}: too slow, {self._lost + self._queue.qsize()} records did not reach "
                "it"
            )

    def _work(self) -> None:
        try:
            known_as = self._tracker.start(self._run, self._run.read_ids().get(self.name))
            if known_as:
                self._run.keep_id(self.name, known_as)
            while not isinstance(item := self._queue.get(), bool):
                scalars, step = item
                if scalars is None:
                    self._tracker.roll_back(step)
                else:
                    self._tracker.log(scalars, step)
            self._tracker.finish(finished=item)
        except Exception as error:
            self._say(f"{self.name}: dropped, the run continues without it ({first_line(error)})")


class Trackers(Subscriber):
    """Passes the curves to TensorBoard and to the trackers in ``names``, from the step after
    ``resume_step`` on.

    ``configuration`` holds the run's flags, for the services to show.
    """

    def __init__(
        self,
        run_dir: Path,
        resume_step: int,
        names: Sequence[str] = (),
        configuration: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        run = TrackedRun(run_dir, configuration or {}, resume_step + 1)
        kinds = {"TensorBoard": TensorBoard} | {name: TRACKERS[name] for name in names}
        self._threads = [TrackerThread(name, kind(), run, say) for name, kind in kinds.items()]
        self._finished = False

    def receive(self, event: Event) -> None:
        match event:
            case StepMetrics():
                figures = event.known()
                self._put("train", figures, figures.keys() - {"step", "seconds"}, event.step)
            case EpochMetrics(step=step, validation=validation) if validation:
                self._put("validation", validation, ("loss", *metrics_of(validation)), step)
            case RunTested(step, test):
                self._put("test", test, ("loss", *metrics_of(test)), step)
            case RolledBack(step):
                for thread in self._threads:
                    thread.put(None, step)
            case RunEnded(finished):
                self._finished = finished

    def _put(
        self, group: str, figures: Mapping[str, Any], names: Collection[str], step: int
    ) -> None:
        known = {
            name: figure for name, figure in figures.items() if name in names and figure is not None
        }
        scalars = {f"{group}/{name}": float(figure) for name, figure in known.items()}
        for thread in self._threads:
            thread.put(scalars, step)

    def close(self) -> None:
        """Let the services end."""
        for thread in self._threads:
            thread.close(finished=self._finished)
