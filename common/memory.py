"""Keeps what the C library holds of free memory small; only glibc on Linux holds much."""

from __future__ import annotations

import ctypes
import gc
import sys

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_GLIBC = _LIBC if hasattr(_LIBC, "mallopt") and hasattr(_LIBC, "malloc_trim") else None
_M_ARENA_MAX = -8  # of malloc.h


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
