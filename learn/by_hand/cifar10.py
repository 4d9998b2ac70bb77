"""Images of 32 x 32 pixels: CIFAR-10 (from the hub or files), a folder, or drawn shapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import UserError, first_line
from learn.by_hand.cifar10_batches import CLASSES, is_batch, read_batches
from learn.by_hand.image_files import (
    SPLITS,
    classes_of,
    decode,
    is_image_of_class,
    read_files,
    stack_images,
)
from learn.by_hand.shapes import SHAPES, draw_shapes

ON_THE_HUB = "uoft-cs/cifar10"
_FOLDER = "--data FOLDER with CIFAR-10's files or train/CLASS/*.png"
OFFLINE_HINT = f"without a network use --data shapes, or {_FOLDER}"
NUM_SHAPES = {"train": (10_000, 1), "test": (2_000, 2)}  # how many, and the seed


@dataclass(frozen=True)
class Split:
    """``images``: uint8, (rows, 32, 32, 3); ``labels``: int64, (rows,)."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageData:
    """Training and test images, and the names of their classes."""

    classes: list[str]
    train: Split
    test: Split


def load_images(data: str) -> ImageData:
    """Read images by name or path.

    Args:
        data: ``cifar10`` (the hub), ``shapes`` (drawn here), or a folder or ``.tar.gz`` with
            CIFAR-10's binary or Python batches, or with ``train/CLASS/*.png`` and
            ``test/CLASS/*.png``.

    Raises:
        UserError: no such data, or a file cannot be used (named).
    """
    if data == "shapes":
        splits = (Split(*draw_shapes(*NUM_SHAPES[split])) for split in SPLITS)
        return ImageData(list(SHAPES), *splits)
    if data == "cifar10":
        return _read_hub()
    try:
        if not Path(data).exists():
            raise UserError(f"no such file or folder; {OFFLINE_HINT}", code="data-not-found")
        return _read_path(Path(data))
    except (UserError, OSError) as error:
        raise UserError(
            f"--data {data}: {first_line(error)}", code=getattr(error, "code", "data-unreadable")
        ) from error


def _read_path(path: Path) -> ImageData:
    batches, images = {}, {}
    # Both layouts in one pass over the files, since a .tar.gz can only be read from its start.
    for name, content in read_files(path, lambda name: is_batch(name) or is_image_of_class(name)):
        if is_batch(name):
            batches[name.name] = content
        else:
            images[name] = decode(name, content)
    if batches:
        return ImageData(CLASSES, *(Split(*read_batches(batches, split)) for split in SPLITS))
    classes = classes_of(images)
    return ImageData(classes, *(Split(*stack_images(images, split, classes)) for split in SPLITS))


def _read_hub() -> ImageData:
    from datasets import load_dataset

    try:
        found = load_dataset(ON_THE_HUB)
    except Exception as error:
        # The hub's HTTP client has errors of its own, which differ between its versions.
        problem = f"the hub could not be read ({first_line(error)}); {OFFLINE_HINT}"
        raise UserError(f"--data cifar10: {problem}", code="hub-unreachable") from error
    splits = []
    for rows in (found[split] for split in SPLITS):
        images = np.stack([np.asarray(image) for image in rows["img"]])  # (rows, 32, 32, 3)
        splits.append(Split(images, np.array(rows["label"])))
    return ImageData(found["train"].features["label"].names, *splits)
