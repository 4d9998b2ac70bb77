"""Our own kernels: a whole int8 classifier in one call, see kernels.c."""

from __future__ import annotations

from common.hardware import cpu_flags
from inference.engines.native.library import library_path

_NEEDED_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c")


def is_supported() -> tuple[bool, str]:
    """Whether this processor runs the kernels and they are compiled, and why or why not."""
    missing = [flag for flag in _NEEDED_FLAGS if flag not in cpu_flags()]
    if missing:
        return False, f"the processor lacks {', '.join(missing)}"
    if library_path() is None:
        return False, "the kernels are not compiled: install again with a C compiler"
    return True, "our own int8 kernels on AVX512-VNNI"
