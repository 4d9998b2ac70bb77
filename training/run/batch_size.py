"""``--batch_size auto``: the largest micro-batch that fits, found before the first step.

Sizes double from one row on. Each is tried with a forward and a backward pass at ``--max_length``,
whose peak says whether the next size would still fit; it is not tried if it would not, so a run
normally meets no out-of-memory error, and ranks that wait for each other inside a pass never lose
one. Optimizer state is allocated before and not touched.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import TrainingFailure
from common.hardware import available_memory
from common.memory import release_free_memory
from training.config import TrainConfig
from training.data.batching import MicroBatch
from training.distributed.ranks import Ranks
from training.facts import STRATEGY_FACTS
from training.parallelism.strategy import Strategy
from training.run.step import forward_backward
from training.tasks import Task

MARGIN = 0.9  # of the memory: fragmentation, validation and other processes take some, too
MOST_ROWS = 256  # beyond, GPUs gain little and fine-tuning gets too few steps
LEAST_STEPS = 20  # optimizer steps per epoch
# On a CPU a larger micro-batch soon only takes longer. From this size on, the next one has to be
# faster by this factor.
ROWS_ON_CPU, LEAST_GAIN = 8, 1.05
GIB = 2**30


@dataclass(frozen=True)
class FoundSize:
    """``rows`` per rank in one micro-batch, the ``peak`` and the ``limit`` of memory in bytes, and why not more."""

    rows: int
    peak: float
    limit: float
    why: str

    def __str__(self) -> str:
        memory = (
            f"peak {self.peak / GIB:.1f} of {self.limit / GIB:.1f} GiB"
            if math.isfinite(self.limit)
            else ""
        )
        return f"{self.rows} rows per rank ({'; '.join(filter(None, [memory, self.why]))})"


def most_rows(train_rows: int, data_ranks: int, accumulation: int) -> int:
    """The largest power of two that leaves enough optimizer steps in an epoch."""
    rows = max(1, train_rows // (LEAST_STEPS * data_ranks * accumulation))
    return min(MOST_ROWS, 2 ** int(math.log2(rows)))


def find_batch_size(
    strategy: Strategy,
    ranks: Ranks,
    target: np.ndarray,
    most: int,
    kept: int | None = None,
    limit: float = math.inf,
) -> FoundSize:
    """Find the size, the same on all ranks; a collective call. The model and torch's random state
    do not change.

    ``target``: of a row, as the task takes it, (1, ...). ``kept``: the size of a run that is
    resumed, tried without a margin and however fast it is. ``limit``: bytes that a rank may use, if
    that is less than what the machine has.

    Raises:
        TrainingFailure: not even one row fits.
    """
    on_cpu, device = ranks.device.type == "cpu", ranks.device
    most, share = (kept, 1.0) if kept else (most, MARGIN)
    try_rows = _trial_of(strategy, ranks, target)
    memory = _Memory(ranks)
    # Every number that decides is the same on all ranks, so that all try the same sizes.
    limit, before = map(
        min, zip(*ranks.gather((min(limit, memory.limit), memory.peak())), strict=True)
    )
    found, speed, rows = None, 0.0, 1
    with torch.random.fork_rng([] if on_cpu else [device]):
        while True:
            trial = try_rows(memory, rows)
            why = f"{rows} rows would not fit"
            if trial is None or trial[1] > share * limit:
                break
            seconds, peak = trial
            if on_cpu and not kept and rows > ROWS_ON_CPU and rows / seconds < LEAST_GAIN * speed:
                why = f"{rows} rows are no faster"
                break
            # Memory grows with the rows. The last doubling added half of what the next one will
            # add, so twice its growth is to be expected; from one row to two it is as much as the
            # first row took.
            growth = (peak - (found.peak if found else before)) * (2 if found else 1)
            found, speed = FoundSize(rows, peak, limit, ""), rows / seconds
            if rows == most:
                why = "" if kept else _why_no_more(most)
                break
            rows = min(2 * rows, most)
            if peak + growth > share * limit:
                why = f"{rows} rows would not fit"
                break
    strategy.optimizer.zero_grad()
    memory.free()
    if found is None:
        raise TrainingFailure(
            f"--batch_size auto: not one row of {strategy.config.max_length} tokens fits in "
            f"{limit / GIB:.1f} GiB; "
            "lower --max_length, or use --activation_checkpointing full or --strategy zero3",
            quiet=not ranks.is_first,
            code="out-of-memory",
        )
    return FoundSize(found.rows, found.peak, limit, why)


def settle_batch_size(
    strategy: Strategy,
    ranks: Ranks,
    targets: np.ndarray,
    earlier: Mapping[str, Any],
    say: Callable[[str], None],
) -> tuple[TrainConfig, int]:
    """The strategy's configuration with a number for ``auto``, and how many rows a micro-batch may
    have here.

    ``targets``: of the training rows, (rows, ...). A resumed run, which ``earlier`` with these
    values, keeps its size; only if that no longer fits are its micro-batches smaller, and more of
    them.
    """
    config = strategy.config
    if config.batch_size != "auto":
        return config, config.batch_size
    kept = earlier["config"]["batch_size"] if earlier else None
    most = most_rows(len(targets), strategy.data_shard.size, config.gradient_accumulation)
    found = find_batch_size(strategy, ranks, targets[:1], most, kept)
    if kept and found.rows < kept:
        say(
            f"batch size auto: this run's {kept} rows no longer fit here: {found}, in more "
            "micro-batches"
        )
    else:
        say(f"batch size auto: {found}")
    return config.model_copy(update={"batch_size": kept or found.rows}), found.rows


def _why_no_more(most: int) -> str:
    return (
        "the most that auto tries" if most == MOST_ROWS else f"an epoch keeps {LEAST_STEPS} steps"
    )


def _trial_of(
    strategy: Strategy, ranks: Ranks, target: np.ndarray
) -> Callable[[_Memory, int], tuple[float, float] | None]:
    """What tries a number of rows: the seconds of the slowest rank and the peak of the fullest; None if one is full."""
    # Under the others, ranks exchange weights within a pass: one that gave up would leave the rest
    # waiting.
    can_give_up = ranks.world_size == 1 or STRATEGY_FACTS[strategy.config.strategy].copies

    def try_rows(memory: _Memory, rows: int) -> tuple[float, float] | None:
        memory.restart()
        batch = _full_batch(rows, strategy.config.max_length, target, strategy.task)
        batch = strategy.to_device(batch)
        seconds = math.inf
        try:
            # Twice: the second pass adds to the gradients of the first, as accumulation does, and
            # is warmed up.
            for _ in range(2):
                began = time.perf_counter()
                with strategy.no_sync():
                    forward_backward(strategy, [batch], step=0)
                seconds = min(seconds, time.perf_counter() - began)
            found = seconds, memory.peak()
        except RuntimeError as error:  # of the GPU's allocator, or of the CPU's
            out_of_memory = isinstance(
                error, torch.OutOfMemoryError
            ) or "can't allocate memory" in str(error)
            if not (out_of_memory and can_give_up):
                raise
            found = None
        strategy.optimizer.zero_grad()
        # A rank that is full says so here, instead of leaving the others in a collective: all of
        # them stop at the same size.
        every = ranks.gather(found)
        return None if None in every else tuple(map(max, zip(*every, strict=True)))

    return try_rows


def _full_batch(rows: int, length: int, target: np.ndarray, task: Task) -> MicroBatch:
    """Rows of the greatest length, one of which is padded, so that the mask takes its memory too."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, -1] = 0
    weights = torch.full((rows,), 1 / rows)
    labels = torch.from_numpy(np.repeat(target, rows, axis=0))
    ids, labels = task.inputs_and_targets(
        torch.ones_like(mask), mask, labels, np.zeros(rows, np.int64), seed=(0,)
    )
    return MicroBatch(ids, mask, labels, weights, np.full(rows, -1), 0, rows * length)


class _Memory:
    """This rank's memory in bytes: what it may use, and the peak since :meth:`restart`.

    On a CPU that is all of the process, and what the machine and the container have left for it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.device = ranks.device
        if self.device.type == "cuda":
            self.free()
            # What nobody has, and what this process holds in reserve and would give to larger
            # tensors.
            self.limit = float(
                torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
            )
        else:
            left = available_memory()
            self.limit = (
                math.inf if left is None else self._status("VmRSS") + left / ranks.local_world_size
            )

    def restart(self) -> None:
        self.free()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        # Where that is not allowed, the peak of the whole process counts.
        with contextlib.suppress(OSError):
            # proc_pid_clear_refs(5): the peak starts at the present size
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return float(torch.cuda.max_memory_reserved(self.device))
        return self._status("VmHWM")

    def free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            release_free_memory()

    def _status(self, key: str) -> float:
        """A size from /proc/self/status; 0 on systems that have none."""
        return next((float(kib) * 1024 for name, kib in _status_lines() if name == key), 0.0)


def _status_lines() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith("kB"):
                yield name, value.split()[0]
