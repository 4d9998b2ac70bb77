"""Which rank sees which rows, and in which batches.

The order of rows belongs to the data: the global batches of an epoch depend only on the lengths,
the seed, the epoch and the global batch size. Ranks only divide each global batch, so 1, 2 or 4
ranks see the same global batches, and a resumed run continues with the next one on any number of
ranks.

Batches are cut from arrays that every rank maps into memory, in the training process itself. There
are no data loader workers that could die or hang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import torch

from training.data.dataset import row_numbers
from training.data.teacher import TeacherAnswers
from training.data.tokenized import TokenizedRows
from training.tasks import Task

# Takes labels as they are.
LABELLED = Task(())
# Rows are sorted by length within groups of this many global batches. Measured on AG News: at 50,
# 2% of tokens are padding, against 49% in random batches.
BATCHES_PER_BUCKET = 50


@dataclass(frozen=True)
class MicroBatch:
    """One rank's padded part of a global batch.

    ``input_ids``, ``attention_mask``: int64, (inputs, seq); the mask is None if nothing is padded.
    An input is a row, or one of its windows. ``labels``: (rows, ...), as the task takes them.
    ``weights``: float32, (rows,), each row's weight in the global mean, 0 for a dummy row.
    ``rows``: row numbers in the training split, of a rough copy its original's, -1 for a dummy row.
    ``first_row``: position of the first input in the global batch. ``num_tokens``: tokens without
    padding.
    ``windows``: int64, (rows, most), which inputs are the windows of a row, then -1; None if every
    row is one input.
    ``teacher``: float32, (rows, scores), what a teacher answers, and ``is_labelled``: bool,
    (rows,), which rows have a label beside that; None without a teacher.
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
        # Pinned, so that the host does not wait for the copy.
        moved = {
            name: value.pin_memory().to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class DataShard:
    """Which of ``size`` shares of each global batch a rank works on.

    Ranks that hold parts of the same replica work on the same share, and one of them is its leader.
    If a replica spans the ``stages`` of a pipeline, all micro-batches of a share have the same
    number of rows.
    """

    rank: int
    size: int
    is_replica_leader: bool = True
    stages: int = 1


class LengthBucketSampler:
    """Global batches of rows of similar length: each row once per epoch, or labels balanced.

    Like ``torch.utils.data.DistributedSampler`` it is seeded and told the epoch with
    :meth:`set_epoch`. Unlike that one, it does not repeat or drop rows to give all ranks the same
    number.

    Args:
        lengths: tokens of each row, (rows,).
        global_batch_size: rows per optimizer step over all ranks; the last batch may have fewer.
        seed: decides the order, together with the epoch.
        balanced: the label of each row, (rows,), to draw as many rows of each label per epoch.
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
        # The epoch is part of the seed, so an epoch's order can be made again without those before
        # it: that is how a run is resumed in the middle of one.
        generator = np.random.default_rng([self.seed, 2, self.epoch])
        order = generator.permutation(row_numbers(len(self.lengths)))
        if self.balanced is not None:
            order = generator.permutation(self._balanced(generator))
        size = self.global_batch_size
        # Within a bucket neighbours have about the same length, so cutting it into batches leaves
        # little to pad. A bucket is a view, so sorting it sorts the order. The sort is stable:
        # equal lengths stay shuffled.
        for start in range(0, len(order), BATCHES_PER_BUCKET * size):
            bucket = order[start : start + BATCHES_PER_BUCKET * size]
            bucket[:] = bucket[np.argsort(self.lengths[bucket], kind="stable")]
        # Shuffled, except that the longest batch comes first: what does not fit into memory fails
        # immediately.
        # The last row of each batch is its longest.
        last_rows = order[np.minimum(np.arange(size, len(order) + size, size), len(order)) - 1]
        longest = self.lengths[last_rows].argmax()
        numbers = generator.permutation(row_numbers(len(self)))
        # Sorted batches in a row would train on short texts first and on long ones last; `numbers`
        # shuffles whole batches.
        for first in chain([longest], numbers[numbers != longest]):
            yield order[int(first) * size : (int(first) + 1) * size]

    def _balanced(self, generator: np.random.Generator) -> np.ndarray:
        """As many rows as there are, an equal number of each label, give or take one."""
        numbers, labels = row_numbers(len(self.lengths)), np.unique(self.balanced)
        drawn = []
        for number, label in enumerate(labels):
            rows = numbers[self.balanced == label]
            # Which labels get the one more changes from epoch to epoch.
            position = (number + self.epoch) % len(labels)
            count = len(self.lengths) // len(labels) + (position < len(self.lengths) % len(labels))
            # Every row of the label before any of them comes again.
            rounds = [generator.permutation(rows) for _ in range(-(-count // len(rows)))]
            drawn.append(np.concatenate(rounds)[:count])
        return np.concatenate(drawn)


@dataclass(frozen=True)
class Padding:
    """Rounds lengths up to a multiple, but not beyond ``max_length`` tokens."""

    multiple_of: int = 1
    max_length: int = 2**31

    def length(self, longest: int) -> int:
        rounded = -(-longest // self.multiple_of) * self.multiple_of
        return max(longest, min(rounded, self.max_length))


@dataclass(frozen=True)
class Targets:
    """What a batch is trained towards, and what each of its rows weighs in the mean loss.

    ``task`` makes targets of labels; ``seed`` decides what it draws. ``class_weights``, (labels,),
    and ``row_weights``, (rows of the batch,), are multiplied; None weighs all rows alike.
    ``teacher``: whose answers are targets too.
    """

    task: Task = LABELLED
    seed: Sequence[int] = ()
    class_weights: np.ndarray | None = None
    row_weights: np.ndarray | None = None
    teacher: TeacherAnswers | None = None

    def weights(self, rows: TokenizedRows, batch: np.ndarray) -> np.ndarray:
        """(rows,); they add up to 1 over the global batch."""
        if self.class_weights is None:
            weights = self.task.predicted(rows.lengths[batch])
        else:
            weights = self.class_weights[rows.labels[batch]]
        if self.row_weights is not None:
            weights = weights * self.row_weights
        # Divided here and not by each rank: the sum goes over the whole batch, of which a rank
        # computes a part.
        return weights / weights.sum()


def micro_batches_of_rank(
    rows: TokenizedRows,
    batch: np.ndarray,
    data_shard: DataShard,
    accumulation: int = 1,
    *,
    padding: Padding = Padding(),
    speeds: Sequence[float] | None = None,
    targets: Targets = Targets(),
) -> list[MicroBatch]:
    """One rank's micro-batches of a global batch.

    Each rank gets consecutive rows of the batch, padded to the same length on all ranks so that all
    have equal work. Dummy rows of weight 0 fill up what is too small.

    ``speeds``, one number per share, divides the rows in proportion; None makes equal shares.
    """
    # The longest row of the *global* batch sets the length, so that no rank waits for another with
    # longer rows.
    length = padding.length(int(rows.input_lengths(batch).max()))
    # At which input of the batch each row begins, and the last one ends, (rows + 1,).
    firsts = np.concatenate([[0], np.cumsum(rows.num_inputs(batch))])
    edges, least_rows = _edges(firsts, data_shard, accumulation, speeds)
    # Every rank knows all rows of the batch, so the weights of all shares add up to 1 without
    # asking the others. A row has its weight wherever it is computed: shares need not be equal.
    weights = targets.weights(rows, batch)
    # An empty share becomes one dummy row, because its rank must still take part in the
    # collectives: without it the others would wait forever.
    return [
        _micro_batch(
            rows,
            batch[start:stop],
            weights[start:stop],
            dummies=np.repeat(batch[:1], max(0, least_rows - (stop - start))),
            length=length,
            first_row=int(firsts[start]),
            targets=targets,
        )
        for start, stop in pairwise(edges)
    ]


def _edges(
    firsts: np.ndarray, data_shard: DataShard, accumulation: int, speeds: Sequence[float] | None
) -> tuple[list[int], int]:
    """Where this rank's micro-batches begin and end, and how many rows each has at least."""

    # Work is divided by inputs, since a row of many windows costs as much as many rows; this says
    # which row is nearest to a place among them. Without windows both are the same.
    def place_of(inputs: np.ndarray) -> list[int]:
        return np.interp(inputs, firsts, np.arange(len(firsts))).round().astype(int).tolist()

    # The shares end where the running sum of the speeds does, rounded to whole rows. All ranks
    # round the same numbers, so every row is in exactly one share.
    ends = np.cumsum([0.0, *(speeds or [1.0] * data_shard.size)])
    start, stop = place_of(ends[data_shard.rank : data_shard.rank + 2] / ends[-1] * firsts[-1])
    if data_shard.stages == 1:
        return place_of(np.linspace(firsts[start], firsts[stop], accumulation + 1)), 1
    # A pipeline passes hidden states of one shape between its stages, so all its micro-batches get
    # the same number of rows.
    size = max(1, -(-(stop - start) // accumulation))
    return [min(start + i * size, stop) for i in range(accumulation + 1)], size


def _micro_batch(
    rows: TokenizedRows,
    own: np.ndarray,
    weights: np.ndarray,
    *,
    dummies: np.ndarray,
    length: int,
    first_row: int,
    targets: Targets,
) -> MicroBatch:
    chosen = np.concatenate([own, dummies])
    # Dummies weigh 0: they take part in the computation, but not in the loss.
    own_weights = np.concatenate([weights, np.zeros(len(dummies))]).astype(np.float32)
    ids, mask = pad(rows, chosen, length)  # (inputs, seq)
    labels, originals = torch.from_numpy(rows.labels[chosen]), rows.originals(chosen)
    # The task may change the ids too: a masked language model hides some of them.
    input_ids, asked = targets.task.inputs_and_targets(ids, mask, labels, chosen, targets.seed)
    teacher = targets.teacher
    return MicroBatch(
        input_ids=input_ids,
        attention_mask=mask,
        labels=asked,
        weights=torch.from_numpy(own_weights),
        rows=np.concatenate([originals[: len(own)], np.full(len(dummies), -1, own.dtype)]),
        first_row=first_row,
        num_tokens=int(rows.lengths[own].sum()),
        windows=torch.from_numpy(_places(rows.num_inputs(chosen))) if rows.window else None,
        teacher=torch.from_numpy(teacher.of(originals)) if teacher else None,
        is_labelled=torch.from_numpy(teacher.has_label(originals)) if teacher else None,
    )


def _places(counts: np.ndarray) -> np.ndarray:
    """Which inputs are the windows of each row, (rows, most), -1 behind its last one."""
    within = np.arange(counts.max())
    return np.where(within < counts[:, None], (np.cumsum(counts) - counts)[:, None] + within, -1)


def pad(
    rows: TokenizedRows, index: np.ndarray, length: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chosen rows, padded: ids and mask, int64, (inputs, length); padding has 0 in both.

    The mask is None if nothing is padded: attention then uses its fastest kernel, and a GPU need
    not be asked.
    """
    lengths = rows.input_lengths(index)
    mask = np.arange(length) < lengths[:, None]
    ids = np.zeros((len(lengths), length), dtype=np.int64)
    # The mask is true row by row from the left, so the joined tokens fall into their places.
    ids[mask] = np.concatenate([rows.ids[rows.offsets[i] : rows.offsets[i + 1]] for i in index])
    return torch.from_numpy(ids), None if mask.all() else torch.from_numpy(mask.astype(np.int64))
