"""A terminal that may close, with its window or its connection, while a run still prints."""

from __future__ import annotations

import io
import sys


class _Terminal(io.FileIO):
    """Discards what is written after the terminal is gone."""

    def write(self, data: bytes | memoryview) -> int | None:
        try:
            return super().write(data)
        except OSError:
            # As if all had been written, or the buffer would keep it and raise at the next write.
            return len(data)


def outlive_terminal() -> None:
    """Keep stdout and stderr writable for as long as the process lives, if they are a terminal.

    Otherwise Python would raise in the next print, even in the middle of a save, and exit with 120
    if output is left.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            raw = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            setattr(
                sys,
                name,
                io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True),
            )
