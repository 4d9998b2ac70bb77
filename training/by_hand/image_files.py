"""Images as files, in a folder or packed as ``.tar.gz``: ``train/CLASS/NAME.png`` and ``test/CLASS/NAME.png``."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from training.errors import UserError, first_line

SPLITS = ("train", "test")
SUFFIXES = (".png", ".jpg", ".jpeg")
SIDE = 32  # pixels
Files = dict[PurePosixPath, bytes]


def read_files(path: Path, wanted: Callable[[PurePosixPath], bool]) -> Files:
    """The contents of files of a folder or of an archive, by name within it, in the order of names.

    Args:
        path: a folder, or a ``.tar``, packed or not; nothing is unpacked onto the disk.
        wanted: whether a file is to be read, by its name.

    Raises:
        UserError: it cannot be read.
    """
    try:
        if path.is_dir():
            names = (PurePosixPath(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
            files = {name: (path / name).read_bytes() for name in names if wanted(name)}
        else:
            with tarfile.open(path) as archive:  # in its own order: to go back would unpack it from the start
                members = ((PurePosixPath(member.name), member) for member in archive if member.isfile())
                files = {name: archive.extractfile(member).read() for name, member in members if wanted(name)}
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise UserError(f"cannot be read ({first_line(error)})") from error
    return dict(sorted(files.items()))


def is_image_of_class(name: PurePosixPath) -> bool:
    """Whether a name ends in ``train/CLASS/NAME.png`` or the like."""
    return len(name.parts) >= 3 and name.parts[-3] in SPLITS and name.suffix.lower() in SUFFIXES


def classes_of(files: Files) -> list[str]:
    """The names of the folders under ``train``, sorted: the order of labels."""
    return sorted({name.parts[-2] for name in files if name.parts[-3] == "train"})


def read_images(files: Mapping[PurePosixPath, bytes], split: str, classes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The images of a split; those of another size are scaled.

    Returns:
        Pixels, uint8, (rows, 32, 32, 3), and labels, int64, (rows,).

    Raises:
        UserError: there are none, or one is no image or of an unknown class (named).
    """
    mine = {name: data for name, data in files.items() if name.parts[-3] == split}
    if not mine:
        raise UserError(f"holds no {split}/CLASS/*.png or *.jpg")
    strange = next((name for name in mine if name.parts[-2] not in classes), None)
    if strange:
        raise UserError(f"{strange}: class {strange.parts[-2]!r} is none of the training classes {', '.join(classes)}")
    images = np.stack([_decode(name, data) for name, data in mine.items()])
    return images, np.array([classes.index(name.parts[-2]) for name in mine], dtype=np.int64)


def _decode(name: PurePosixPath, data: bytes) -> np.ndarray:
    try:
        image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG")).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{name}: no image that can be read ({type(error).__name__})") from error
    return np.asarray(image if image.size == (SIDE, SIDE) else image.resize((SIDE, SIDE)))
