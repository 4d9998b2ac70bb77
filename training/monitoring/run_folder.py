"""Run folder: what a run has written so far, read again and again at little cost, while it may still be writing."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError
from training.monitoring.events import EVENTS_FILE
from training.monitoring.json_lines import parse_lines
from training.monitoring.run_log import METRICS_FILE
from training.monitoring.status import RankStatus, read_statuses, writing_period

RECENT_STEPS = 50
RECENT_EVENTS = 50
MISSED_WRITINGS = 5  # of a status file


@dataclass
class Picture:
    """A run as its folder shows it.

    ``silent``: seconds since each rank's status file changed; ``losses``: of every step on record; ``recent``: the
    last step records; ``events``: the last ones but those of single steps; ``starts``: how often the run was started.
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
        """Whether a rank that should be writing is not: its process was stopped or killed, or its machine is gone."""
        return status.state == "running" and self.silent.get(status.rank, 0.0) > self.silent_seconds

    @property
    def silent_seconds(self) -> float:
        """How long a rank that lives may go without writing."""
        return MISSED_WRITINGS * writing_period(max((status.world_size for status in self.statuses), default=1))

    @property
    def has_strangers(self) -> bool:
        """Whether a rank may run on another machine: that it lives shows only when its status file changes."""
        return any(status.state == "running" and status.host != platform.node() for status in self.statuses)

    @property
    def state(self) -> str:
        """The whole run's: finished or stopped when all ranks are, failed when one has, silent when none writes."""
        states = Counter("silent" if self.is_silent(status) else status.state for status in self.statuses)
        if not states:
            return "unknown"
        return next((state for state in ("failed", "running") if states[state]), states.most_common(1)[0][0])

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        last = self.recent[-1]["step"] if self.recent else 0
        return max([last, *(status.step for status in self.statuses)])

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run; 0 before that is known."""
        return max((status.total_steps for status in self.statuses), default=0)

    @property
    def seconds_left(self) -> float | None:
        """What the last steps' pace lets expect; None without two steps on record."""
        if len(self.recent) < 2 or not self.total_steps:
            return None
        first, last = self.recent[0], self.recent[-1]
        steps = last["step"] - first["step"]
        return (last["seconds"] - first["seconds"]) / steps * (self.total_steps - self.step) if steps > 0 else None


class RunFolder:
    """Reads a run folder; each :meth:`look` reads only what is new.

    Args:
        path: the run folder, OUTPUT_DIR.run.

    Raises:
        UserError: it is none.
    """

    def __init__(self, path: Path) -> None:
        if not any((path / name).exists() for name in (METRICS_FILE, EVENTS_FILE, "ranks")):
            near = path.with_name(path.name + ".run")
            hint = f"did you mean {near}?" if near.is_dir() else "name the OUTPUT_DIR.run of one"
            raise UserError(f"{path}: not the folder of a training run; {hint}", code="not-a-run")
        self.path = path
        self._picture = Picture(path.resolve().name)
        self._metrics, self._events = _Tail(path / METRICS_FILE), _Tail(path / EVENTS_FILE)
        self._config_file: tuple[int, int] | None = None
        self._written: dict[int, tuple[float, float]] = {}

    def look(self) -> Picture:
        """The run as it stands now; what is missing or torn is left out."""
        picture = self._picture
        self._take_config()
        self._take_metrics()
        self._take_events()
        picture.statuses = read_statuses(self.path)
        picture.silent = {status.rank: self._silence(status) for status in picture.statuses}
        return picture

    def _take_config(self) -> None:
        path = self.path / "config.yaml"
        file = _version(path)
        if file != self._config_file:
            self._picture.config, self._config_file = _read_config(path), file

    def _take_metrics(self) -> None:
        records, anew = self._metrics.read()
        if anew:
            self._picture.losses.clear()
            self._picture.recent.clear()
        for record in records:
            if record.get("kind") == "step" and {"step", "seconds"} <= record.keys():
                self._picture.recent.append(record)
                if record.get("loss") is not None:
                    self._picture.losses.append(record["loss"])

    def _take_events(self) -> None:
        records, anew = self._events.read()
        if anew:
            self._picture.events.clear()
            self._picture.checkpoint, self._picture.starts = None, 0
        for record in records:
            kind = record.get("kind")
            if kind == "checkpoint":
                self._picture.checkpoint = record
            self._picture.starts += kind == "start"
            if kind != "step" and "time" in record:
                self._picture.events.append(record)

    def _silence(self, status: RankStatus) -> float:
        """Seconds since a status changed, by this machine's clock alone: that of another one may be wrong."""
        now = time.monotonic()
        written, seen = self._written.get(status.rank, (None, 0.0))
        if written != status.written:
            known = written is None and status.host == platform.node()
            seen = now - max(0.0, time.time() - status.written) if known else now
            self._written[status.rank] = status.written, seen
        return now - seen


class _Tail:
    """The records of a file of JSON lines that grows, and may be replaced by a shorter one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Records that are new, and whether the file is another one, so that older records are void."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                anew = found.st_ino != self._inode or found.st_size < self._offset
                if anew:
                    self._inode, self._offset = found.st_ino, 0
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return [], False
        self._offset += len(whole) + len(newline)
        return parse_lines(whole), anew


def _version(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written anew; None without the file."""
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
