"""Images of 32 x 32 pixels in classes: CIFAR-10 from the hub or from files, a folder of images, or drawn shapes."""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.by_hand.cifar10_batches import CLASSES, is_batch, read_batches
from training.by_hand.image_files import SPLITS, classes_of, is_image_of_class, read_files, read_images
from training.by_hand.shapes import SHAPES, draw_shapes
from training.errors import UserError, first_line
from training.utils import write_whole

ON_THE_HUB = "uoft-cs/cifar10"
OFFLINE_HINT = "without a network use --data shapes, or --data FOLDER with CIFAR-10's files or train/CLASS/*.png"
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
    """Read images by name or path; what takes long to read is kept as arrays in one file beside it.

    Args:
        data: ``cifar10`` (the hub), ``shapes`` (drawn here), or a folder or ``.tar.gz`` with CIFAR-10's binary or
            Python batches, or with ``train/CLASS/*.png`` and ``test/CLASS/*.png``.

    Raises:
        UserError: no such data, or a file cannot be used (named).
    """
    path = Path(data).expanduser()
    if data == "shapes":
        return ImageData(list(SHAPES), *(Split(*draw_shapes(*NUM_SHAPES[split])) for split in SPLITS))
    if data == "cifar10":
        import datasets

        return _kept(Path(datasets.config.HF_DATASETS_CACHE) / "cifar10.npz", ON_THE_HUB, _read_hub)
    if not path.exists():
        raise UserError(f"--data {data}: no such file or folder; {OFFLINE_HINT}")
    path = path.resolve()
    try:
        return _kept(path.with_name(f"{path.name}.npz"), _state_of(path), lambda: _read_path(path))
    except UserError as error:
        raise UserError(f"--data {data}: {error}") from error


def _read_path(path: Path) -> ImageData:
    files = read_files(path, lambda name: is_batch(name) or is_image_of_class(name))
    batches = {name.name: content for name, content in files.items() if is_batch(name)}
    if batches:
        return ImageData(CLASSES, *(Split(*read_batches(batches, split)) for split in SPLITS))
    classes = classes_of(files)
    return ImageData(classes, *(Split(*read_images(files, split, classes)) for split in SPLITS))


def _read_hub() -> ImageData:
    from datasets import load_dataset

    try:
        found = load_dataset(ON_THE_HUB)
    except Exception as error:  # the hub's HTTP client has errors of its own, which differ between its versions
        raise UserError(f"--data cifar10: the hub could not be read ({first_line(error)}); {OFFLINE_HINT}") from error
    splits = [
        Split(np.stack([np.asarray(image) for image in found[split]["img"]]), np.array(found[split]["label"]))
        for split in SPLITS
    ]
    return ImageData(found["train"].features["label"].names, *splits)


def _kept(place: Path, state: str, read: Callable[[], ImageData]) -> ImageData:
    """What was read when its source was in this state, or is read now."""
    unusable = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile)
    with contextlib.suppress(*unusable), np.load(place) as kept:
        if kept["state"] == state:
            splits = (Split(kept[f"{split}_images"], kept[f"{split}_labels"]) for split in SPLITS)
            return ImageData(kept["classes"].tolist(), *splits)
    found, buffer = read(), io.BytesIO()
    arrays = {f"{split}_{name}": array for split in SPLITS for name, array in vars(getattr(found, split)).items()}
    np.savez(buffer, state=state, classes=found.classes, **arrays)
    with contextlib.suppress(OSError):  # where nothing can be written, it is read again the next time
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, buffer.getvalue())
    return found


def _state_of(path: Path) -> str:
    """What changes when a file does: how many there are, their bytes, and when the last one was written."""
    files = [file.stat() for file in ([path] if path.is_file() else path.rglob("*"))]
    return f"{len(files)} {sum(file.st_size for file in files)} {max((file.st_mtime_ns for file in files), default=0)}"
