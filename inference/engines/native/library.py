"""Finds the compiled kernels, and declares their structures and functions for ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int32


class LinearStruct(ctypes.Structure):
    """``Linear`` in model.h."""

    _fields_ = [
        ("outputs", _INT),
        ("inputs", _INT),
        ("weight", _POINTER),
        ("scale", _POINTER),
        ("weight_sum", _POINTER),
        ("bias", _POINTER),
        ("centres", _POINTER),
    ]


class NormStruct(ctypes.Structure):
    """``Norm`` in model.h."""

    _fields_ = [("gain", _POINTER), ("bias", _POINTER)]


class BlockStruct(ctypes.Structure):
    """``Block`` in model.h."""

    _fields_ = [
        ("query", LinearStruct),
        ("key_value", LinearStruct),
        ("attention_out", LinearStruct),
        ("wide", LinearStruct),
        ("gate", LinearStruct),
        ("narrow", LinearStruct),
        ("attention_norm", NormStruct),
        ("output_norm", NormStruct),
        ("rotation", _POINTER),
        ("window", _INT),
    ]


class ClassifierStruct(ctypes.Structure):
    """``Classifier`` in model.h."""

    _fields_ = [
        ("labels", _INT),
        ("is_diagonal", _INT),
        ("pooler_weight", _POINTER),
        ("pooler_bias", _POINTER),
        ("norm", NormStruct),
        ("weight", _POINTER),
        ("bias", _POINTER),
    ]


class ModelStruct(ctypes.Structure):
    """``Model`` in model.h."""

    _fields_ = [
        ("blocks", _INT),
        ("width", _INT),
        ("wide", _INT),
        ("heads", _INT),
        ("embedding_width", _INT),
        ("num_positions", _INT),
        ("models", _INT),
        ("labels", _INT),
        ("activation", _INT),
        ("head_activation", _INT),
        ("norm_first", _INT),
        ("is_gated", _INT),
        ("mean_pool", _INT),
        ("padding_id", _INT),
        ("norm_epsilon", ctypes.c_float),
        ("words", _POINTER),
        ("positions", _POINTER),
        ("embedding_norm", NormStruct),
        ("projection", LinearStruct),
        ("distances", _POINTER),
        ("block", ctypes.POINTER(BlockStruct)),
        ("classifier", ctypes.POINTER(ClassifierStruct)),
    ]


class SessionStruct(ctypes.Structure):
    """What ``Session`` in model.h begins with."""

    # A session serves one pass at a time, so a pass may put its own model here: one that differs
    # from the pool's only in its heads.
    _fields_ = [("pool", _POINTER), ("model", _POINTER)]


def library_path() -> Path | None:
    here = Path(__file__).parent
    candidates = (here / f"_kernels{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


@cache
def load_library() -> ctypes.CDLL:
    """Load the compiled kernels.

    Raises:
        OSError: They are missing, do not load, or were compiled from another version of their
            source.
    """
    path = library_path()
    if path is None:
        raise OSError("the native kernels are not compiled; install again with a C compiler")
    library = ctypes.CDLL(str(path))
    # The structures are written twice, here and in model.h. Sizes that differ mean that an old
    # library is still installed, which would read wrong addresses.
    is_ours = hasattr(library, "instruction_set")
    if not is_ours or library.model_bytes() != ctypes.sizeof(ModelStruct):
        raise OSError("the native kernels were compiled from another version; install again")
    # Without these ctypes would pass addresses as 32-bit integers.
    for function, result, arguments in (
        ("instruction_set", ctypes.c_char_p, [_INT]),
        ("fill_rotation", None, [_POINTER, _INT, _INT, _POINTER]),
        ("fill_centres", None, [_POINTER, _INT, _INT, _POINTER]),
        ("open_pool", _POINTER, [ctypes.POINTER(ModelStruct), _INT, ctypes.c_char_p]),
        ("close_pool", None, [_POINTER]),
        ("open_session", ctypes.POINTER(SessionStruct), [_POINTER]),
        ("close_session", None, [ctypes.POINTER(SessionStruct)]),
        (
            "forward",
            _INT,
            [ctypes.POINTER(SessionStruct), _POINTER, _POINTER, _INT, _INT, _POINTER],
        ),
    ):
        getattr(library, function).restype = result
        getattr(library, function).argtypes = arguments
    return library


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets of this processor that the kernels are compiled for, the fastest first.

    Raises:
        OSError: See `load_library`.
    """
    library = load_library()
    names: list[str] = []
    while name := library.instruction_set(len(names)):
        names.append(name.decode())
    return tuple(names)


def chosen_instructions(wanted: str = "auto") -> str:
    """The instruction set that the kernels will use.

    Raises:
        OSError: This processor or these kernels lack the wanted one, or see `load_library`.
    """
    here = instruction_sets()
    if wanted == "auto":
        return here[0]
    if wanted not in here:
        raise OSError(
            f"instructions {wanted!r}: this processor and these kernels have {', '.join(here)}"
        )
    return wanted
