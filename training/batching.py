"""Who sees which rows and in which batches.

The order of rows belongs to the data: an epoch's global batches are a function of the lengths, the seed, the epoch
and the global batch size alone. Ranks only cut each global batch into shares, so 1, 2 or 4 ranks see the same
global batches, and a resumed run goes on at the very next one on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from training.tokenized import TokenizedRows

# Rows are sorted by length within groups of this many global batches. Measured on AG News: 2% of tokens are
# padding at 50, against 49% in batches drawn at random.
BATCHES_PER_BUCKET = 50


@dataclass(frozen=True)
class MicroBatch:
    """One rank's padded share of a global batch.

    ``input_ids``, ``attention_mask``: int64, (rows, seq); ``labels``: int64, (rows,); ``weights``: float32, (rows,),
    each row's share in the global mean, 0 for a stand-in; ``rows``: its row numbers in the training split;
    ``first_row``: position of its first row in the global batch; ``num_tokens``: tokens without padding.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    rows: np.ndarray
    first_row: int
    num_tokens: int

    def to(self, device: torch.device) -> MicroBatch:
        """The same with its tensors on ``device``."""
        if device.type == "cpu":
            return self
        tensors = (self.input_ids, self.attention_mask, self.labels, self.weights)
        moved = (tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)
        return MicroBatch(*moved, self.rows, self.first_row, self.num_tokens)


class LengthBucketSampler:
    """Global batches of rows of like length, each row once an epoch.

    Like ``torch.utils.data.DistributedSampler`` it is seeded and told the epoch by :meth:`set_epoch`; unlike it, no
    row is repeated or dropped to even out the ranks.

    Args:
        lengths: tokens of each row, (rows,).
        global_batch_size: rows of an optimizer step over all ranks; the last batch may have fewer.
        seed: with the epoch, decides the order.
    """

    def __init__(self, lengths: np.ndarray, global_batch_size: int, seed: int) -> None:
        self.lengths = lengths
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.epoch = 1

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.global_batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order :meth:`__iter__` gives, counted from 1."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[np.ndarray]:
        """The epoch's global batches: arrays of row numbers, sorted by length within a batch."""
        generator = np.random.default_rng([self.seed, 2, self.epoch])
        order = generator.permutation(len(self.lengths))
        bucket_size = BATCHES_PER_BUCKET * self.global_batch_size
        batches: list[np.ndarray] = []
        for start in range(0, len(order), bucket_size):
            bucket = order[start : start + bucket_size]
            bucket = bucket[np.argsort(self.lengths[bucket], kind="stable")]
            batches += [bucket[i : i + self.global_batch_size] for i in range(0, len(bucket), self.global_batch_size)]
        yield from self._longest_first(batches, generator)

    def _longest_first(self, batches: list[np.ndarray], generator: np.random.Generator) -> list[np.ndarray]:
        """Shuffled, but for the longest in front: what will not fit into memory fails at once."""
        longest = max(range(len(batches)), key=lambda i: self.lengths[batches[i]].max())
        others = [i for i in generator.permutation(len(batches)) if i != longest]
        return [batches[i] for i in [longest, *others]]


def rank_share(
    rows: TokenizedRows,
    batch: np.ndarray,
    rank: int,
    world_size: int,
    accumulation: int = 1,
    pad_to_multiple_of: int = 1,
) -> list[MicroBatch]:
    """One rank's micro-batches of a global batch.

    Every rank gets an even run of the batch's rows, padded to the same length, so that all have the same work. A
    share without rows becomes one stand-in row of weight 0: its rank must still take part in the collectives.

    Returns:
        ``accumulation`` micro-batches.
    """
    length = int(rows.lengths[batch].max())
    length = -(-length // pad_to_multiple_of) * pad_to_multiple_of
    edges = np.linspace(0, len(batch), world_size * accumulation + 1).round().astype(int)
    shares = range(rank * accumulation, (rank + 1) * accumulation)
    return [_micro_batch(rows, batch, int(edges[i]), int(edges[i + 1]), length) for i in shares]


def _micro_batch(rows: TokenizedRows, batch: np.ndarray, start: int, stop: int, length: int) -> MicroBatch:
    mine = batch[start:stop]
    stand_in = len(mine) == 0
    chosen = batch[:1] if stand_in else mine
    input_ids, attention_mask = pad(rows, chosen, length)
    return MicroBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        labels=torch.from_numpy(rows.labels[chosen]),
        weights=torch.full((len(chosen),), 0.0 if stand_in else 1 / len(batch)),
        rows=mine,
        first_row=start,
        num_tokens=int(rows.lengths[mine].sum()),
    )


def pad(rows: TokenizedRows, index: np.ndarray, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen rows side by side: ids and mask, int64, (rows, length); padding has id 0 and mask 0."""
    lengths = rows.lengths[index]
    mask = np.arange(length) < lengths[:, None]
    ids = np.zeros((len(index), length), dtype=np.int64)
    ids[mask] = np.concatenate([rows.ids[rows.offsets[i] : rows.offsets[i + 1]] for i in index])
    return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))
