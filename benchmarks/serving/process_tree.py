"""All processes of a server, however it starts them: their memory, their processor time, and their end.

Frameworks start workers in sessions of their own, so that parents and groups do not tell whose they are; a variable in
the environment, which all of them inherit, does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

MARK = "SERVING_LOAD_MARK"
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessTree:
    """The processes whose environment carries a mark."""

    def __init__(self, mark: str) -> None:
        self._needle = f"{MARK}={mark}".encode()

    def pids(self) -> list[int]:
        """Those that are alive now."""
        folders = (folder for folder in Path("/proc").iterdir() if folder.name.isdecimal())
        return [int(folder.name) for folder in folders if self._needle in _read(folder / "environ").split(b"\0")]

    def pss_bytes(self) -> int:
        """Resident memory, pages that several of them share counted once."""
        return sum(_pss(pid) for pid in self.pids())

    def cpu_seconds(self) -> float:
        """Processor time of the living and of the children that they have waited for."""
        return sum(_cpu_ticks(pid) for pid in self.pids()) / _TICKS

    def end(self, process: subprocess.Popen[bytes], grace: float) -> None:
        """Ask the first process to end, and after ``grace`` seconds kill whatever is left."""
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        _wait_until(lambda: process.poll() is not None and not self.pids(), grace)
        for pid in self.pids():
            _kill(pid)
        process.kill()
        process.wait()
        _wait_until(lambda: not self.pids(), grace)


def _wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.05)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it went by itself


def _pss(pid: int) -> int:
    for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_ticks(pid: int) -> int:
    # After the name in brackets, which may hold blanks: fields 14 to 17 are the four times.
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    return sum(map(int, fields[11:15]))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # gone, or a process of the kernel
