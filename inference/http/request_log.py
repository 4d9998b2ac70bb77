"""The log: JSON lines on standard output, one per request, never with a text in them; in a terminal,
lines for people.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import traceback
from collections import Counter
from typing import Any

from pydantic_core import to_json

from common.escaping import printable
from common.text import counted
from inference.http.request_context import RequestContext

_requests = logging.getLogger("inference.requests")
_errors = logging.getLogger("inference.errors")
# Under overload most requests end in one of these.
_OVERLOAD_CODES = frozenset(("queue_full", "server_busy", "rate_limited"))
_REFUSALS_INTERVAL_S = 1.0


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, and its `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds, fraction = divmod(record.created, 1)
        to_the_second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        line: dict[str, Any] = {
            "time": f"{to_the_second}.{int(fraction * 1000):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = _without_message(record.exc_info[1])
        return to_json(line, fallback=str, inf_nan_mode="strings").decode()


class TerminalLines(logging.Formatter):
    """A record as a person reads it: `12:04:09  POST /predict  200  2.4 ms  1 text, 12 tokens`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        request_id = fields.pop("request_id", None)
        if "ms" in fields:  # of a request
            what = "{method} {route}  {status}  {ms:.1f} ms".format(**fields)
            if "texts" in fields:
                what += f"  {counted(fields['texts'], 'text')}, {fields['tokens']:,} tokens"
            what += f"  {fields['code']}" if "code" in fields else ""
        else:
            what = "  ".join([record.getMessage(), *(f"{key} {fields[key]}" for key in fields)])
        if record.levelno >= logging.WARNING:
            what = f"{record.levelname.lower()}: {what}"
        # By it a client's report of a failure is found.
        if request_id and (record.levelno >= logging.WARNING or fields.get("status", 0) >= 500):
            what += f"  {request_id}"
        if record.exc_info and record.exc_info[1] is not None:
            error = _without_message(record.exc_info[1])
            what = f"{what}  {error['type']} at {' < '.join(reversed(error['frames']))}"
        # What is logged may name a path or a model of somebody else's.
        return printable(f"{time.strftime('%H:%M:%S', time.localtime(record.created))}  {what}")


def _without_message(error: BaseException) -> dict[str, Any]:
    # A library's message may quote what it failed on, which may be a client's text, so only type
    # and location are logged.
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "type": type(error).__name__,
        "frames": [f"{frame.filename}:{frame.lineno}" for frame in frames],
    }


def configure_logging(level: str, logger: logging.Logger) -> None:
    """Send a logger's records to standard output, unless it is configured: as JSON lines, or, in a
    terminal, as lines for people.
    """
    if logger.hasHandlers():
        return
    # What no line shows need not be found out for each: the process, the thread, the task and the
    # code that logs.
    logging.logProcesses = logging.logThreads = logging.logMultiprocessing = (
        logging.logAsyncioTasks
    ) = False
    logging._srcfile = None
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(TerminalLines() if sys.stdout.isatty() else JsonLines())
    logger.addHandler(handler)
    logger.setLevel(level.upper())


class RequestLog:
    """One line per request; those that overload refuses share one per second, as a line for each
    costs more than the refusal. Only used on the event loop.
    """

    def __init__(self) -> None:
        self._refused: Counter[tuple[str, int, str]] = Counter()  # by route, status and code

    def write(self, context: RequestContext, method: str, status: int, seconds: float) -> None:
        if not _requests.isEnabledFor(logging.INFO):
            return
        if context.error_code in _OVERLOAD_CODES:
            if not self._refused:
                asyncio.get_running_loop().call_later(_REFUSALS_INTERVAL_S, self.write_refused)
            self._refused[context.route, status, context.error_code] += 1
            return
        fields: dict[str, Any] = {
            "request_id": context.request_id,
            "method": method,
            "route": context.route,
            "status": status,
            "ms": round(seconds * 1000, 2),
        }
        if context.num_texts:
            fields["texts"] = context.num_texts
            fields["tokens"] = context.num_tokens
        if context.stages is not None:
            names = ("tokenize_ms", "queue_ms", "forward_ms")
            fields |= {
                name: round(one * 1000, 2) for name, one in zip(names, context.stages, strict=True)
            }
        if context.error_code is not None:
            fields["code"] = context.error_code
        _requests.info("request", extra={"fields": fields})

    def write_refused(self) -> None:
        """Write the lines of the refusals that were counted since the last ones."""
        for (route, status, code), num_requests in self._refused.items():
            fields = {"route": route, "status": status, "code": code, "requests": num_requests}
            _requests.info("requests refused", extra={"fields": fields})
        self._refused.clear()


def log_failure(context: RequestContext, error: BaseException) -> None:
    """Log an unexpected error, with the id of the request that caused it."""
    _errors.error(
        "request failed", exc_info=error, extra={"fields": {"request_id": context.request_id}}
    )
