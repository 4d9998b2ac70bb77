"""Drawn shapes in ten classes: images to train on without a data set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Plane = np.ndarray  # one number or truth value per pixel, (images, side, side)
SIDE = 32  # pixels
SIZES = 8.0, 14.0  # pixels from the centre to the outermost point
CONTRASTS = 70, 186  # of 255, by which shape and background differ in each colour
NOISE = 14.0  # of 255, standard deviation


def _longer(u: Plane, v: Plane) -> Plane:
    """The larger of the two coordinates' sizes, which is equal along the edges of a square."""
    return np.maximum(np.abs(u), np.abs(v))


def _star(u: Plane, v: Plane) -> Plane:
    """Five points: the radius falls and rises between 1 and 0.4 as the angle goes round."""
    turn = (np.arctan2(v, u) / (2 * np.pi) * 5) % 1
    return np.hypot(u, v) < 0.4 + 0.6 * np.abs(2 * turn - 1) ** 1.5


# Each tells which pixels belong to the shape, by coordinates in which it is of size 1.
SHAPES: dict[str, Callable[[Plane, Plane], Plane]] = {
    "circle": lambda u, v: np.hypot(u, v) < 1,
    "ring": lambda u, v: np.abs(np.hypot(u, v) - 0.8) < 0.2,
    "square": lambda u, v: _longer(u, v) < 0.75,
    "frame": lambda u, v: np.abs(_longer(u, v) - 0.65) < 0.15,
    "triangle": lambda u, v: (v > -0.5) & (np.sqrt(3) * np.abs(u) + v < 1),
    "star": _star,
    "cross": lambda u, v: (np.minimum(np.abs(u), np.abs(v)) < 0.22) & (_longer(u, v) < 0.95),
    "bar": lambda u, v: (np.abs(u) < 1) & (np.abs(v) < 0.25),
    "bars": lambda u, v: (np.abs(u) < 0.9) & (np.abs(np.abs(v) - 0.5) < 0.2),
    "crescent": lambda u, v: (np.hypot(u, v) < 1) & (np.hypot(u - 0.5, v) > 0.8),
}


def draw_shapes(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of one shape each: random class, place, size, turn and colours, with noise.

    Returns:
        Pixels, uint8, (count, 32, 32, 3), and labels, int64, (count,), in the order of
        :data:`SHAPES`.
    """
    # One generator, one seed: every rank draws the same images, so nothing has to be sent.
    generator = np.random.default_rng(seed)
    labels = generator.integers(len(SHAPES), size=count)
    inside = _inside(labels, generator)
    background = generator.integers(256, size=(count, 1, 1, 3))
    # Modulo 256: a colour too bright begins again at black, which is as far away.
    foreground = (background + generator.integers(*CONTRASTS, size=(count, 1, 1, 3))) % 256
    # In int16, where noise can go below 0 and above 255 before it is clipped. In place, because
    # the noise is the largest array here.
    pixels = np.where(inside[..., None], foreground.astype(np.int16), background.astype(np.int16))
    noise = generator.standard_normal(pixels.shape, dtype=np.float32)
    noise *= NOISE
    pixels += np.floor(noise, out=noise).astype(np.int16)
    return pixels.clip(0, 255).astype(np.uint8), labels


def _inside(labels: np.ndarray, generator: np.random.Generator) -> Plane:
    count = len(labels)
    size = generator.uniform(*SIZES, size=count)
    # So far from the edges that the whole shape is visible.
    centre = SIDE / 2 + (SIDE / 2 - size) * generator.uniform(-1, 1, size=(2, count))
    turn = generator.uniform(0, 2 * np.pi, size=(count, 1, 1))
    pixel = np.arange(SIDE, dtype=np.float32) + 0.5
    # From pixels to the shape's own coordinates: moved to its centre, scaled to size 1, turned.
    y, x = ((pixel - along[:, None]) / size[:, None] for along in centre)  # (count, side) each
    x, y = x[:, None, :], y[:, :, None]
    u, v = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    inside = np.empty(u.shape, dtype=bool)
    for label, belongs in enumerate(SHAPES.values()):
        rows = labels == label
        inside[rows] = belongs(u[rows], v[rows])
    return inside
