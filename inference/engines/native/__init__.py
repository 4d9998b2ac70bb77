"""Our own kernels: a whole int8 classifier in one call, see encoder.h."""

from __future__ import annotations

from inference.engines.native.library import instruction_sets, library_path

_PLAIN = "plain"
# Instruction sets with which the kernels were compared with the other engines
# (benchmarks/serving.md).
_COMPARED = ("avx512_vnni", "avx512", "avx_vnni", "avx2")


def is_supported() -> tuple[bool, str]:
    """Whether the kernels are compiled and have instructions of this processor, and what that means
    for speed.

    Plain C, which runs everywhere, does not count: ONNX Runtime is faster.
    """
    if library_path() is None:
        return False, (
            "the int8 kernels are not compiled, so int8 models run on ONNX Runtime, which takes "
            "1.5 times as long, or on NumPy, which takes about 20 times as long; install a C "
            "compiler (apt-get install gcc, xcode-select --install), then install DistriNews "
            "again (pip install --editable .)"
        )
    try:
        best = instruction_sets()[0]
    except OSError as error:
        return False, str(error)
    if best == _PLAIN:
        return (
            False,
            "the int8 kernels support no instructions of this processor (AVX2 on x86-64, NEON on "
            "ARM)",
        )
    return True, f"our own int8 kernels, on {best}"


def is_known_fastest() -> bool:
    """Whether no other engine comes near the kernels on this kind of processor."""
    return is_supported()[0] and instruction_sets()[0] in _COMPARED
