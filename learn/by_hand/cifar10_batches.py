"""CIFAR-10's own files: binary batches, and Python batches, which are pickles and are read without
running their code.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, and the page of
the data set, which describes both layouts.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from common.errors import UserError, first_line

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
PIXELS = 3 * 32 * 32
Rows = tuple[np.ndarray, np.ndarray]  # images, uint8, (rows, 32, 32, 3); labels, int64, (rows,)


def is_batch(name: PurePosixPath) -> bool:
    """Whether a file has the name of a CIFAR-10 batch."""
    return name.name.removesuffix(".bin") in [*BATCHES["train"], *BATCHES["test"]]


def read_batches(files: Mapping[str, bytes], split: str) -> Rows:
    """The rows of a split, batch after batch.

    Args:
        files: contents by name; of each batch ``NAME`` (a Python batch) or ``NAME.bin``.
        split: ``train`` or ``test``.

    Raises:
        UserError: a batch is missing or broken.
    """
    parts = []
    for batch in BATCHES[split]:
        name = f"{batch}.bin" if f"{batch}.bin" in files else batch
        if name not in files:
            raise UserError(
                f"{batch} or {batch}.bin: is missing among {', '.join(sorted(files))}",
                code="images-unreadable",
            )
        read = _read_binary if name.endswith(".bin") else _read_pickle
        pixels, labels = read(name, files[name])
        if labels.max(initial=0) >= len(CLASSES) or labels.min(initial=0) < 0:
            # Whole division by 10 is 0 for the labels 0 to 9, and for no other.
            row = np.flatnonzero(labels // len(CLASSES))[0]
            problem = f"row {row} has a label that is not 0 to 9"
            raise UserError(f"{name}: {problem}", code="images-unreadable")
        # Both layouts have all red values of an image first, then all green, then all blue ones:
        # (rows, 3072) -> (rows, 3, 32, 32) -> (rows, 32, 32, 3).
        parts.append((pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels))
    images, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    return images, labels.astype(np.int64)


def _read_binary(name: str, data: bytes) -> Rows:
    if not data or len(data) % (1 + PIXELS):
        raise UserError(
            f"{name}: {len(data):,} bytes are not a whole number of rows of {1 + PIXELS:,} bytes",
            code="images-unreadable",
        )
    # A row is one byte for the label, then the pixels.
    rows = np.frombuffer(data, np.uint8).reshape(-1, 1 + PIXELS)
    return rows[:, 1:], rows[:, 0]


def _read_pickle(name: str, data: bytes) -> Rows:
    try:
        batch = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
        pixels, labels = batch[b"data"].pixels(), np.array(batch[b"labels"], dtype=np.int64)
    except Exception as error:
        # The documentation of pickle: unpickling may raise errors of any type.
        problem = f"not a Python batch of CIFAR-10 ({first_line(error)})"
        raise UserError(f"{name}: {problem}", code="images-unreadable") from error
    if labels.shape != (len(pixels),) or not len(labels):
        problem = f"{len(pixels):,} images, but labels of shape {labels.shape}"
        raise UserError(f"{name}: {problem}", code="images-unreadable")
    return pixels, labels


class _PickledDtype:
    """Stand-in for ``numpy.dtype``; CIFAR-10 needs only bytes."""

    def __init__(self, code: bytes | str, *_: Any) -> None:
        if code not in (b"u1", "u1"):
            raise pickle.UnpicklingError(f"an array of type {code!r}, not of bytes")

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like: a byte has none."""


class _PickledArray:
    """Stand-in for a numpy array: keeps its pickled state."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self) -> np.ndarray:
        """The array itself, uint8, (rows, 3072)."""
        # What numpy pickles of an array: a version, the shape, the dtype, whether columns come
        # first, and the bytes.
        _, shape, _, is_fortran, data = self.state
        if is_fortran or shape[1:] != (PIXELS,):
            raise pickle.UnpicklingError(f"an array of shape {shape}, not (rows, {PIXELS})")
        return np.frombuffer(data, np.uint8).reshape(shape)


# A pickle names functions to call, which is how a foreign file can run code. A batch of CIFAR-10
# needs only those that make an array, and gets these classes instead of them.
_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): _PickledArray,  # as numpy 2 calls it
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledDtype,
}


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain containers, and arrays as stand-ins; rejects all else, so no code runs."""

    def find_class(self, module: str, name: str) -> type:
        """The stand-in for what a pickle wants to call.

        Raises:
            UnpicklingError: it is not part of an array.
        """
        if (module, name) not in _STAND_INS:
            problem = "which is not part of an array and was not run"
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, {problem}")
        return _STAND_INS[module, name]
