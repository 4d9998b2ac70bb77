"""The log's lines for people, in a terminal; those in JSON are tested with what they are about."""

import logging
import sys
from typing import Any

import pytest

from inference.http.request_log import TerminalLines


def _line(message: str, level: int = logging.INFO, error: Any = None, **fields: Any) -> str:
    record = logging.LogRecord("inference", level, "app.py", 1, message, (), error)
    record.fields = fields
    return TerminalLines().format(record)


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({}, "POST /predict  200  2.4 ms"),
        ({"texts": 1, "tokens": 12, "tokenize_ms": 0.1}, "POST /predict  200  2.4 ms  1 text, 12 tokens"),
        ({"code": "queue_full"}, "POST /predict  200  2.4 ms  queue_full"),
    ],
)
def test_a_request_is_one_line_for_people(more: dict[str, Any], end: str) -> None:
    request = {"request_id": "a1", "method": "POST", "route": "/predict", "status": 200, "ms": 2.41}

    time, _, line = _line("request", **request, **more).partition("  ")

    assert (len(time), line) == (8, end)


def test_a_failure_names_type_and_place_but_not_its_message() -> None:
    try:
        raise ValueError("a client's text")
    except ValueError:
        line = _line("request failed", logging.ERROR, sys.exc_info(), request_id="a1")

    assert "  error: request failed  a1  ValueError at " in line
    assert "test_request_log.py:" in line
    assert "client" not in line


def test_a_name_cannot_command_the_terminal() -> None:
    assert "\\x1b[2J" in _line("serving \x1b[2J")
