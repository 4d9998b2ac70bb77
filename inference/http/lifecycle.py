"""From SIGTERM to the end: not ready, still answering, then the port closes and what is in progress finishes."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from inference.settings import Settings

logger = logging.getLogger(__name__)


def server_of_process() -> Any:
    """Return the uvicorn.Server that runs in this process, None if there is none: its handler of SIGTERM belongs to it.

    uvicorn tells an application nothing of the server around it, whether it was started by its own command or by ours.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return server if hasattr(server, "should_exit") else None


class Lifecycle:
    """Whether this process is on its way out.

    Attributes:
        is_draining: Set at once by SIGTERM: probes say not ready, and answers ask clients to leave the connection.
    """

    def __init__(self, settings: Settings) -> None:
        self.is_draining = False
        self._drain_seconds = settings.drain_seconds
        self._grace_seconds = settings.grace_seconds

    def take_signals(self, reload: Callable[[], Any]) -> None:
        """Put the drain before what the server does on SIGTERM, and `reload` behind SIGHUP.

        Call it from the event loop, in the main thread; elsewhere nothing is changed, for signals go elsewhere too.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, reload)
        stop = signal.getsignal(signal.SIGTERM)
        if not callable(stop):
            return

        def drain_first(number: int, frame: FrameType | None) -> None:
            if self.is_draining:
                return
            self.is_draining = True
            loop.call_soon_threadsafe(self._stop_later, stop, number)

        signal.signal(signal.SIGTERM, drain_first)

    def _stop_later(self, stop: Callable[[int, FrameType | None], Any], number: int) -> None:
        logger.info("SIGTERM: not ready; the port closes in %g s", self._drain_seconds)
        asyncio.get_running_loop().call_later(self._drain_seconds, self._stop, stop, number)

    def _stop(self, stop: Callable[[int, FrameType | None], Any], number: int) -> None:
        server = getattr(stop, "__self__", None)
        if not hasattr(server, "should_exit"):
            stop(number, None)
            return
        # uvicorn's own handler would end the process by the signal once all is done; a finished drain is exit code 0.
        server.config.timeout_graceful_shutdown = server.config.timeout_graceful_shutdown or self._grace_seconds
        server.should_exit = True
