"""Which rank sees which rows, and in which batches.

The order of rows belongs to the data: the global batches of an epoch depend only on the lengths, the seed, the epoch
and the global batch size. Ranks only divide each global batch, so 1, 2 or 4 ranks see the same global batches, and a
resumed run continues with the next one on any number of ranks.

Batches are cut from arrays that every rank maps into memory, in the training process itself. There are no data loader
workers that could die or hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from training.data.dataset import row_numbers
from training.data.teacher import TeacherAnswers
from training.data.tokenized import TokenizedRows
from training.tasks import Task

# Takes labels as they are.
LABELLED = Task(())
# Rows are sorted by length within groups of this many global batches. Measured on AG News: at 50, 2% of tokens are
# padding, against 49% in random batches.
BATCHES_PER_BUCKET = 50


@dataclass(frozen=True)
class MicroBatch:
    """One rank's padded part of a global batch.

    ``input_ids``, ``attention_mask``: int64, (inputs, seq); the mask is None if nothing is padded. An input is a row,
    or one of its windows. ``labels``: (rows, ...), as the task takes them. ``weights``: float32, (rows,), each row's
    weight in the global mean, 0 for a dummy row. ``rows``: row numbers in the training split, of a rough copy its
    original's, -1 for a dummy row.
    ``first_row``: position of the first input in the global batch. ``num_tokens``: tokens without padding.
    ``windows``: int64, (rows, most), which inputs are the windows of a row, then -1; None if every row is one input.
    ``teacher``: float32, (rows, scores), what a teacher answers, and ``is_labelled``: bool, (rows,), which rows have a
    label beside that; None without a teacher.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    labels: torch.Tensor
    weights: torch.Tensor
    rows: np.ndarray
    first_row: int
    num_tokens: int
    windows: torch.Tensor | None = None
    teacher: torch.Tensor | None = None
    is_labelled: torch.Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        tensors = {
            name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        moved = {
            name: tensor.pin_memory().to(device, non_blocking=True)
            for name, tensor in tensors.items()
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class DataShard:
    """Which of ``size`` shares of each global batch a rank works on.

    Ranks that hold parts of the same replica work on the same share, and one of them is its leader. If a replica spans
    the ``stages`` of a pipeline, all micro-batches of a share have the same number of rows.
    """

    rank: int
    size: int
    is_replica_leader: bool = True
    stages: int = 1


class LengthBucketSampler:
    """Global batches of rows of similar length, each row once per epoch, or as many rows of each label.

    Like ``torch.utils.data.DistributedSampler`` it is seeded and told the epoch with :meth:`set_epoch`. Unlike that
    one, it does not repeat or drop rows to give all ranks the same number.

    Args:
        lengths: tokens of each row, (rows,).
        global_batch_size: rows per optimizer step over all ranks; the last batch may have fewer.
        seed: decides the order, together with the epoch.
        balanced: the label of each row, (rows,), to draw as many rows of each; an epoch has as many rows as without.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        global_batch_size: int,
        seed: int,
        balanced: np.ndarray | None = None,
    ) -> None:
        self.lengths = lengths
        self.balanced = balanced
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.epoch = 1

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.global_batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[np.ndarray]:
        """The epoch's global batches: arrays of row numbers, sorted by length within a batch."""
        generator = np.random.default_rng([self.seed, 2, self.epoch])
        order = generator.permutation(row_numbers(len(self.lengths)))
        if self.balanced is not None:
            order = generator.permutation(self._balanced(generator))
        size = self.global_batch_size
        for start in range(0, len(order), BATCHES_PER_BUCKET * size):
            bucket = order[start : start + BATCHES_PER_BUCKET * size]
            bucket[:] = bucket[np.argsort(self.lengths[bucket], kind="stable")]
        # Shuffled, except that the longest batch comes first: what does not fit into memory fails immediately.
        last_rows = order[np.minimum(np.arange(size, len(order) + size, size), len(order)) - 1]
        longest = self.lengths[last_rows].argmax()
        numbers = generator.permutation(row_numbers(len(self)))
        for first in chain([longest], numbers[numbers != longest]):
            yield order[int(first) * size : (int(first) + 1) * size]

    def _balanced(self, generator: np.random.Generator) -> np.ndarray:
        """As many rows as there are, an equal number of each label, give or take one."""
        numbers, labels = row_numbers(len(self.lengths)), np.unique(self.balanced)
        drawn = []
        for number, label in enumerate(labels):
            rows = numbers[self.balanced == label]
            # Which labels get the one more changes from epoch to epoch.
            place = (number + self.epoch) % len(labels)
            count = len(self.lengths) // len(labels) + (place < len(self.lengths) % len(labels))
            # Every row of the label before any of them comes again.
            rounds = [generator.permutation(rows) for _ in range(-(-count // len(rows)))]
            drawn.append(np.concatenate(rounds)[:count])
        return np.concatenate(drawn)


def rank_share(
    rows: TokenizedRows,
    batch: np.ndarray,
    data_shard: DataShard,
    accumulation: int = 1,
    *,
    pad_to_multiple_of: int = 1,
    max_length: int = 2**31,
    speeds: Sequence[float] | None = None,
    class_weights: np.ndarray | None = None,
    task: Task = LABELLED,
    seed: Sequence[int] = (),
    row_weights: np.ndarray | None = None,
    teacher: TeacherAnswers | None = None,
) -> list[MicroBatch]:
    """One rank's micro-batches of a global batch.

    Each rank gets consecutive rows of the batch, padded to the same length on all ranks so that all have equal work. An
    empty share becomes one dummy row of weight 0, because its rank must still take part in the collectives. In a
    pipeline, all micro-batches are filled up with dummy rows.

    ``speeds``, one number per share, divides the rows in proportion; None makes equal shares. ``class_weights``,
    (labels,), and ``row_weights``, (rows of the batch,), are the weights of rows in the mean loss of the batch, which
    are multiplied; None weighs all rows alike. Lengths are rounded up to ``pad_to_multiple_of``, but not beyond
    ``max_length`` tokens. ``task`` makes targets of labels; ``seed`` decides what it draws. ``teacher``: whose answers
    are targets too.
    """
    # The longest row of the *global* batch sets the length, so that no rank waits for another with longer rows.
    length = int(rows.input_lengths(batch).max())
    length = max(length, min(-(-length // pad_to_multiple_of) * pad_to_multiple_of, max_length))

    # Work is divided by inputs, since a row of many windows costs as much as many rows; `place_of` says which row is
    # nearest to a place among them. Without windows both are the same.
    firsts = np.concatenate([[0], np.cumsum(rows.num_inputs(batch))])

    def place_of(inputs: np.ndarray) -> list[int]:
        return np.interp(inputs, firsts, np.arange(len(firsts))).round().astype(int).tolist()

    # The shares end where the running sum of the speeds does, rounded to whole rows: every row is in exactly one share.
    ends = np.cumsum([0.0, *(speeds or [1.0] * data_shard.size)])
    start, stop = place_of(ends[data_shard.rank : data_shard.rank + 2] / ends[-1] * firsts[-1])

    if data_shard.stages > 1:
        # A pipeline passes hidden states of one shape, so all its micro-batches get the same number of rows.
        size = max(1, -(-(stop - start) // accumulation))
        edges = [min(start + i * size, stop) for i in range(accumulation + 1)]
    else:
        size = 1
        edges = place_of(np.linspace(firsts[start], firsts[stop], accumulation + 1))
    # Every rank knows all rows of the batch, so the weights of all shares add up to 1 without asking the others.
    weights = (
        task.predicted(rows.lengths[batch])
        if class_weights is None
        else class_weights[rows.labels[batch]]
    )
    weights = weights if row_weights is None else weights * row_weights
    weights = weights / weights.sum()
    ask = partial(task.ask, seed=seed)
    return [
        _micro_batch(
            rows,
            batch,
            weights,
            edges[i],
            edges[i + 1],
            length,
            size,
            int(firsts[edges[i]]),
            ask,
            teacher,
        )
        for i in range(accumulation)
    ]


def _micro_batch(
    rows: TokenizedRows,
    batch: np.ndarray,
    weights: np.ndarray,
    start: int,
    stop: int,
    length: int,
    least_rows: int,
    first_row: int,
    ask: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    teacher: TeacherAnswers | None,
) -> MicroBatch:
    own = batch[start:stop]
    num_dummies = max(0, least_rows - len(own))
    chosen = np.concatenate([own, np.repeat(batch[:1], num_dummies)])
    # A row has its weight in the global mean wherever it is computed: shares need not be equal. Dummies weigh 0.
    own_weights = np.concatenate([weights[start:stop], np.zeros(num_dummies)]).astype(np.float32)
    input_ids, attention_mask = pad(rows, chosen, length)
    input_ids, targets = ask(
        input_ids, attention_mask, torch.from_numpy(rows.labels[chosen]), chosen
    )
    return MicroBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        labels=targets,
        weights=torch.from_numpy(own_weights),
        rows=np.concatenate([rows.originals(own), np.full(num_dummies, -1, own.dtype)]),
        first_row=first_row,
        num_tokens=int(rows.lengths[own].sum()),
        windows=torch.from_numpy(_places(rows.num_inputs(chosen))) if rows.window else None,
        teacher=torch.from_numpy(teacher.of(rows.originals(chosen))) if teacher else None,
        is_labelled=torch.from_numpy(teacher.has_label(rows.originals(chosen)))
        if teacher
        else None,
    )


def _places(counts: np.ndarray) -> np.ndarray:
    """Which inputs are the windows of each row, (rows, most), -1 behind its last one."""
    within = np.arange(counts.max())
    return np.where(within < counts[:, None], (np.cumsum(counts) - counts)[:, None] + within, -1)


def pad(
    rows: TokenizedRows, index: np.ndarray, length: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chosen rows as one padded batch: ids and mask, int64, (inputs, length); padding has id 0 and mask 0.

    The mask is None if nothing is padded: attention then uses its fastest kernel, and a GPU need not be asked.
    """
    lengths = rows.input_lengths(index)
    mask = np.arange(length) < lengths[:, None]
    ids = np.zeros((len(lengths), length), dtype=np.int64)
    ids[mask] = np.concatenate([rows.ids[rows.offsets[i] : rows.offsets[i + 1]] for i in index])
    return torch.from_numpy(ids), None if mask.all() else torch.from_numpy(mask.astype(np.int64))
