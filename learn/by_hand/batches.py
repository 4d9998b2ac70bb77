"""Batches of images, the same ones whatever the number of ranks: who gets which rows, and the data augmentation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from learn.by_hand.cifar10 import Split

PADDING = 4  # pixels
Batch = tuple[torch.Tensor, torch.Tensor]  # images, float32, (rows, 3, 32, 32), from -1 to 1; labels, int64, (rows,)


def training_batches(split: Split, sampler: DistributedSampler, rows_per_rank: int, seed: int) -> Iterator[Batch]:
    """One rank's shares of an epoch's global batches, with data augmentation: random crops and horizontal flips.

    The sampler shuffles by its seed and epoch (``set_epoch``: without it every epoch has the order of the first) and
    deals the rows out like cards, so the k-th batches of all ranks are together the k-th run of rows in that order:
    the same global batch on 1, 2 or 4 ranks. The last one is left out where it is not full, also where the sampler has
    filled it up: it repeats rows where the ranks do not divide them. How an image is augmented depends on its row, not
    on who trains on it.

    Args:
        split: the training images.
        sampler: over them, with the epoch set.
        rows_per_rank: of a batch.
        seed: with the epoch, decides how images are augmented.
    """
    draws = np.random.default_rng([seed, sampler.epoch]).integers(
        [2 * PADDING + 1, 2 * PADDING + 1, 2], size=(len(split), 3)
    )
    full = len(split) // (rows_per_rank * sampler.num_replicas)
    for rows in islice(BatchSampler(sampler, rows_per_rank, drop_last=False), full):
        yield to_tensors(crop_and_flip(split.images[rows], draws[rows]), split.labels[rows])


def evaluation_batches(split: Split, sampler: DistributedSampler, rows_per_rank: int) -> Iterator[Batch]:
    """One rank's share of the test rows, each of which is some rank's once.

    A sampler gives every rank as many rows as any other, and where the ranks do not divide them, repeats the first
    ones at the end. The row at place p of rank r stands at r + p x ranks in the order of all; past its end are repeats.
    """
    order = enumerate(sampler)
    own = [row for place, row in order if sampler.rank + place * sampler.num_replicas < len(split)]
    for start in range(0, len(own), rows_per_rank):
        rows = own[start : start + rows_per_rank]
        yield to_tensors(split.images[rows], split.labels[rows])


def crop_and_flip(images: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Random crop and horizontal flip: a cut of each image, its edges repeated by 4 pixels on all sides; flip some.

    Source: He et al., "Deep Residual Learning", arXiv 1512.03385, section 4.2 (there with black edges).

    Args:
        images: uint8, (rows, side, side, 3).
        draws: int64, (rows, 3): where the cut begins, from the top and from the left (0 to 8; 4 is the image as it
            was), and 1 to flip.
    """
    rows, side = images.shape[:2]
    top, left, flipped = draws.T[:, :, None]
    y = (np.arange(side) + top - PADDING).clip(0, side - 1)
    x = (np.arange(side) + left - PADDING).clip(0, side - 1)
    x = np.where(flipped, x[:, ::-1], x)
    return images[np.arange(rows)[:, None, None], y[:, :, None], x[:, None, :]]


def to_tensors(images: np.ndarray, labels: np.ndarray) -> Batch:
    """Images and labels as a network reads them."""
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    return pixels.float() / 127.5 - 1, torch.from_numpy(labels)
