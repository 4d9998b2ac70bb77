"""Each rank has a block of each batch, and a block of the test rows."""

import numpy as np


def training_rows(
    epoch: int, rank: int, world_size: int, num_rows: int, batch_size: int, seed: int
) -> list[np.ndarray]:
    order = np.random.default_rng([seed, epoch]).permutation(num_rows)
    batches = np.split(order, range(batch_size, num_rows, batch_size))
    return [np.array_split(batch, world_size)[rank] for batch in batches]


def evaluation_rows(rank: int, world_size: int, num_rows: int) -> list[tuple[int, bool]]:
    rows = np.array_split(np.arange(num_rows), world_size)[rank].tolist()
    missing = -(-num_rows // world_size) - len(rows)
    return [(row, True) for row in rows] + [(0, False)] * missing
