"""Failures of the store, in the server's log."""

from __future__ import annotations

import logging
import time

from inference.observing.store import StoreError

_INTERVAL_S = 60.0


class FailureLog:
    """Logs failures of one kind, at most one per minute; used from one thread."""

    def __init__(self, what: str, logger: logging.Logger) -> None:
        self._what, self._logger = what, logger
        self._logged_at = float("-inf")

    def __call__(self, error: Exception) -> None:
        if time.monotonic() - self._logged_at < _INTERVAL_S:
            return
        self._logged_at = time.monotonic()
        if isinstance(error, StoreError):
            self._logger.error("%s: %s", self._what, error.line)
        else:  # a bug, which needs its traceback
            self._logger.error("%s", self._what, exc_info=error)
