"""Arrays in one file that is mapped into memory, and may be larger than it.

The file is in the format of safetensors, whose own library needs all arrays in memory to write
them.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.files import writing_whole

DTYPES = {
    "F64": "float64",
    "I64": "int64",
    "F32": "float32",
    "I32": "int32",
    "U16": "uint16",
    "U8": "uint8",
}
PIECE = 4 * 2**20


class GrowingArray:
    """An array of one dimension, alone in a file, which is temporary unless it is given."""

    def __init__(
        self, folder: Path, dtype: str, file: BinaryIO | None = None, length: int = 0
    ) -> None:
        # Lives as long as the array.
        self.file: BinaryIO = file or tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.dtype, self.shape = np.dtype(dtype), (length,)

    def extend(self, values: np.ndarray) -> None:
        self.file.write(values.astype(self.dtype).data)
        self.shape = (self.shape[0] + len(values),)

    def pieces(self) -> Iterator[bytes]:
        self.file.seek(0)
        while piece := self.file.read(PIECE):
            yield piece


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray | GrowingArray], about: Mapping[str, Any]
) -> None:
    """Write the file whole or not at all; ``about`` is kept with the arrays."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    # The widest numbers first: then each array begins where its numbers may.
    ordered = dict(sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    layout: dict[str, Any] = {}
    end = 0
    for name, one in ordered.items():
        begin, end = end, end + int(np.prod(one.shape)) * one.dtype.itemsize
        layout[name] = {
            "dtype": names[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [begin, end],
        }
    digest = _new_digest(layout)
    for one in ordered.values():
        for piece in _pieces(one):
            digest.update(piece)
    metadata = {"about": json.dumps(dict(about)), "sha256": digest.hexdigest()}
    header = json.dumps({"__metadata__": metadata, **layout}).encode()
    # Padded to eight bytes, so that the arrays behind the header are aligned for any dtype.
    header += b" " * (-len(header) % 8)
    # The digest is in the header, before the arrays, so they are read twice: once for the digest
    # and once to copy them. Going back to fill it in would need a file that can be seen half done.
    with writing_whole(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for one in ordered.values():
            for piece in _pieces(one):
                file.write(piece)


def find_damage(path: Path) -> str | None:
    """Why the file is not what was written, None if it is; it is read from beginning to end."""
    try:
        layout, metadata, begin = _read_header(path)
        if "sha256" not in metadata:
            return "an earlier version wrote it"
        expected, digest = metadata["sha256"], _new_digest(layout)
        # Pieces are large, so a buffer would only copy them once more.
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            while piece := file.read(PIECE):
                digest.update(piece)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None if digest.hexdigest() == expected else "they do not match their SHA-256"


@dataclass(frozen=True)
class ArrayFile:
    """An undamaged file; ``entries``: dtype, shape and first byte of each array."""

    path: Path
    about: dict[str, Any]
    entries: dict[str, tuple[str, tuple[int, ...], int]]

    @classmethod
    def open(cls, path: Path) -> ArrayFile:
        layout, metadata, begin = _read_header(path)
        entries = {
            name: (DTYPES[one["dtype"]], tuple(one["shape"]), begin + one["data_offsets"][0])
            for name, one in layout.items()
        }
        return cls(path, json.loads(metadata["about"]), entries)

    def __getitem__(self, name: str) -> np.ndarray:
        """An array, mapped: all processes of a machine share its pages."""
        dtype, shape, begin = self.entries[name]
        if 0 in shape:  # of which nothing can be mapped
            return np.empty(shape, dtype)
        # Copy on write, because PyTorch warns of arrays that nobody may write to.
        return np.asarray(np.memmap(self.path, dtype, "c", begin, shape))


def _new_digest(layout: Mapping[str, Any]) -> Any:
    return hashlib.sha256(json.dumps(layout).encode())


def _pieces(one: np.ndarray | GrowingArray) -> Iterator[Any]:
    return one.pieces() if isinstance(one, GrowingArray) else iter([np.ascontiguousarray(one).data])


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, str], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= path.stat().st_size:
            raise ValueError("it has no header")
        layout = json.loads(file.read(length))
    return layout, layout.pop("__metadata__"), 8 + length
