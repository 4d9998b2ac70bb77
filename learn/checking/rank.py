"""One rank of a check: it joins the group, calls the learner's function once, and reports."""

from __future__ import annotations

import os
import re
import resource
import sys
import textwrap
import threading
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from common.errors import ForeseenError, first_line
from learn.checking.exercises import EXERCISES
from learn.checking.solution import WrongSignature, load_function
from learn.ranks import receive, send
from training.distributed.group import join_ranks

READY = "ready"
LATE_SECONDS = 0.1  # a rank that does not wait for rank 0 has returned by then
# Files of PyTorch, and calls, in which a rank may wait for others: backward() may, in a hook.
WAITING_FILES, WAITING_CALLS = r"torch/(distributed|autograd)/", r"wait|is_completed"
MAX_PRINTED, MAX_ERROR = 2000, 240  # characters


@dataclass(frozen=True)
class Report:
    """The outcome of the call on one rank.

    Args:
        outcome: ``waits``: it had not returned when the parent asked, ``runs``: and did not wait
            for other ranks either; ``gone``: the process ended.
        value: the exercise's observation of a call that returned; the exit code of a process that
            is gone.
        error: what was raised: its type and message, in one line.
        place: the learner's line that raised, or at which the rank waits; empty if none.
        printed: by the learner's file.
    """

    outcome: Literal["returned", "raised", "wrong signature", "waits", "runs", "gone"]
    value: Any = None
    error: str = ""
    place: str = ""
    printed: str = ""


class Rank:
    def __init__(self, pipe: Connection, path: Path) -> None:
        self.pipe, self.path = pipe, path
        self.printed = StringIO()
        # Taken by the thread that sends the one report, and never released.
        self.report_lock = threading.Lock()

    def run(self, name: str) -> None:
        """Join the group, call the function, and stay: other ranks may be in a collective."""
        threading.Thread(target=self._answer_parent, daemon=True).start()
        try:
            with join_ranks("cpu") as ranks:
                # Only when all are here does the time of the call begin: starting a process takes
                # seconds, and the call itself milliseconds.
                ranks.barrier()
                send(self.pipe, READY)
                # Rank 0 is late on purpose: otherwise a collective that the solution does not wait
                # for would often finish in time, by luck.
                time.sleep(LATE_SECONDS if ranks.is_first else 0)
                self._send(self._call(name))
                # Until the parent kills this process, and within the group: if this rank left it,
                # those that are still at work would report that instead of their own mistake.
                threading.Event().wait()
        except ForeseenError as error:
            send(self.pipe, first_line(error.__cause__ or error))

    def _call(self, name: str) -> Report:
        try:
            with redirect_stdout(self.printed), redirect_stderr(self.printed):
                return Report("returned", EXERCISES[name].observe(load_function(self.path, name)))
        except WrongSignature as error:
            return Report("wrong signature", error=str(error))
        except BaseException as error:
            # The learner's code may even call sys.exit.
            message = textwrap.shorten(str(error), MAX_ERROR, placeholder=" ...")
            line = f"{type(error).__name__}: {message}".removesuffix(": ")
            place = self._place(traceback.extract_tb(error.__traceback__))
            return Report("raised", error=line, place=place)

    def _answer_parent(self) -> None:
        """Report where this rank is if the parent asks."""
        # The parent writes only if it has waited long enough. In a collective the main thread
        # cannot answer, so this one looks at where it is.
        with suppress(EOFError, OSError):
            receive(self.pipe)
            # Documented in spite of its underscore: the only way to another thread's frame.
            frame = sys._current_frames()[threading.main_thread().ident]
            frames = traceback.extract_stack(frame)
            outcome = "waits" if self._may_wait(frames) else "runs"
            self._send(Report(outcome, place=self._place(frames)))

    def _may_wait(self, frames: traceback.StackSummary) -> bool:
        """Whether the innermost line of the learner's file may wait for other ranks."""
        own = [index for index, frame in enumerate(frames) if frame.filename == str(self.path)]
        if not own or re.search(WAITING_CALLS, frames[own[-1]].line or ""):
            return True
        return any(re.search(WAITING_FILES, frame.filename) for frame in frames[own[-1] :])

    def _place(self, frames: traceback.StackSummary) -> str:
        # The innermost line of the learner's own file, not the one in PyTorch that it called.
        own = [frame for frame in frames if frame.filename == str(self.path)]
        return f"line {own[-1].lineno}: {own[-1].line}" if own else ""

    def _send(self, report: Report) -> None:
        if self.report_lock.acquire(blocking=False):
            send(self.pipe, replace(report, printed=self.printed.getvalue()[:MAX_PRINTED]))


def run_rank(pipe: Connection, path: Path, name: str) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        # Drops what C++ writes about connections; Python's prints are captured.
        os.dup2(nothing, stream)
    # No core dumps: gloo aborts on a message of unexpected size.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Rank(pipe, path).run(name)
