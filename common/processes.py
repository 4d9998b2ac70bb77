"""What Linux knows of other processes, and how one ends with its parent."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
# Opened at import: between fork and exec, where it is needed, another thread's lock on the
# dynamic loader would never be released.
_LIBC = ctypes.CDLL(None)


def process_fields(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the third on; empty without such a process or Linux.

    Counted from 0: the state is 0, the start in ticks since the machine's own is 19.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    # The second field is the name in parentheses. It may hold blanks, parentheses and bytes that
    # are no text, so only what follows the last parenthesis can be split.
    return stat.rpartition(b")")[2].decode().split()


def receive_when_parent_dies(number: int) -> None:
    """Have Linux send this process a signal when its parent dies, however that dies.

    Source: prctl(2), PR_SET_PDEATHSIG. Does nothing on other systems.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
