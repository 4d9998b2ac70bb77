"""Finds the compiled `kernels.c`, and declares its structures and functions for ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int32


class LinearStruct(ctypes.Structure):
    """``Linear`` in kernels.c."""

    _fields_ = [
        ("outputs", _INT),
        ("inputs", _INT),
        ("weight", _POINTER),
        ("scale", _POINTER),
        ("row_offset", _POINTER),
        ("bias", _POINTER),
    ]


class NormStruct(ctypes.Structure):
    """``Norm`` in kernels.c."""

    _fields_ = [("gain", _POINTER), ("bias", _POINTER)]


class BlockStruct(ctypes.Structure):
    """``Block`` in kernels.c."""

    _fields_ = [
        ("query", LinearStruct),
        ("key_value", LinearStruct),
        ("attention_out", LinearStruct),
        ("wide", LinearStruct),
        ("narrow", LinearStruct),
        ("attention_norm", NormStruct),
        ("output_norm", NormStruct),
    ]


class ModelStruct(ctypes.Structure):
    """``Model`` in kernels.c."""

    _fields_ = [
        ("blocks", _INT),
        ("width", _INT),
        ("wide", _INT),
        ("heads", _INT),
        ("labels", _INT),
        ("activation", _INT),
        ("head_is_tanh", _INT),
        ("norm_epsilon", ctypes.c_float),
        ("words", _POINTER),
        ("positions", _POINTER),
        ("embedding_norm", NormStruct),
        ("block", ctypes.POINTER(BlockStruct)),
        ("pooler_weight", _POINTER),
        ("pooler_bias", _POINTER),
        ("classifier_weight", _POINTER),
        ("classifier_bias", _POINTER),
    ]


def library_path() -> Path | None:
    here = Path(__file__).parent
    candidates = (here / f"_kernels{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


@cache
def load_library() -> ctypes.CDLL:
    """Load the compiled kernels.

    Raises:
        OSError: They are missing, do not load, or were compiled from another version of kernels.c.
    """
    path = library_path()
    if path is None:
        raise OSError("the native kernels are not compiled; install again with a C compiler")
    library = ctypes.CDLL(str(path))
    if library.model_bytes() != ctypes.sizeof(ModelStruct) or not hasattr(library, "open_pool"):
        raise OSError("the native kernels were compiled from another version; install again")
    library.open_pool.argtypes = [ctypes.POINTER(ModelStruct), _INT]
    library.open_pool.restype = _POINTER
    library.close_pool.argtypes = [_POINTER]
    library.close_pool.restype = None
    library.open_session.argtypes = [_POINTER]
    library.open_session.restype = _POINTER
    library.close_session.argtypes = [_POINTER]
    library.close_session.restype = None
    library.forward.argtypes = [_POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER]
    library.forward.restype = _INT
    return library
