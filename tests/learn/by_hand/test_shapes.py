"""Drawn shapes: ten classes, of random place, size and colour, the same for the same seed."""

import numpy as np

from learn.by_hand.shapes import NOISE, SHAPES, draw_shapes


def test_the_same_seed_draws_the_same_images_and_another_others() -> None:
    (images, labels), (again, labels_again), (others, _) = (draw_shapes(50, seed) for seed in (1, 1, 2))

    assert images.shape == (50, 32, 32, 3)
    assert images.dtype == np.uint8
    assert np.array_equal(images, again)
    assert np.array_equal(labels, labels_again)
    assert not np.array_equal(images, others)


def test_every_class_is_drawn_as_often_as_chance_has_it_and_stands_out_from_its_background() -> None:
    images, labels = draw_shapes(500, seed=0)

    counts = np.bincount(labels, minlength=len(SHAPES))
    assert len(counts) == 10
    assert counts.min() > 25
    assert counts.max() < 80
    for label in range(len(SHAPES)):
        spread = images[labels == label].astype(float).std(axis=(1, 2)).mean(axis=1)
        assert np.median(spread) > 1.5 * NOISE
