"""A terminal that may be closed, by a broken connection or with its window, while a run has more to say."""

from __future__ import annotations

import io
import sys


class _Terminal(io.FileIO):
    """What is written once the terminal is gone goes nowhere, and is no error."""

    def write(self, data: bytes | memoryview) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def outlive_terminal() -> None:
    """Let stdout and stderr, where they are a terminal, be written to for as long as the process lives.

    Python would raise in whatever print comes next, in the middle of a save too, and end with 120 should one be left.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            raw = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))
