"""Image batches that are equal on any number of ranks: who gets which rows, and augmentation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from learn.by_hand.cifar10 import Split

PADDING = 4  # pixels
# Images, float32, (rows, 3, 32, 32), from -1 to 1; labels, int64, (rows,).
Batch = tuple[torch.Tensor, torch.Tensor]


def training_batches(
    split: Split,
    sampler: DistributedSampler,
    rows_per_rank: int,
    seed: int,
) -> Iterator[Batch]:
    """One rank's shares of an epoch's global batches, with random crops and horizontal flips.

    The sampler shuffles by its seed and epoch (call ``set_epoch``, or every epoch has the order of
    the first) and deals the rows to the ranks like cards. So the k-th batches of all ranks together
    are the k-th group of rows in that order: the same global batch on 1, 2 or 4 ranks.
    """
    # Drawn for all rows of the split, on every rank from the same seed. So how an image is
    # augmented depends on its row and on the epoch, not on the rank that trains on it.
    draws = np.random.default_rng([seed, sampler.epoch]).integers(
        [2 * PADDING + 1, 2 * PADDING + 1, 2], size=(len(split), 3)
    )
    # The last global batch is dropped if it is not full, even if the sampler filled it up: it
    # repeats rows if the ranks do not divide them. All ranks drop it, so all take as many steps:
    # one step more on one rank, and it would wait in its all-reduce forever.
    full = len(split) // (rows_per_rank * sampler.num_replicas)
    for rows in islice(BatchSampler(sampler, rows_per_rank, drop_last=False), full):
        yield to_tensors(crop_and_flip(split.images[rows], draws[rows]), split.labels[rows])


def evaluation_batches(
    split: Split,
    sampler: DistributedSampler,
    rows_per_rank: int,
) -> Iterator[Batch]:
    """One rank's share of the test rows; every row is evaluated on exactly one rank."""
    # A sampler gives all ranks the same number of rows, and repeats the first ones at the end if
    # the ranks do not divide them. Row p of rank r is row r + p x ranks overall, so everything
    # beyond the end is a repeat. Counted twice, it would falsify the accuracy.
    order = enumerate(sampler)
    own = [row for place, row in order if sampler.rank + place * sampler.num_replicas < len(split)]
    for start in range(0, len(own), rows_per_rank):
        rows = own[start : start + rows_per_rank]
        yield to_tensors(split.images[rows], split.labels[rows])


def crop_and_flip(images: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Random crop and horizontal flip; for the crop, the edge pixels are repeated by 4 each way.

    Source: He et al., "Deep Residual Learning", arXiv 1512.03385, section 4.2 (with black edges).

    Args:
        images: uint8, (rows, side, side, 3).
        draws: int64, (rows, 3): top and left of the crop (0 to 8; 4 leaves the image as it was),
            and 1 to flip.
    """
    rows, side = images.shape[:2]
    top, left, flipped = draws.T[:, :, None]  # (rows, 1) each
    # Which row and column of the image each pixel of the crop is taken from, (rows, side). What
    # would be outside is taken from the edge.
    y = (np.arange(side) + top - PADDING).clip(0, side - 1)
    x = (np.arange(side) + left - PADDING).clip(0, side - 1)
    x = np.where(flipped, x[:, ::-1], x)
    # All images in one indexing: (rows, 1, 1), (rows, side, 1) and (rows, 1, side) broadcast to
    # (rows, side, side), and the three colours come along.
    return images[np.arange(rows)[:, None, None], y[:, :, None], x[:, None, :]]


def to_tensors(images: np.ndarray, labels: np.ndarray) -> Batch:
    # (rows, side, side, 3) -> (rows, 3, side, side): convolutions want the channels first.
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    return pixels.float() / 127.5 - 1, torch.from_numpy(labels)  # 0 to 255 becomes -1 to 1
