"""What the C library does with memory that is freed; on other systems than Linux with glibc, nothing changes."""

from __future__ import annotations

import ctypes
import gc
import sys

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_GLIBC = _LIBC if hasattr(_LIBC, "mallopt") and hasattr(_LIBC, "malloc_trim") else None
# Of malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_KEPT = 1 << 30  # bytes


def release_free_memory() -> None:
    """Give back to the system what is no longer used, such as a model that was just dropped."""
    # A model's weights are in reference cycles with its threads. The collector does not see memory
    # outside Python and may wait long, so without this every load would add a model's size.
    gc.collect()
    if _GLIBC:
        _GLIBC.malloc_trim(0)  # otherwise glibc keeps most of what is free now


def limit_memory_pools() -> None:
    """Have all threads share two pools of memory; call it before they are started."""
    # glibc keeps a pool of memory for each thread, up to eight per core, and every load has new
    # threads: their pools would add several times a model's size during a server's first reloads.
    # This counts for pools that do not exist yet.
    if _GLIBC:
        _GLIBC.mallopt(_M_ARENA_MAX, 2)


def keep_freed_memory() -> None:
    """Keep what a training step frees for the next one, except for single allocations above 1 GiB.

    By default glibc returns large tensors to the system when they are freed. The next step then gets
    its memory back page by page, each filled with zeros by the kernel first: thousands of page
    faults per step.
    """
    if _GLIBC:
        # Both, because setting one of them ends glibc's own adjustment of the other. Some versions
        # refuse more than 32 MiB for the first, so that comes before.
        _GLIBC.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        _GLIBC.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        _GLIBC.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
