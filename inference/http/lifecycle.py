"""From SIGTERM to the exit: not ready but still answering, then the port closes and requests in
progress finish.

A worker among several may also leave while others stay, when they take over with a new model: it
closes its port at once and stays ready, as probes that reach it are about the server, which is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from inference.settings import Settings

logger = logging.getLogger(__name__)

# Of a process that ended because only a new one helps: an internal software error, in sysexits.h.
DEAD_EXIT_CODE = 70
# Seconds between two looks whether a worker that leaves has requests left.
_IDLE_CHECK_S = 0.1
# Seconds beyond grace until a process that still runs is made to end.
_LAST_SECONDS = 5.0


def server_of_process() -> Any:
    """The uvicorn.Server that runs in this process, whose SIGTERM handler is used; None if there is
    none.

    uvicorn tells an application nothing about the server around it, whether uvicorn's command
    started it or ours.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return server if hasattr(server, "should_exit") else None


class Lifecycle:
    """Whether this process is shutting down.

    ``is_draining``: set immediately by SIGTERM; probes then say not ready, and answers ask clients
    to close the connection. ``is_leaving``: the latter alone.
    """

    def __init__(self, settings: Settings) -> None:
        self.is_draining = False
        self.is_leaving = False
        self.exit_code: int | None = None
        self._drain_seconds = settings.drain_seconds
        self._grace_seconds = settings.grace_seconds

    def take_signals(self, reload: Callable[[], Any]) -> None:
        """Drain on SIGTERM before the server's own handler runs, and call `reload` on SIGHUP.

        Must be called from the event loop in the main thread; elsewhere it does nothing, because
        signals do not arrive there.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, reload)
        stop = signal.getsignal(signal.SIGTERM)
        if not callable(stop):
            return

        def drain_first(number: int, frame: FrameType | None) -> None:
            # A second signal must not start a second timer.
            if self.is_draining:
                return
            self.is_draining = True
            # A handler runs between any two instructions of the loop, so it only leaves a note;
            # this way of doing so also wakes a loop that is asleep.
            loop.call_soon_threadsafe(self._stop_later, stop, number)

        signal.signal(signal.SIGTERM, drain_first)

    def leave(self, server: Any) -> None:
        """Let other processes have what comes from now on, and end once all requests in progress
        are answered.

        There is no deadline, since a stream may take hours; SIGTERM sets one.
        """
        if self.is_leaving or self.is_draining:
            return
        self.is_leaving = True
        if not server.started:  # nor has it accepted anything
            self._exit(server)
            return
        # Only this process's copies: the supervisor and the new workers keep the port open. Answers
        # tell clients to close their connections, so those come to an end, too.
        for listening in server.servers:
            listening.close()
        asyncio.get_running_loop().call_later(self._drain_seconds, self._exit_once_idle, server)

    def _exit_once_idle(self, server: Any) -> None:
        if self.is_draining:
            return
        if server.server_state.tasks:
            asyncio.get_running_loop().call_later(_IDLE_CHECK_S, self._exit_once_idle, server)
        else:
            self._exit(server)

    def die(self, server: Any, reason: str) -> None:
        """End the process with `DEAD_EXIT_CODE`, even if its threads hang; `end` comes last."""
        logger.critical(
            "the process ends with exit code %d, so that a new one starts: %s",
            DEAD_EXIT_CODE,
            reason,
        )
        self.is_draining = True
        self.exit_code = DEAD_EXIT_CODE
        # The orderly way needs the event loop and threads that return, which may be what is broken.
        last_resort = threading.Timer(
            self._grace_seconds + _LAST_SECONDS, os._exit, (DEAD_EXIT_CODE,)
        )
        last_resort.daemon = True
        last_resort.start()
        self._exit(server)

    def end(self) -> None:
        """Exit at once if the process is to end with a code: uvicorn would end it with 0."""
        if self.exit_code is not None:
            logging.shutdown()
            os._exit(self.exit_code)

    def _stop_later(self, stop: Callable[[int, FrameType | None], Any], number: int) -> None:
        logger.info("SIGTERM: not ready; the port closes in %g s", self._drain_seconds)
        asyncio.get_running_loop().call_later(self._drain_seconds, self._stop, stop, number)

    def _stop(self, stop: Callable[[int, FrameType | None], Any], number: int) -> None:
        server = getattr(stop, "__self__", None)
        if not hasattr(server, "should_exit"):
            stop(number, None)
            return
        # uvicorn's own handler would end the process by the signal in the end, but a completed
        # drain should exit with 0.
        self._exit(server)

    def _exit(self, server: Any) -> None:
        server.config.timeout_graceful_shutdown = (
            server.config.timeout_graceful_shutdown or self._grace_seconds
        )
        server.should_exit = True
