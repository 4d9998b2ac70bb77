"""Kills a save before every single call that changes the disk, one child after the other, and looks what is left.

Points are enumerated, not sampled: child n is killed before its n-th such call, until one runs through.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.training.checkpointing.saves import content, newest_whole
from training.checkpointing import Storage
from training.checkpointing.saver import Saver
from training.config import TrainConfig
from training.distributed.ranks import Ranks
from training.parallelism.state import StrategyState

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")
MOST_POINTS = 2000
# Functions of the system, methods of files opened for writing, and what writes from within C.
OF_THE_SYSTEM = {
    *("open", "write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "remove", "truncate", "link", "dump"),
    *("symlink", "sendfile", "copy_file_range", "posix_fallocate", "write_record", "write_end_of_file"),
}
OF_FILES = {"write", "writelines", "flush", "close", "truncate", "__exit__"}
WRITABLE = (io.BufferedWriter, io.BufferedRandom, io.FileIO, io.TextIOWrapper)


@dataclass(frozen=True)
class Death:
    """What was found after a save was killed before its ``point``-th change of the disk; None: it ran through."""

    point: int | None
    newest: tuple[int, float]
    rejected: list[str]
    left_by_the_next: list[str]
    next_one: tuple[int, float]


def save_through(storage: Storage, step: int, value: float, keep_last: int = 1) -> None:
    """Save as a run does, and wait until it stands."""
    tensors = {"weight": torch.full((500,), value)}
    saver = Saver(TrainConfig(keep_last=keep_last), ALONE, storage, lambda line: None)
    saver.save(step, lambda: StrategyState(tensors, {}), {"step": step, "value": value}, best_step=None)
    assert len(saver.wait()) == 1
    saver.close()


def die_everywhere(
    folder: Path, open_: Callable[[Path], Storage], steps: list[int], step: int, next_step: int
) -> list[Death]:
    """Save ``steps`` whole, then ``step`` in one child after the other, each killed a call later than the one before.

    After each death the newest checkpoint is looked for, and ``next_step`` is saved. A checkpoint of ``steps`` holds
    its step as its value, that of ``step`` holds 0.5 more, that of ``next_step`` 99.
    """
    os.environ["PYTHONWARNINGS"] = "ignore"
    torch.set_num_threads(1)
    template = folder / "template"
    for earlier in steps:
        save_through(open_(template), earlier, float(earlier), keep_last=len(steps))
    deaths: list[Death] = []
    states: list[dict[str, bytes]] = []
    while not deaths or deaths[-1].point is not None:
        assert len(deaths) < MOST_POINTS, "the save never runs through"
        place = folder / str(len(deaths) + 1)
        shutil.copytree(template, place)
        killed = _killed_before(len(deaths) + 1, lambda place=place: save_through(open_(place), step, step + 0.5))
        states.append(_contents(place))
        # Most writes stay in a buffer that dies with the process.
        as_before = len(states) > 1 and states[-1] == states[-2]
        death = deaths[-1] if as_before else _look(place, open_(place), next_step)
        deaths.append(replace(death, point=len(states) if killed else None))
        shutil.rmtree(place)
    return deaths


def _contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _look(place: Path, storage: Storage, next_step: int) -> Death:
    damages = [storage.find_damage(path) for path in storage.steps().values()]
    newest = newest_whole(storage)
    save_through(storage, next_step, 99.0)
    assert content(f"{storage.location}/latest").decode().startswith(f"step_{next_step:08d}")
    rejected = [damage for damage in damages if damage]
    left = sorted({Path(name).parts[0] for name in _contents(place)})
    return Death(None, newest, rejected, left, newest_whole(storage))


def _killed_before(point: int, work: Callable[[], None]) -> bool:
    """Run ``work`` in a child that is killed before its ``point``-th change; returns whether it was."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            _die_before(point)
            work()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the save failed before it was killed"
    return os.WIFSIGNALED(status)


def _die_before(point: int) -> None:
    seen = 0

    def watch(frame: Any, event: str, function: Any) -> None:
        nonlocal seen
        if event == "c_call" and _changes_disk(function):
            seen += 1
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(watch)
    sys.setprofile(watch)


def _changes_disk(function: Any) -> bool:
    if isinstance(getattr(function, "__self__", None), WRITABLE):
        return function.__name__ in OF_FILES
    return function.__name__ in OF_THE_SYSTEM
