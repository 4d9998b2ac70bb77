"""Batches of images: the same ones on any number of ranks, and every test row once."""

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from learn.by_hand.batches import crop_and_flip, evaluation_batches, training_batches
from learn.by_hand.cifar10 import Split

ROWS = 59  # one less than a multiple of the batch: ranks whose shares are filled up have one batch more


@pytest.fixture
def split() -> Split:
    """Random images, each labelled with its own row."""
    generator = np.random.default_rng(0)
    return Split(generator.integers(256, size=(ROWS, 32, 32, 3)).astype(np.uint8), np.arange(ROWS))


def global_batches(split: Split, world_size: int, epoch: int) -> list[dict[int, torch.Tensor]]:
    """What all ranks see of an epoch, as images by row."""
    shares = []
    for rank in range(world_size):
        sampler = DistributedSampler(split, world_size, rank, seed=4)
        sampler.set_epoch(epoch)
        shares.append(list(training_batches(split, sampler, 12 // world_size, seed=4)))
    return [
        {row.item(): image for images, rows in share for image, row in zip(images, rows, strict=True)}
        for share in zip(*shares, strict=True)
    ]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_number_of_ranks_sees_the_same_global_batches(split: Split, world_size: int) -> None:
    alone, together = (global_batches(split, size, epoch=2) for size in (1, world_size))

    assert [len(batch) for batch in alone] == [12] * 4
    assert [batch.keys() for batch in together] == [batch.keys() for batch in alone]
    for ours, theirs in zip(together, alone, strict=True):
        assert all(torch.equal(ours[row], theirs[row]) for row in theirs)


def test_another_epoch_has_another_order_and_other_augmentations(split: Split) -> None:
    first, second = (
        {row: image for batch in global_batches(split, 1, epoch) for row, image in batch.items()} for epoch in (1, 2)
    )

    assert list(first) != list(second)
    assert sum(torch.equal(first[row], second[row]) for row in first.keys() & second.keys()) < 5


@pytest.mark.parametrize("rows", [0, 1, 3, ROWS])
@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_every_test_row_is_some_ranks_once(split: Split, world_size: int, rows: int) -> None:
    split = Split(split.images[:rows], split.labels[:rows])

    seen = [
        row
        for rank in range(world_size)
        for _, labels in evaluation_batches(split, DistributedSampler(split, world_size, rank, shuffle=False), 4)
        for row in labels.tolist()
    ]

    assert sorted(seen) == list(range(rows))


def test_a_crop_is_of_the_image_with_its_edges_repeated_and_then_flipped(split: Split) -> None:
    draws = np.array([[4, 4, 0], [0, 8, 0], [8, 1, 1]])

    whole, from_the_top_right, from_the_bottom_flipped = crop_and_flip(split.images[:3], draws)

    padded = np.pad(split.images[:3], ((0, 0), (4, 4), (4, 4), (0, 0)), mode="edge")
    assert np.array_equal(whole, split.images[0])
    assert np.array_equal(from_the_top_right, padded[1, 0:32, 8:40])
    assert np.array_equal(from_the_bottom_flipped, padded[2, 8:40, 1:33][:, ::-1])
