"""Images as files, in a folder or a ``.tar.gz``: ``train/CLASS/*.png``, ``test/CLASS/*.png``."""

from __future__ import annotations

import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from common.errors import UserError, first_line

SPLITS = ("train", "test")
SUFFIXES = (".png", ".jpg", ".jpeg")
SIDE = 32  # pixels
MAX_BYTES = 64 * 2**20  # of a file; a batch of CIFAR-10 has 30 million
# Not **: it skips linked folders, and it would never end if a link leads to a folder above it.
IN_A_FOLDER = ("*", "*/*", "*/*/*", "*/*/*/*")
Name = PurePosixPath


def read_files(path: Path, wanted: Callable[[Name], bool]) -> Iterator[tuple[Name, bytes]]:
    """Files of a folder (four levels) or a ``.tar``, one at a time: all may not fit into memory.

    Raises:
        UserError: something cannot be read, or a file is larger than ``MAX_BYTES``.
    """
    try:
        yield from _in_folder(path, wanted) if path.is_dir() else _in_archive(path, wanted)
    except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        problem = f"cannot be read ({first_line(error)})"
        raise UserError(problem, code="images-unreadable") from error


def _in_folder(path: Path, wanted: Callable[[Name], bool]) -> Iterator[tuple[Name, bytes]]:
    files = chain.from_iterable(sorted(path.glob(level)) for level in IN_A_FOLDER)
    # By their names below the folder, so a folder and an archive of it give the same.
    for name, file in ((Name(file.relative_to(path)), file) for file in files):
        if wanted(name) and file.is_file():
            _check_size(name, file.stat().st_size)
            yield name, file.read_bytes()


def _in_archive(path: Path, wanted: Callable[[Name], bool]) -> Iterator[tuple[Name, bytes]]:
    with tarfile.open(path) as archive:
        # In its own order: to go back would unpack it from the start.
        for name, member in ((Name(member.name), member) for member in archive):
            if wanted(name) and member.isfile():
                _check_size(name, member.size)
                yield name, archive.extractfile(member).read()


def _check_size(name: Name, num_bytes: int) -> None:
    # By the announced size, before anything is read: a small archive can hold a huge file.
    if num_bytes > MAX_BYTES:
        raise UserError(
            f"{name}: {num_bytes:,} bytes; files of more than {MAX_BYTES:,} are not read",
            code="images-unreadable",
        )


def is_image_of_class(name: Name) -> bool:
    """Whether a name ends in ``train/CLASS/NAME.png`` or the like."""
    return len(name.parts) >= 3 and name.parts[-3] in SPLITS and name.suffix.lower() in SUFFIXES


def decode(name: Name, data: bytes) -> np.ndarray:
    """An image, uint8, (32, 32, 3); one of another size is scaled."""
    try:
        # Only these two: other formats of Pillow's have had holes, and a file may be a stranger's.
        image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG")).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        problem = f"not a readable image ({type(error).__name__})"
        raise UserError(f"{name}: {problem}", code="images-unreadable") from error
    return np.asarray(image if image.size == (SIDE, SIDE) else image.resize((SIDE, SIDE)))


def classes_of(images: Mapping[Name, np.ndarray]) -> list[str]:
    """The names of the folders under ``train``, sorted: the order of labels."""
    # Sorted, so that all ranks number the classes alike, in whichever order files are listed.
    return sorted({name.parts[-2] for name in images if name.parts[-3] == "train"})


def stack_images(
    images: Mapping[Name, np.ndarray],
    split: str,
    classes: list[str],
) -> tuple[np.ndarray, np.ndarray]:
    """The images of a split, in the order of their names.

    Returns:
        Pixels, uint8, (rows, 32, 32, 3), and labels, int64, (rows,).

    Raises:
        UserError: there are none, or one is of an unknown class (named).
    """
    names = sorted(name for name in images if name.parts[-3] == split)
    if not names:
        raise UserError(f"holds no {split}/CLASS/*.png or *.jpg", code="images-unreadable")
    strange = next((name for name in names if name.parts[-2] not in classes), None)
    if strange:
        found = strange.parts[-2]
        raise UserError(
            f"{strange}: class {found!r} is not one of the training classes {', '.join(classes)}",
            code="label-unknown",
        )
    labels = [classes.index(name.parts[-2]) for name in names]
    return np.stack([images[name] for name in names]), np.array(labels, dtype=np.int64)
