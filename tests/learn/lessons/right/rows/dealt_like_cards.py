"""Each batch is dealt to the ranks like cards."""

import torch


def training_rows(epoch: int, rank: int, world_size: int, num_rows: int, batch_size: int, seed: int) -> list[list[int]]:
    # One number from both: with seed + epoch, epoch 1 of seed 0 would be epoch 0 of seed 1.
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(num_rows, generator=generator).tolist()
    batches = [order[start : start + batch_size] for start in range(0, num_rows, batch_size)]
    return [batch[rank::world_size] for batch in batches]


def evaluation_rows(rank: int, world_size: int, num_rows: int) -> list[tuple[int, bool]]:
    rows_per_rank = -(-num_rows // world_size)
    places = range(rank, rows_per_rank * world_size, world_size)
    return [(place % num_rows, place < num_rows) for place in places]
