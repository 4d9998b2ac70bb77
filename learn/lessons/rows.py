"""Lesson 3: which rank sees which rows. Copy this file, fill it in, and have it checked.

    cp learn/lessons/rows.py my_solution.py
    python -m learn.check rows my_solution.py

Each rank calls these functions for itself and must know its own rows without asking the other
ranks. So the answer may depend on the arguments only, and both functions leave the global random
generators of ``torch``, ``numpy`` and ``random`` as they are: dropout draws from them.
"""


def training_rows(
    epoch: int,
    rank: int,
    world_size: int,
    num_rows: int,
    batch_size: int,
    seed: int,
) -> list[list[int]]:
    """The rows that a rank trains on, as one list per step of an epoch.

    In each epoch every row from 0 to ``num_rows - 1`` is trained on exactly once, in an order that
    looks random and depends on the seed and on the epoch. A step's rows of all ranks together are
    the global batch, which is the same on any number of ranks. Only the last one may be smaller
    than ``batch_size``. Within a step, no rank has more than one row more than another. All ranks
    have the same number of steps, even if a rank's list for the last one is empty.

    Args:
        rank: 0 to ``world_size - 1``.
        batch_size: rows per step on all ranks together; the number of ranks need not divide it.
    """
    raise NotImplementedError


def evaluation_rows(rank: int, world_size: int, num_rows: int) -> list[tuple[int, bool]]:
    """The rows that a rank evaluates, and for each whether it counts.

    All ranks have the same number of rows, the smallest possible. If the ranks do not divide the
    rows, some rows are repeated to fill up. Every row from 0 to ``num_rows - 1`` counts on exactly
    one rank, once; repeats do not count. ``num_rows`` is at least 1 and may be smaller than the
    number of ranks.
    """
    raise NotImplementedError
