"""What a long export shows while it runs, and what it leaves if it is stopped: nothing."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from common.errors import UserError
from common.files import writing_folder
from common.model_folder import is_artefact


class Stages:
    """A bar for the stage in progress, and a line for each that is finished."""

    def __init__(self, console: Console, num_rows: int) -> None:
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bars = Progress(*columns, console=console, transient=True)
        self._num_rows = num_rows
        self._running: TaskID | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        self._running = self.bars.add_task(name, total=None)
        yield
        self.bars.remove_task(self._running)
        self.bars.console.print(f"  {name}: {time.perf_counter() - began:.1f} s")

    def advance(self, rows: int) -> None:
        self.bars.update(self._running, advance=rows, total=self._num_rows)


_unfinished: set[Path] = set()
# Whether a folder may be there that `_unfinished` lacks, and whether a signal came meanwhile.
_is_beginning = _has_to_end = False


@contextmanager
def _signal_waits() -> Iterator[None]:
    """Let a signal that comes in this block end the process only after it."""
    global _is_beginning
    _is_beginning = True
    try:
        yield
    finally:
        _is_beginning = False
        if _has_to_end:
            end_unfinished()


@contextmanager
def replaced_whole(target: Path) -> Iterator[Path]:
    """Give an empty folder that replaces the target if the block succeeds, and is removed if it
    does not.

    Raises:
        UserError: The target exists, and no export wrote it.
    """
    if target.exists() and not is_artefact(target):
        what = f"{target}: is in the way and is not an artefact; move it elsewhere"
        raise UserError(what, code="export-failed")
    with ExitStack() as stack:
        with _signal_waits():
            aside = stack.enter_context(writing_folder(target))
            _unfinished.add(aside)
        try:
            yield aside
        finally:
            _unfinished.discard(aside)


def end_unfinished(*_: object) -> None:
    """End the process at a signal, without the artefacts that it has begun.

    An exception would do only where no library has called back into Python: it would arrive as an
    error of theirs.
    """
    global _has_to_end
    _has_to_end = True
    if _is_beginning:
        return
    for folder in _unfinished:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + signal.SIGTERM)
