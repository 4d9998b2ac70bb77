"""JSON lines: files that several processes may append records to, readable after a crash or a full disk."""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends records to a file, each in one write, so that lines of several processes do not mix.

    On NFS that holds for the processes of one machine: lines that several machines write at the same moment may
    overwrite one another there (open(2), ``O_APPEND``), and readers leave out what is torn.

    Nothing here raises for a full or broken disk: a record is lost, not the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._torn = False

    def write(self, record: Mapping[str, Any]) -> bool:
        """Append a record; what is not finite becomes null. Returns whether it is on its way to the disk."""
        line = json.dumps(_null_for_not_finite(record), allow_nan=False, ensure_ascii=False).encode() + b"\n"
        if self._torn:
            line = b"\n" + line
        written = 0
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                written = os.write(file, line)
            finally:
                os.close(file)
        except OSError:
            pass
        self._torn = 0 < written < len(line) or (self._torn and not written)
        return written == len(line)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file in their order; a line that was torn is left out, and no file has none."""
    return parse_lines(path.read_bytes()) if path.exists() else []


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """Read records as they stand in a file; a line that was torn is left out."""
    records = []
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def _null_for_not_finite(value: Any) -> Any:
    # JSON has no NaN and no infinity; a browser or jq would refuse the whole line.
    if isinstance(value, Mapping):
        return {key: _null_for_not_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_null_for_not_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
