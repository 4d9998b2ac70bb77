"""Run folder: reads what a run has written so far, again and again at little cost, while it may still be writing."""

from __future__ import annotations

import math
import os
import platform
import re
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError
from training.monitoring.events import EVENTS_FILE, METRICS_FILE, parse_lines, read_events
from training.monitoring.status import RankStatus, read_statuses, writing_period

RECENT_STEPS = 50
RECENT_EVENTS = 50
MISSED_WRITINGS = 5  # of a status file


@dataclass
class RunSnapshot:
    """A run as its folder shows it.

    ``silent``: seconds since each rank's status file changed; ``losses``: of all logged steps;
    ``recent``: the last logged steps; ``events``: the last ones, single steps excluded; ``starts``:
    how often the run was started.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    statuses: list[RankStatus] = field(default_factory=list)
    silent: dict[int, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT_EVENTS))
    checkpoint: dict[str, Any] | None = None
    starts: int = 0

    def is_silent(self, status: RankStatus) -> bool:
        """Whether a rank no longer writes although it should: its process was killed, or its machine is gone."""
        return status.state == "running" and self.silent.get(status.rank, 0.0) > self.silent_seconds

    @property
    def silent_seconds(self) -> float:
        """How long a live rank may go without writing."""
        return MISSED_WRITINGS * writing_period(
            max((status.world_size for status in self.statuses), default=1)
        )

    @property
    def has_remote_ranks(self) -> bool:
        """Whether a rank may run on another machine, where only a change of its status file shows that it is alive."""
        return any(
            status.state == "running" and status.host != platform.node() for status in self.statuses
        )

    @property
    def state(self) -> str:
        """Finished or stopped if all ranks are, failed if one has, silent if none writes."""
        # One failed rank fails the run. While one runs, those that have ended are only early.
        states = Counter(
            "silent" if self.is_silent(status) else status.state for status in self.statuses
        )
        if not states:
            return "unknown"
        return next(
            (state for state in ("failed", "running") if states[state]), states.most_common(1)[0][0]
        )

    @property
    def step(self) -> int:
        # Both lag behind: the log by --log_every steps, the status files by their period.
        last = self.recent[-1]["step"] if self.recent else 0
        return max([last, *(status.step for status in self.statuses)])

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run; 0 before that is known."""
        return max((status.total_steps for status in self.statuses), default=0)

    @property
    def seconds_left(self) -> float | None:
        """An estimate from the pace of the last logged steps; None with fewer than two."""
        if len(self.recent) < 2 or not self.total_steps:
            return None
        # By the run's own seconds, which stand still between a stop and the resume. By the clock,
        # a night without a process would count as slow steps.
        first, last = self.recent[0], self.recent[-1]
        steps = last["step"] - first["step"]
        return (
            (last["seconds"] - first["seconds"]) / steps * (self.total_steps - self.step)
            if steps > 0
            else None
        )


class RunFolder:
    """Reads a run folder, OUTPUT_DIR.run; each :meth:`refresh` reads only what is new.

    Raises:
        UserError: it is not a run folder.
    """

    def __init__(self, path: Path) -> None:
        if not any((path / name).exists() for name in (METRICS_FILE, EVENTS_FILE, "ranks")):
            near = path.with_name(path.name + ".run")
            hint = f"did you mean {near}?" if near.is_dir() else "name the OUTPUT_DIR.run of one"
            raise UserError(f"{path}: not the folder of a training run; {hint}", code="not-a-run")
        self.path = path
        self._snapshot = RunSnapshot(path.resolve().name)
        self._metrics, self._events = _Tail(path / METRICS_FILE), _Tail(path / EVENTS_FILE)
        self._config_version: tuple[int, int] | None = None
        self._written: dict[int, tuple[float, float]] = {}

    def refresh(self) -> RunSnapshot:
        """The run as it is now, always in the same object; what is missing or torn is skipped."""
        snapshot = self._snapshot
        config_path = self.path / "config.yaml"
        if (version := _version(config_path)) != self._config_version:
            snapshot.config, self._config_version = _read_config(config_path), version

        # A resume or a rollback replaces metrics.jsonl by a shorter one: then the curves start
        # over.
        records, is_new_file = self._metrics.read()
        if is_new_file:
            snapshot.losses.clear()
            snapshot.recent.clear()
        for record in records:
            if record.get("kind") == "step" and {"step", "seconds"} <= record.keys():
                snapshot.recent.append(record)
                if record.get("loss") is not None:
                    snapshot.losses.append(record["loss"])

        # A run that starts from scratch moves the earlier files aside: nothing of them counts.
        events, is_new_file = self._events.read()
        if is_new_file:
            snapshot.events.clear()
            snapshot.checkpoint, snapshot.starts = None, 0
        for event in events:
            kind = event.get("kind")
            if kind == "checkpoint":
                snapshot.checkpoint = event
            snapshot.starts += kind == "start"
            if kind != "step" and "time" in event:
                snapshot.events.append(event)

        snapshot.statuses = read_statuses(self.path)
        snapshot.silent = {status.rank: self._silence(status) for status in snapshot.statuses}
        return snapshot

    def _silence(self, status: RankStatus) -> float:
        """Seconds since a status changed, by this machine's clock only: that of another one may be wrong."""
        now = time.monotonic()
        written, seen = self._written.get(status.rank, (None, 0.0))
        if written != status.written:
            # When it is read for the first time, only a status of this machine says how old it is.
            is_first_here = written is None and status.host == platform.node()
            seen = now - max(0.0, time.time() - status.written) if is_first_here else now
            self._written[status.rank] = status.written, seen
        return now - seen


class _Tail:
    """The records of a file of JSON lines that grows, and may be replaced by a shorter one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The new records, and whether the file was replaced, so that earlier ones do not count."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                # The system may give the new file the number of the old one, so a smaller size
                # tells it too.
                is_new_file = found.st_ino != self._inode or found.st_size < self._offset
                if is_new_file:
                    self._inode, self._offset = found.st_ino, 0
                file.seek(self._offset)
                # What follows the last newline is being written right now; the next call reads it.
                complete, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return [], False
        self._offset += len(complete) + len(newline)
        return parse_lines(complete), is_new_file


def _version(path: Path) -> tuple[int, int] | None:
    """Changes whenever the file is replaced; None without the file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


@dataclass(frozen=True)
class RestartSplit:
    """The moments of a restart, in Unix time; NaN for one that is not known.

    ``lost``: the last sign of life of the processes before. ``detected``: the launcher noticed that
    one of them was gone. The others are rank 0's: its process began, had imported the program, had
    joined the process group, had loaded data, model and checkpoint, and had done its first
    optimizer step.
    """

    lost: float
    detected: float
    started: float
    imported: float
    grouped: float
    loaded: float
    stepped: float

    def seconds(self) -> dict[str, float]:
        """How long each part took; ``rendezvous`` begins with ending the remaining ranks."""
        moments = list(asdict(self).values())
        names = ("detection", "rendezvous", "import", "group", "load", "first_step")
        parts = {
            name: after - before
            for name, (before, after) in zip(names, pairwise(moments), strict=True)
        }
        return parts | {"total": self.stepped - self.lost}


def restart_split(run_dir: Path, launcher_log: str = "") -> list[RestartSplit]:
    """What the time of each restart of a run went into; ``launcher_log`` is torchrun's output on
    the lost rank's machine.
    """
    attempts: list[list[dict[str, Any]]] = []
    for event in read_events(run_dir):
        if event["kind"] == "imported":
            attempts.append([])
        if attempts:
            attempts[-1].append(event)
    splits = []
    for before, after in pairwise(attempts):
        # Backwards, so that of several events of a kind the first one stays: a run has many steps,
        # and only its first ends the restart.
        first_times = {event["kind"]: event["time"] for event in reversed(after)}
        imported = after[0]["time"]
        # Events that are written because of the loss come after it.
        alive = [
            event["time"]
            for event in before
            if event["kind"] not in ("failed", "hang", "stop_asked")
        ]
        seen = [when for when in _losses(launcher_log, imported) if alive[0] < when < imported]
        split = RestartSplit(
            lost=max(alive),
            detected=seen[0] if seen else math.nan,
            started=after[0]["process_started"] or math.nan,
            imported=imported,
            grouped=first_times.get("group_formed", imported),
            loaded=first_times.get("start", math.nan),
            stepped=first_times.get("first_step", math.nan),
        )
        splits.append(split)
    return splits


def _losses(launcher_log: str, near: float) -> list[float]:
    """When torchrun noticed that a rank had failed."""
    # Its lines are in local time and have no year: that of ``near`` is meant.
    year = time.localtime(near).tm_year
    found = re.findall(
        r"^E(\d{4} \d\d:\d\d:\d\d)(\.\d+) .*failed \(exitcode:", launcher_log, re.MULTILINE
    )
    return [
        time.mktime(time.strptime(f"{year} {clock}", "%Y %m%d %H:%M:%S")) + float(rest)
        for clock, rest in found
    ]
