"""Signals that ask a run to stop: finish the step, save, and exit so that it can be resumed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from common.errors import StopAsked
from training.fault_tolerance.terminal import outlive_terminal

# SIGTERM and SIGINT come from people, launchers and Kubernetes, SIGHUP when a terminal closes, and
# SIGUSR1 from SLURM shortly before the time limit.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# Schedulers and launchers kill 30 s after asking.
STOP_SECONDS = 20.0
# A launcher forwards the Ctrl-C that its ranks have already received from the terminal; a second
# one by a person takes longer.
SECOND_THOUGHT = 1.0
# The final message may go into a pipe that nobody reads.
FINAL_MESSAGE_SECONDS = 5.0


class Interruption:
    """Whether this process was asked to stop. Within its context, stop signals only set ``asked``.

    Before :meth:`saving` there is nothing to save, so a signal ends the process with
    :class:`StopAsked`; only SIGUSR1, which comes long before the end, is remembered. After it, the
    process is already on its way out and signals change nothing. A second Ctrl-C ends it
    immediately, anywhere. SIGHUP stays ignored if it was (nohup).

    Python only runs a signal handler between two instructions of its main thread, which may be
    stuck in a collective, so a thread listens too. Outside the main thread no signal can be caught:
    there the context does nothing, and the owner of the thread decides when it ends (Ray trains in
    a thread of its workers).

    Args:
        exit_code: of a process that stops with nothing saved; after Ctrl-C it is 130, as usual.
        is_first: whether this rank prints.
    """

    def __init__(self, exit_code: int, *, is_first: bool) -> None:
        self.asked = False
        self.exit_code = exit_code
        self._is_first = is_first
        self._saves = self._gives_up = False
        self._before = {}
        self._depth = 0
        self._ended = threading.Event()

    def __enter__(self) -> Interruption:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._ended.clear()
            # As a signal arrives, C code writes its number into this pipe, whatever the main thread
            # is doing. It must not block: a handler that waits would stop the process.
            reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._fd_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            threading.Thread(
                target=self._listen, args=[reader], name="signals", daemon=True
            ).start()
            outlive_terminal()
            is_nohup = (signal.SIGHUP, signal.SIG_IGN)
            self._before = {
                number: signal.signal(number, self._handle)
                for number in STOP_SIGNALS
                if (number, signal.getsignal(number)) != is_nohup
            }
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth or not self._before:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not Python that set it
        self._before = {}
        self._ended.set()
        signal.set_wakeup_fd(self._fd_before)
        os.close(self._writer)

    @contextlib.contextmanager
    def saving(self) -> Iterator[Interruption]:
        """From here on a stop is synchronized and saved."""
        with self:
            # For good: the error that ends the run must not give way to a late signal.
            self._saves = True
            yield self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        # SLURM sends SIGUSR1 long before the limit: the run goes on until it can be saved.
        if number != signal.SIGUSR1 and not self._saves and not self._gives_up:
            self._gives_up = True
            raise StopAsked(
                130 if number == signal.SIGINT else self.exit_code, quiet=not self._is_first
            )

    def _listen(self, reader: int) -> None:
        interrupted = None
        while received := os.read(reader, 1):
            number = received[0]
            if number not in STOP_SIGNALS:
                continue
            if number == signal.SIGINT:
                if interrupted is not None and time.monotonic() - interrupted > SECOND_THOUGHT:
                    leave(128 + number, "interrupted")
                interrupted = interrupted or time.monotonic()
            if not self._saves and number != signal.SIGUSR1:
                self._end_if_stuck()
            self.asked = self.asked or self._saves
        os.close(reader)

    def _end_if_stuck(self) -> None:
        """Give the main thread time to run its handler, which ends the process; if not, end it."""
        # A save that has become possible meanwhile changes that: then the step loop stops it.
        if not self._ended.wait(STOP_SECONDS) and not self._saves:
            leave(
                self.exit_code,
                "error: stop requested, but another rank does not respond; there was nothing to "
                "save [stop-not-agreed]",
            )


def run_rank(main: Callable[[], None]) -> NoReturn:
    """Run the main function of a rank, print what it fails with, and exit without cleanup.

    Leaving a process group and unloading CUDA may wait for ranks that wait for this one. Besides, a
    launcher waits for the last rank before it restarts them, and freeing the memory of a Python
    process takes seconds.
    """
    code: int | str | None = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    leave(code if isinstance(code, int) else 0 if code is None else 1)


def leave(exit_code: int, line: str = "") -> NoReturn:
    """End the process from any thread, whatever the main thread is waiting for."""
    # A timer first: to print may block, and so may the lock of a stream that another thread holds.
    last = threading.Timer(FINAL_MESSAGE_SECONDS, os._exit, (exit_code,))
    last.daemon = True
    last.start()
    if line:
        print(line, file=sys.stderr, flush=True)
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a progress bar hides the cursor
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(exit_code)
