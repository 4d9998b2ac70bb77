"""Memory of the CPU that a training step frees is kept for the next one."""

from __future__ import annotations

import ctypes
import sys

# glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST = 1 << 30  # bytes; larger allocations still go back to the system at once


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_GLIBC = _LIBC if hasattr(_LIBC, "mallopt") and hasattr(_LIBC, "malloc_trim") else None


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, up to what a step needed at its most.

    By default glibc returns large tensors to the system when they are freed. The next step then gets
    its memory back page by page, each filled with zeros by the kernel first: thousands of page
    faults per step. On other systems nothing changes.
    """
    if _GLIBC:
        # Both, because setting one of them ends glibc's own adjustment of the other. Some versions
        # refuse more than 32 MiB for the first, so that comes before.
        _GLIBC.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        _GLIBC.mallopt(M_MMAP_THRESHOLD, LARGEST)
        _GLIBC.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Give what is kept back to the system, so that a process's size says what it uses."""
    if _GLIBC:
        _GLIBC.malloc_trim(0)
